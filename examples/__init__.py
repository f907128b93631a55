"""Runnable examples: `python -m examples.NAME.demo` from the root of the repository."""
