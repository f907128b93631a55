"""Detection of the kinds of model files, and of code that loading them would run."""
