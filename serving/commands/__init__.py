"""The commands `torchere` and `torchserve`."""
