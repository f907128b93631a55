"""Files of models: what they are, and whether loading them runs code."""
