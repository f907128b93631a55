"""gRPC's messages in the bytes of a stream: a flag, a length, and the message, which may be compressed."""

from __future__ import annotations

import zlib

from torchere.serving.frontend.http2.status import StatusCode

PREFIX_BYTES = 5
_SMALL_BYTES = 4096
# Window bits of zlib: 15 is a zlib stream, 16 more a gzip one.
_WINDOW_BITS = {"gzip": 31, "deflate": 15}


class MessageFailed(Exception):
    """A message can't be taken; the call ends with `code`."""

    def __init__(self, code: StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class MessageReader:
    """Puts the messages of one stream together again, and never holds more than `limit_bytes` of one."""

    __slots__ = ("_compressed", "_encoding", "_have", "_limit_bytes", "_parts", "_want")

    def __init__(self, limit_bytes: int, encoding: str) -> None:
        self._limit_bytes = limit_bytes
        self._encoding = encoding
        self._parts: list[bytearray | memoryview] = []
        self._have = 0
        self._want = -1  # bytes of the message under way; -1: its prefix is not there yet
        self._compressed = False

    @property
    def at_message_end(self) -> bool:
        """Whether nothing of a further message has come."""
        return self._want < 0 and not self._have

    def feed(self, piece: bytes | memoryview) -> list[bytes]:
        """Take in what came; returns the messages that are whole now.

        Raises:
            MessageFailed: a message is longer than the limit, or is compressed in a way that is not known.
        """
        if self._want < 0 and not self._have and len(piece) >= PREFIX_BYTES:
            length = int.from_bytes(piece[1:PREFIX_BYTES], "big")
            if len(piece) == PREFIX_BYTES + length and not piece[0]:
                self._check(length)
                return [bytes(piece[PREFIX_BYTES:])]  # as nearly all come
        view = memoryview(piece)
        messages: list[bytes] = []
        while view:
            view = self._take(view)
            if self._want >= 0 and self._have == self._want:
                messages.append(self._finished())
        return messages

    def _take(self, view: memoryview) -> memoryview:
        """Add to the prefix or the message under way; returns what is left over."""
        wanted = PREFIX_BYTES if self._want < 0 else self._want
        taken = view[: wanted - self._have]
        if len(taken) > _SMALL_BYTES:
            self._parts.append(taken)
        elif self._parts and isinstance(self._parts[-1], bytearray):
            self._parts[-1] += taken
        else:  # small parts are copied together: each by itself would cost many times its size
            self._parts.append(bytearray(taken))
        self._have += len(taken)
        if self._want < 0 and self._have == PREFIX_BYTES:
            prefix = b"".join(self._parts)
            self._compressed = bool(prefix[0])
            self._want = int.from_bytes(prefix[1:], "big")
            self._check(self._want)
            self._parts, self._have = [], 0
        return view[len(taken) :]

    def _finished(self) -> bytes:
        message = b"".join(self._parts)
        self._parts, self._have, self._want = [], 0, -1
        return self._inflated(message) if self._compressed else message

    def _check(self, length: int) -> None:
        if length > self._limit_bytes:
            raise MessageFailed(
                StatusCode.RESOURCE_EXHAUSTED,
                f"SERVER: Received message larger than max ({length} vs. {self._limit_bytes})",
            )

    def _inflated(self, message: bytes) -> bytes:
        bits = _WINDOW_BITS.get(self._encoding)
        if bits is None:
            raise MessageFailed(
                StatusCode.INTERNAL if self._encoding == "identity" else StatusCode.UNIMPLEMENTED,
                f"a message is compressed, and grpc-encoding is {self._encoding[:100]!r}; "
                "expected gzip or deflate",
            )
        inflating = zlib.decompressobj(bits)
        try:
            inflated = inflating.decompress(message, self._limit_bytes + 1)
        except zlib.error as err:
            raise MessageFailed(StatusCode.INTERNAL, f"a message is no {self._encoding}: {err}") from err
        self._check(len(inflated))
        if not inflating.eof:
            raise MessageFailed(StatusCode.INTERNAL, f"a message is no whole {self._encoding}")
        return inflated
