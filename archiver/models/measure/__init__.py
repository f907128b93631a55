"""Comparison of two models: how far their outputs differ, and the cost of each."""
