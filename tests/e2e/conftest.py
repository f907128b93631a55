"""The servers of the end-to-end tests."""

from servers import open_server, pack, start_server, store

__all__ = ["open_server", "pack", "start_server", "store"]
