"""A table of translations of the parts that requests repeat."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Known(dict[Key, Value]):
    """Translations by their sources. A client's calls are alike, so most are found here.

    A client chooses the keys. So their sizes are at most `most` together, and a full table begins anew: a
    list of the least recently used keys would cost each call more than the lost translations do.
    """

    __slots__ = ("_most", "_size")

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self._size = 0  # of all keys, and of those that were kept twice

    def keep(self, key: Key, value: Value, size: int = 1) -> None:
        """Add a translation of a size that is at most `most`. By default `most` is their number."""
        self._size = self._size + size if self else size
        if self._size > self._most:
            self.clear()
            self._size = size
        self[key] = value
