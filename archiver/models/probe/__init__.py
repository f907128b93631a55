"""Derivation of a model's signature by running the model."""
