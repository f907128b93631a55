"""Archives on disk: look-up, download, unpacking and removal."""
