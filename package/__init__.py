"""Packs PyTorch models into archives and serves them over REST and gRPC.

The four parts of the package are the folders of the repository; `setup.py` adds this file.
"""


def __getattr__(name: str) -> str:
    """Look up `__version__` on first use: workers import this package, and need no version."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version  # noqa: PLC0415 - the docstring has the reason

    return version("torchere")
