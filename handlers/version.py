"""The version that handlers read as `ts.__version__`."""

__version__ = "0.12.0"  # the TorchServe version whose contract the aliases keep, not torchere's own
