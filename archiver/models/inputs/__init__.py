"""Example inputs, samples, sizes that may vary, and running a model on them."""
