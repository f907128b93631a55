"""What the suite of real clients needs: models, and servers that serve them."""
