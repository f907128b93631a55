"""Scanner for the fields of an encoded protobuf message, run before the message is decoded. Pure.

A two-byte field can decode to an object of a hundred bytes, and map keys can be ordered so that half a
million of them take seconds to decode. So the fields of a long message are counted before it is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf.message import DecodeError

from torchere.serving.frontend.http2.messages import MessageFailed, Received, StatusCode

MOST_FIELDS = 20_000  # of a long message; messages of the Open Inference Protocol have at most ten thousand
LONG_BYTES = 65_536  # a shorter message has too few fields to matter
_VARINT, _EIGHT_BYTES, _SIZED, _FOUR_BYTES = 0, 1, 2, 5
_FIXED_BYTES = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}
_MOST_VARINT_BYTES = 10
_MOST_TAG_BYTES = 5  # of tags and sizes, as in protobuf's library
_MORE = 0x80  # set in each byte of a varint except the last


Field = tuple[int, int, int, int]  # a field's tag, and the offsets of its start, its content and its end


class Fields:
    """Fields of one message and of its nested messages: at most `MOST_FIELDS` in all."""

    def __init__(self, message: Received) -> None:
        self._message = message
        self._left = MOST_FIELDS

    def between(self, at: int, end: int) -> Iterator[Field]:
        """Yield the fields between the offsets `at` and `end` of the message, in order.

        Raises:
            DecodeError: the bytes are not valid fields.
            MessageFailed: there are too many fields.
        """
        message = self._message
        while at < end:
            self._left -= 1
            if self._left < 0:
                raise MessageFailed(
                    StatusCode.RESOURCE_EXHAUSTED,
                    f"SERVER: Received message with more than {MOST_FIELDS} fields",
                )
            start, size = at, 0
            tag, at = (message[at], at + 1) if message[at] < _MORE else self._number(at, _MOST_TAG_BYTES)
            kind = tag & 7
            if kind == _SIZED:
                is_short = at < end and message[at] < _MORE
                size, at = (message[at], at + 1) if is_short else self._number(at, _MOST_TAG_BYTES)
            elif kind == _VARINT:
                at = at + 1 if at < end and message[at] < _MORE else self._number(at)[1]
            elif kind in _FIXED_BYTES:
                size = _FIXED_BYTES[kind]
            else:
                raise DecodeError(f"found wire type {kind}")
            if at + size > end:
                raise DecodeError("a field is longer than its message")
            yield tag, start, at, at + size
            at += size

    def _number(self, at: int, most_bytes: int = _MOST_VARINT_BYTES) -> tuple[int, int]:
        """Return the varint at an offset, and the offset after it."""
        value = 0
        for place, byte in enumerate(self._message[at : at + most_bytes]):
            value |= (byte & 0x7F) << 7 * place
            if not byte & _MORE:
                return value, at + place + 1
        raise DecodeError("a number has no end")


def counted(read: Callable[[Received], Any]) -> Callable[[Received], Any]:
    """Wrap a decoder so that it raises `MessageFailed` for a long message with too many fields."""

    def read_counted(message: Received) -> Any:
        if len(message) >= LONG_BYTES:
            for _ in Fields(message).between(0, len(message)):
                pass
        return read(message)

    return read_counted
