"""Archives on the disk: found, fetched, unpacked, removed."""
