"""The server: REST and gRPC frontends, executors, and an immutable map of model versions."""

__version__ = "0.1.0"  # also the distribution's, by pyproject.toml

__all__ = ["__version__"]
