"""The server: REST and gRPC in front, executors behind, one immutable map of versions between them."""

from importlib.metadata import version

__version__: str = version("torchere")

__all__ = ["__version__"]
