"""Quantized candidates of a model, and the choice between them."""
