"""Rewrites of a graph that keep its function."""
