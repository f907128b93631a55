"""The server: REST and gRPC frontends, executors, and an immutable map of model versions."""

__version__ = "0.1.0"  # pyproject.toml takes the distribution's version from here

__all__ = ["__version__"]
