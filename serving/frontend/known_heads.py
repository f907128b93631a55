"""A table of translations of the parts that requests repeat."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Known(dict[Key, Value]):
    """Translations by their sources. A client's calls are alike, so most are found here.

    A client chooses the keys. So there are at most `most` of them, and a full table begins anew: a list of
    the least recently used keys would cost each call more than the lost translations do.
    """

    __slots__ = ("_most",)

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def keep(self, key: Key, value: Value) -> None:
        """Add a translation."""
        if len(self) >= self._most:
            self.clear()
        self[key] = value
