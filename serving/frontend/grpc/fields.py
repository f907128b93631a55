"""The fields of a message (protobuf's wire format), found before its library makes objects of them. Pure.

A field can be two bytes, and what is made of it takes a hundred; the keys of a map can be put in an order in
which reading half a million takes seconds. So they are counted before a long message is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from torchere.serving.frontend.http2.messages import MessageFailed, Received, StatusCode

MOST_FIELDS = 20_000  # of a long message; those of the Open Inference Protocol have ten thousand at most
LONG_BYTES = 65_536  # a shorter message has no room for so many that it would matter
_VARINT, _EIGHT_BYTES, _SIZED, _FOUR_BYTES = 0, 1, 2, 5
_FIXED_BYTES = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}
_MOST_VARINT_BYTES = 10


class Field(NamedTuple):
    """Where a field begins, where its content does, and where both end."""

    tag: int
    start: int
    content: int
    end: int


class Fields:
    """The fields of one message and of messages in it, of which there may be `MOST_FIELDS` in all."""

    def __init__(self, message: Received) -> None:
        self._message = message
        self._left = MOST_FIELDS

    def between(self, at: int, end: int) -> Iterator[Field]:
        """Those that lie there, in their order.

        Raises:
            DecodeError: there are none.
            MessageFailed: there are too many.
        """
        while at < end:
            self._left -= 1
            if self._left < 0:
                raise MessageFailed(
                    StatusCode.RESOURCE_EXHAUSTED,
                    f"SERVER: Received message with more than {MOST_FIELDS} fields",
                )
            start = at
            tag, at = self._number(at)
            kind, size = tag & 7, 0
            if kind == _SIZED:
                size, at = self._number(at)
            elif kind == _VARINT:
                _, at = self._number(at)
            elif kind in _FIXED_BYTES:
                size = _FIXED_BYTES[kind]
            else:
                raise DecodeError(f"found wire type {kind}")
            if at + size > end:
                raise DecodeError("a field is longer than its message")
            yield Field(tag, start, at, at + size)
            at += size

    def _number(self, at: int) -> tuple[int, int]:
        """A varint, and where what follows it begins."""
        value = 0
        for place, byte in enumerate(self._message[at : at + _MOST_VARINT_BYTES]):
            value |= (byte & 0x7F) << 7 * place
            if not byte & 0x80:
                return value, at + place + 1
        raise DecodeError("a number has no end")


def counted(read: Callable[[Received], Any]) -> Callable[[Received], Any]:
    """The same reader, for messages that do not have too many fields."""

    def read_counted(message: Received) -> Any:
        if len(message) >= LONG_BYTES:
            for _ in Fields(message).between(0, len(message)):
                pass
        return read(message)

    return read_counted
