"""Log lines, and where they are written."""
