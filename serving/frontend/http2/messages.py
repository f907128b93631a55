"""gRPC's messages in the bytes of a stream: a flag, a length, and the message, which may be compressed."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence

from torchere.serving.frontend.alignment import room_before
from torchere.serving.frontend.http2.status import StatusCode

PREFIX_BYTES = 5
SPLIT_AT_ONCE = 16  # messages; each takes hundreds of bytes more than its own, which may be none
# Window bits of zlib: 15 is a zlib stream, 16 more a gzip one.
_WINDOW_BITS = {"gzip": 31, "deflate": 15}
# zlib lets go of the GIL; above this the loop would wait longer than a thread costs: it may inflate to 1 MiB.
INFLATED_IN_THREAD_BYTES = 1024

Received = bytes | memoryview


class MessageFailed(Exception):
    """A message can't be taken; the call ends with `code`."""

    def __init__(self, code: StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class Packed:
    """A message as it came, compressed: as long as it waits, it takes no more memory than its client sent."""

    __slots__ = ("_encoding", "_limit_bytes", "_message")

    def __init__(self, message: Received, encoding: str, limit_bytes: int) -> None:
        self._message = message
        self._encoding = encoding
        self._limit_bytes = limit_bytes

    def __len__(self) -> int:
        return len(self._message)

    async def unpacked(self) -> bytes:
        """As `inflated`, in a thread if it takes its time."""
        if len(self) <= INFLATED_IN_THREAD_BYTES:
            return self.inflated()
        return await asyncio.to_thread(self.inflated)

    def inflated(self) -> bytes:
        """The message itself. From any thread.

        Raises:
            MessageFailed: it is longer than the limit, or is compressed in a way that is not known.
        """
        bits = _WINDOW_BITS.get(self._encoding)
        if bits is None:
            raise MessageFailed(
                StatusCode.INTERNAL if self._encoding == "identity" else StatusCode.UNIMPLEMENTED,
                f"a message is compressed, and grpc-encoding is {self._encoding[:100]!r}; "
                "expected gzip or deflate",
            )
        inflating = zlib.decompressobj(bits)
        try:
            inflated = inflating.decompress(self._message, self._limit_bytes + 1)
        except zlib.error as err:
            raise MessageFailed(StatusCode.INTERNAL, f"a message is no {self._encoding}: {err}") from err
        _check(len(inflated), self._limit_bytes)
        if not inflating.eof:
            raise MessageFailed(StatusCode.INTERNAL, f"a message is no whole {self._encoding}")
        return inflated


class MessageReader:
    """Puts the messages of one stream together again, and never holds more than `limit_bytes` of one.

    A long message comes in pieces; it grows by them, so a client has as much memory held as it fills. It
    ends on a multiple of `TENSOR_ALIGNMENT`. Short ones are split off a few at a time.
    """

    __slots__ = (
        "_before",
        "_compressed",
        "_encoding",
        "_limit_bytes",
        "_message",
        "_prefix",
        "_want",
        "behind",
    )

    def __init__(self, limit_bytes: int, encoding: str) -> None:
        self._limit_bytes = limit_bytes
        self._encoding = encoding
        self._prefix = b""  # what has come of the next message's
        self._message = bytearray()  # what has come of the one under way, behind `_before` other bytes
        self._before = 0
        self._want = -1  # how long both will be; -1: the prefix is not there yet
        self._compressed = False
        self.behind = bytearray()  # what has come and is not split yet; until it is, nothing may be fed

    @property
    def at_message_end(self) -> bool:
        """Whether nothing of a further message has come."""
        return self._want < 0 and not (self._prefix or self.behind)

    def feed(self, piece: bytes | memoryview) -> Sequence[Received | Packed]:
        """Take in what came; returns the first messages that are whole now. The piece is not kept.

        What is `behind` these then is for `more`.

        Raises:
            MessageFailed: a message is longer than the limit.
        """
        size = len(piece)
        if len(self._message) + size < self._want:
            self._message += piece
            return []
        if self._want < 0 and not self._prefix:
            length = int.from_bytes(piece[1:PREFIX_BYTES], "big")
            if size == PREFIX_BYTES + length and not piece[0]:
                _check(length, self._limit_bytes)
                return [bytes(piece[PREFIX_BYTES:])]  # as nearly all come
        messages, size = self._split(piece)
        self.behind += piece[size:]
        return messages

    def more(self) -> Sequence[Received | Packed]:
        """The next messages of what is `behind`.

        Raises:
            MessageFailed: as `feed`.
        """
        with memoryview(self.behind) as behind:
            messages, size = self._split(behind)
        del self.behind[:size]
        return messages

    def _split(self, piece: bytes | memoryview) -> tuple[list[Received | Packed], int]:
        """The first messages of what came, and how much of it these and the beginning of one more take."""
        messages: list[Received | Packed] = []
        at = 0
        while at < len(piece) and len(messages) < SPLIT_AT_ONCE:
            if self._want < 0:
                missing = PREFIX_BYTES - len(self._prefix)
                self._prefix += piece[at : at + missing]
                if len(self._prefix) < PREFIX_BYTES:
                    return messages, len(piece)
                self._begin()
            else:
                missing = self._want - len(self._message)
                self._message += piece[at : at + missing]
            if len(self._message) == self._want:
                messages.append(self._finished())
            at += missing
        return messages, min(at, len(piece))

    def _begin(self) -> None:
        length = int.from_bytes(self._prefix[1:], "big")
        _check(length, self._limit_bytes)
        self._compressed = bool(self._prefix[0])
        self._before = room_before(length)
        self._prefix, self._want = b"", self._before + length
        self._message = bytearray(self._before)

    def _finished(self) -> Received | Packed:
        message = memoryview(self._message)[self._before :]
        self._message, self._want = bytearray(), -1
        return Packed(message, self._encoding, self._limit_bytes) if self._compressed else message


def _check(length: int, limit_bytes: int) -> None:
    if length > limit_bytes:
        raise MessageFailed(
            StatusCode.RESOURCE_EXHAUSTED,
            f"SERVER: Received message larger than max ({length} vs. {limit_bytes})",
        )
