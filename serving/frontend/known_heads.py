"""A bounded cache for translations of the parts that requests repeat, such as their heads."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Known(dict[Key, Value]):
    """Cache of translations, by their sources. A client's calls are alike, so most are found here.

    Clients choose the keys, so `most` limits the sum of their sizes. A full cache is emptied, because a list
    of the least recently used keys would cost each call more than the lost translations do.
    """

    __slots__ = ("_most", "_size")

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self._size = 0  # of all keys; a key that was kept twice counts twice

    def keep(self, key: Key, value: Value, size: int = 1) -> None:
        """Add a translation; `size` is at most `most`. With the default size, `most` limits their number."""
        self._size = self._size + size if self else size
        if self._size > self._most:
            self.clear()
            self._size = size
        self[key] = value
