"""Converters to the model formats of an archive."""
