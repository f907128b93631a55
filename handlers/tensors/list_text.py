"""Converts the JSON text of a long list to the bytes of a tensor, without an object for each inner list.

Decoding a text of 6.5 MB at once makes up to two million lists and holds the GIL for 0.3 seconds. Here numpy,
which releases the GIL, finds the elements, and `SLICE_ELEMENTS` of them are decoded at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NoReturn

import msgspec
import numpy as np

from torchere.handlers.tensors import MAX_DIMENSIONS, Array, Datatype, TensorError, check_shape
from torchere.handlers.tensors.codec import (
    array_from_elements,
    bytes_from_tensor,
    irregular,
    kind_of,
    wrong_type,
)

SLICE_ELEMENTS = 16_384  # decoded and converted in a few milliseconds
# A text with fewer commas and lists is decoded at once, within 25 ms; slices would take 1.5 times as long.
MANY_ITEMS = 2**18
_COLON, _COMMA, _QUOTE, _OPEN, _CLOSE = b':,"[]'
_OPEN_OBJECT, _CLOSE_OBJECT = b"{}"
_SPACES = b" \t\r\n"
_OF_FRACTIONS = tuple(b".eE")
_decoder = msgspec.json.Decoder(list[Any])


class ListText:
    """The text of one JSON list, whose elements are found by their position. Thread-safe once made.

    Args:
        text: the list, whose brackets, commas and strings a JSON parser has checked. `tensor_bytes` finds
            numbers out of range and bytes that are not UTF-8.
    """

    def __init__(self, text: bytes | memoryview) -> None:
        text = bytes(text)
        self._has_strings = b'"' in text
        if self._has_strings:
            codes = _without_strings(text)
            is_kept = codes > max(_SPACES)  # outside strings, no other byte is as small
            self._codes, self._text = codes[is_kept], np.frombuffer(text, np.uint8)[is_kept].tobytes()
        else:
            self._text = text.translate(None, _SPACES)
            self._codes = np.frombuffer(self._text, np.uint8)

    def __repr__(self) -> str:
        return kind_of([])  # for error texts

    @property
    def count(self) -> int:
        """The number of elements of the outermost list."""
        return 0 if len(self._codes) == 2 else len(self._level(1)[0]) - 1

    @property
    def first(self) -> Any:
        """The first element of a list that is not empty; a nested list or object is returned empty."""
        return self._value_at(1)

    @property
    def has_fractions(self) -> bool:
        """Whether a number has a point or an exponent; true for `true`, `false` and other names with an e."""
        return any(bool((self._codes == code).any()) for code in _OF_FRACTIONS)

    def tensor_bytes(self, datatype: Datatype, shape: Sequence[object], field: str) -> bytes:
        """Return the elements as raw little-endian bytes in row-major order.

        Args and errors are those of `codec.array_from_json`, which may raise another one of several errors.

        Raises:
            TensorError: the list or the shape is invalid.
            NO_JSON: an element is invalid JSON.
        """
        sizes, name = check_shape(shape, f"{field}.shape"), f"{field}.data"
        starts, ends = self._innermost(name)
        if len(starts) != math.prod(sizes):
            raise TensorError(name, f"{len(starts)} elements", f"{math.prod(sizes)} for shape {list(sizes)}")
        return b"".join(self._converted(starts, ends, datatype, name))

    def _innermost(self, name: str) -> tuple[Array, Array]:
        """Return where each innermost element begins and ends; the lists of a level have one size."""
        sizes: list[int] = []
        starts: Array = np.zeros(1, np.int32)
        ends = starts
        while len(starts) and self._codes[starts[0]] == _OPEN and len(sizes) < MAX_DIMENSIONS:
            places, codes = self._level(len(sizes) + 1)
            opens, closes = np.flatnonzero(codes == _OPEN), np.flatnonzero(codes == _CLOSE)
            counts = closes - opens  # there is one comma fewer than elements
            counts[places[closes] == places[opens] + 1] = 0
            sizes.append(int(counts[0]))
            if len(counts) != len(starts) or (counts != sizes[-1]).any():
                self._refuse_list(starts, counts, name, sizes)
            starts, ends = _elements(places, codes, math.prod(sizes))
        return starts, ends

    def _refuse_list(self, starts: Array, counts: Array, name: str, sizes: Sequence[int]) -> NoReturn:
        """Raise the error for the first of the items at `starts` that is not a list of the last size."""
        found = np.full(len(starts), -1)
        found[self._codes[starts] == _OPEN] = counts
        place = int(np.argmax(found != sizes[-1]))
        count = int(found[place])
        kind = kind_of(self._value_at(int(starts[place]))) if count < 0 else f"{count} elements"
        raise irregular(kind, name, place, sizes)

    def _converted(self, starts: Array, ends: Array, datatype: Datatype, name: str) -> Iterator[bytes]:
        """Yield the bytes of the elements, in slices."""
        first_codes = self._codes[starts]
        is_container = (first_codes == _OPEN) | (first_codes == _OPEN_OBJECT)
        count = int(np.argmax(is_container)) if is_container.any() else len(starts)
        for first in range(0, count, SLICE_ELEMENTS):
            last = min(first + SLICE_ELEMENTS, count) - 1
            elements = _decoder.decode(b"[%b]" % self._unnested(int(starts[first]), int(ends[last])))
            array = array_from_elements(elements, datatype, name, first)
            yield bytes_from_tensor(array, datatype)
        if count < len(starts):
            raise wrong_type(kind_of(self._value_at(int(starts[count]))), datatype, name, count)

    def _unnested(self, start: int, end: int) -> bytes:
        """Return a part of the text without the brackets of lists."""
        text = self._text[start:end]
        if not self._has_strings:
            return text.translate(None, b"[]")
        codes = self._codes[start:end]
        kept: Array = np.frombuffer(text, np.uint8)[(codes != _OPEN) & (codes != _CLOSE)]
        return kept.tobytes()

    def _value_at(self, start: int) -> Any:
        """Return the value that begins at `start`; a list or an object is returned empty."""
        code = self._codes[start]
        if code == _OPEN:
            return []
        if code == _OPEN_OBJECT:
            return {}
        tokens = self._tokens[0]
        end = int(tokens[np.searchsorted(tokens, start)])
        return msgspec.json.decode(self._text[start:end])

    def _level(self, depth: int) -> tuple[Array, Array]:
        """Return the places of brackets and commas at a depth, and their codes."""
        places, depths = self._tokens
        found = places[depths == depth]
        return found, self._codes[found]

    @cached_property
    def _tokens(self) -> tuple[Array, Array]:
        """The places of all brackets and commas, and how many lists and objects each of them is in."""
        codes = self._codes
        opens, closes = (
            (codes == _OPEN) | (codes == _OPEN_OBJECT),
            (codes == _CLOSE) | (codes == _CLOSE_OBJECT),
        )
        places = np.flatnonzero(opens | closes | (codes == _COMMA))
        if len(codes) < 2**31:
            places = places.astype(np.int32)
        closed = closes[places].view(np.int8)
        # Not 16 bits: from Python 3.14 on the parser accepts as many levels as its stack holds.
        return places, np.cumsum(opens[places].view(np.int8) - closed, dtype=np.int32) + closed


def has_many_items(text: bytes | memoryview) -> bool:
    """Return whether decoding a JSON text at once may make more than `MANY_ITEMS` Python objects."""
    if len(text) <= MANY_ITEMS:
        return False
    codes: Array = np.frombuffer(text, np.uint8)
    return int(np.count_nonzero((codes == _COMMA) | (codes == _OPEN))) > MANY_ITEMS


def count_members(text: bytes | memoryview) -> int:
    """Return the number of members of all objects in a JSON text."""
    text = bytes(text)
    codes = _without_strings(text) if b'"' in text else np.frombuffer(text, np.uint8)
    return int(np.count_nonzero(codes == _COLON))


def _elements(places: Array, codes: Array, count: int) -> tuple[Array, Array]:
    """Return where the elements of lists begin and end: no list is empty, or all are (`count` 0)."""
    if not count:
        return places[:0], places[:0]
    return places[codes != _CLOSE] + 1, places[codes != _OPEN]


def _without_strings(text: bytes) -> Array:
    """Return the bytes of a text with those of its strings replaced by quotes."""
    if b"\\" in text:  # from left to right: the second byte of a pair escapes nothing
        text = text.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    codes: Array = np.frombuffer(text, np.uint8)
    is_inside = np.cumsum(codes == _QUOTE, dtype=np.uint8) & 1
    return np.where(is_inside, np.uint8(_QUOTE), codes)
