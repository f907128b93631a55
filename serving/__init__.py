"""The server: REST and gRPC frontends, executors, and an immutable map of model versions."""

from importlib.metadata import version

__version__: str = version("torchere")

__all__ = ["__version__"]
