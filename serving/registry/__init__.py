"""The control plane: which versions are wanted, which there are, and who brings the two together."""
