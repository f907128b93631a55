"""The comparison of a packed model with the original, and its report."""
