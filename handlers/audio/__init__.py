"""Voice activity in recordings."""
