"""The version that handlers read as `ts.__version__`."""

__version__ = "0.12.0"  # of the TorchServe contract that our aliases keep, not of torchere
