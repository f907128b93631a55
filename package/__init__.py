"""Packs PyTorch models into archives and serves them over REST and gRPC.

In wheels only (`setup.py`): a namespace package would lose to a folder named `torchere` in the current
directory, such as a clone of the repository.
"""


def __getattr__(name: str) -> str:
    """Look up `__version__` on first use: workers import this package, and need no version."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version  # noqa: PLC0415 - the docstring has the reason

    return version("torchere")
