"""The control plane: which versions are wanted, which there are, and the one writer that brings them together."""
