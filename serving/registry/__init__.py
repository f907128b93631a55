"""The control plane: desired versions, actual versions, and the reconciler between them."""
