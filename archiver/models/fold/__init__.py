"""Graph rewrites that keep the computed function."""
