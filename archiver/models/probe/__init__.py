"""What a model takes and gives, found by running it."""
