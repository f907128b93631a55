"""Batching of the requests of one version: a bounded queue, a pure policy, and the batchers."""
