"""gRPC on a stream: status codes, and messages with their five-byte prefix, compressed or not."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from enum import IntEnum

from torchere.serving.frontend.alignment import room_before
from torchere.serving.frontend.budgets import INLINE_INFLATED_BYTES, WINDOW_BITS, inflated, inflated_if_short

PREFIX_BYTES = 5
SPLIT_AT_ONCE = 16  # messages; each takes hundreds of bytes of memory, even if it is empty

Received = bytes | memoryview


class StatusCode(IntEnum):
    """Status codes of the gRPC specification; importing grpcio's own enum would load all of grpcio."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class MessageFailed(Exception):
    """A message can't be accepted or sent; the call ends with `code`."""

    def __init__(self, code: StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class MessageTooLong(MessageFailed):
    """A received message is longer than the limit."""


class Compressed:
    """A compressed message, kept compressed until it is needed, to bound its memory."""

    __slots__ = ("_encoding", "_limit_bytes", "_message")

    def __init__(self, message: Received, encoding: str, limit_bytes: int) -> None:
        self._message = message
        self._encoding = encoding
        self._limit_bytes = limit_bytes

    def __len__(self) -> int:
        return len(self._message)

    def inflated_if_short(self) -> bytes | None:
        """Decompress a message that is short in both forms; None: call `inflated`, in a thread.

        Raises:
            MessageFailed: as `inflated`, for a message whose limit is low.
        """
        if self._limit_bytes <= INLINE_INFLATED_BYTES:
            return self.inflated()
        bits = WINDOW_BITS.get(self._encoding)
        return None if bits is None else inflated_if_short(self._message, bits)

    def inflated(self) -> bytes:
        """Decompress the message. Thread-safe.

        Raises:
            MessageFailed: the message is longer than the limit, malformed, or has an unknown encoding. The
                error's traceback references no bytes of the message, so keeping the error does not keep them.
        """
        bits = WINDOW_BITS.get(self._encoding)
        if bits is None:
            raise MessageFailed(
                StatusCode.INTERNAL if self._encoding == "identity" else StatusCode.UNIMPLEMENTED,
                f"a message is compressed, and grpc-encoding is {self._encoding[:100]!r}; "
                "expected gzip or deflate",
            )
        message, flaw = b"", ""
        try:
            message = inflated(self._message, bits, self._limit_bytes)
        except zlib.error as err:
            flaw = f"a message is no {self._encoding}: {err}"
        finally:
            self._message = b""  # a traceback's frames reference `self`; the message is not read again
        length = len(message)
        if not flaw and length <= self._limit_bytes:
            return message
        del message
        check_size(length, self._limit_bytes)
        raise MessageFailed(StatusCode.INTERNAL, flaw)


class MessageReader:
    """Assembles the messages of one stream, and never buffers more than `limit_bytes` of one.

    A long message arrives in pieces. Its buffer grows with them, so a client can't occupy more memory than it
    sends. The buffer ends on a multiple of `TENSOR_ALIGNMENT`. Short messages are split a few at a time.
    """

    __slots__ = (
        "_before",
        "_compressed",
        "_encoding",
        "_limit_bytes",
        "_message",
        "_prefix",
        "_want",
        "unsplit",
    )

    def __init__(self, limit_bytes: int, encoding: str) -> None:
        self._limit_bytes = limit_bytes
        self._encoding = encoding
        self._prefix = b""  # received part of the next message's prefix
        self._message = bytearray()  # received part of the current message, after `_before` bytes of padding
        self._before = 0
        self._want = -1  # length of padding and message when complete; -1: the prefix is incomplete
        self._compressed = False
        self.unsplit = bytearray()  # received bytes not split yet; call `feed` only while it is empty

    @property
    def at_message_end(self) -> bool:
        """Whether nothing of a further message has arrived."""
        return self._want < 0 and not (self._prefix or self.unsplit)

    def feed(self, piece: Received) -> Sequence[Received | Compressed]:
        """Take bytes of the stream; returns the first messages that are complete. The piece is not kept.

        Bytes after these messages are `unsplit`; `more` continues with them.

        Raises:
            MessageFailed: a message is longer than the limit.
        """
        size = len(piece)
        if len(self._message) + size < self._want:
            self._message += piece
            return []
        messages, size = self._split(piece)
        self.unsplit += piece[size:]
        return messages

    def more(self) -> Sequence[Received | Compressed]:
        """Return the next messages of the `unsplit` bytes.

        Raises:
            MessageFailed: as `feed`.
        """
        with memoryview(self.unsplit) as unsplit:
            messages, size = self._split(unsplit)
        del self.unsplit[:size]
        return messages

    def _split(self, piece: Received) -> tuple[list[Received | Compressed], int]:
        """Return the first messages of a piece, and how many bytes these and the start of one more take."""
        messages: list[Received | Compressed] = []
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
        check_size(length, self._limit_bytes)
        self._compressed = bool(self._prefix[0])
        self._before = room_before(length)
        self._prefix, self._want = b"", self._before + length
        self._message = bytearray(self._before)

    def _finished(self) -> Received | Compressed:
        message = memoryview(self._message)[self._before :]
        self._message, self._want = bytearray(), -1
        return Compressed(message, self._encoding, self._limit_bytes) if self._compressed else message


def only_message(piece: Received, limit_bytes: int) -> bytes | None:
    """Return the message if a piece is exactly one uncompressed message, as in most calls; else None.

    Raises:
        MessageFailed: the message is longer than the limit.
    """
    length = len(piece) - PREFIX_BYTES
    if length < 0 or piece[0] or int.from_bytes(piece[1:PREFIX_BYTES], "big") != length:
        return None
    check_size(length, limit_bytes)
    return bytes(piece[PREFIX_BYTES:])


def check_size(length: int, limit_bytes: int) -> None:
    """Raise `MessageTooLong` if a received message is longer than the limit."""
    if length > limit_bytes:
        raise MessageTooLong(
            StatusCode.RESOURCE_EXHAUSTED,
            f"SERVER: Received message larger than max ({length} vs. {limit_bytes})",
        )
