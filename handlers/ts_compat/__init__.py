"""The module paths of TorchServe, and the code that only they need."""
