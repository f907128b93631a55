"""The module paths of TorchServe, and what only they need."""
