"""Models as their authors have them, read safely."""
