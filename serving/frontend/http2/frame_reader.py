"""Bytes of a client into frames: DATA piece by piece as it comes, all others whole."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torchere.serving.frontend.http2 import frames as f
from torchere.serving.frontend.http2.frames import ConnectionBroken, ErrorCode

DATA_FRAME_BYTES = 2**20  # at most; such a frame is taken in as it comes
OTHER_FRAME_BYTES = 32_768  # of all other frames, and of a header block in several
MAX_CONTINUATIONS = 16
SMALL_BYTES = 4096  # below it a copy costs less than a view, and does not keep all that came with it


class FrameSink(Protocol):
    """Who acts on frames. All may raise `ConnectionBroken`."""

    def counted(self, stream_id: int, size: int) -> None:
        """A DATA frame of this size came, of which nothing was handed on yet: for flow control."""

    def data(self, stream_id: int, piece: bytes | memoryview, *, is_last: bool) -> None:
        """A piece of DATA; `is_last` of its stream."""

    def head(self, flags: int, stream_id: int, block: bytes) -> None:
        """A whole header block, and the flags of the frame it began with."""

    def control(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """A whole frame of another kind."""


class _Split(NamedTuple):
    """DATA whose end has not come."""

    stream_id: int
    flags: int
    left: int
    padding: int


class FrameReader:
    """Feeds one connection's frames to its sink, and holds no more than one frame that is not DATA."""

    __slots__ = ("_block", "_data", "_greeted", "_rest", "_sink")

    def __init__(self, sink: FrameSink) -> None:
        self._sink = sink
        self._rest = b""  # the beginning of a frame
        self._greeted = False
        self._block: tuple[int, int, list[bytes]] | None = None  # flags, stream and parts of split headers
        self._data: _Split | None = None

    @property
    def greeted(self) -> bool:
        """Whether the client's preface has come."""
        return self._greeted

    def feed(self, data: bytes) -> None:
        """Take in what came.

        Raises:
            ConnectionBroken: it is no HTTP/2, or too much of it.
        """
        if self._rest:
            data = self._rest + data
            self._rest = b""
        start = 0
        if not self._greeted:
            start = len(f.PREFACE)
            if data[:start] != f.PREFACE[: len(data)]:
                raise ConnectionBroken(
                    ErrorCode.PROTOCOL_ERROR, "expected HTTP/2, by prior knowledge or by ALPN"
                )
            if len(data) < start + f.HEAD_BYTES:
                self._rest = data
                return
            if data[start + 3] != f.SETTINGS:
                raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "expected SETTINGS behind the preface")
            self._greeted = True
        if self._data is not None:
            start = self._go_on_with_data(self._data, data, start)
        self._rest = data[self._frames(data, start) :]

    def _frames(self, data: bytes, start: int) -> int:
        """Take in all whole frames, and DATA even when it is not whole; returns where the rest begins."""
        end = len(data)
        while end - start >= f.HEAD_BYTES:
            high, low, kind, flags, stream_id = f.HEAD.unpack_from(data, start)
            size = high << 8 | low
            stream_id &= f.MAX_STREAM_ID
            body = start + f.HEAD_BYTES
            if self._block is not None and kind != f.CONTINUATION:
                raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "headers are not complete")
            if kind == f.DATA:
                if flags & f.PADDED and body == end and size:
                    break  # how long the padding is comes first
                start = self._begin_data(data, body, size, flags, stream_id)
                continue
            if size > OTHER_FRAME_BYTES:
                raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {size} bytes")
            if end - body < size:
                break
            start = body + size
            self._whole(kind, flags, stream_id, data[body:start])
        return start

    def _whole(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == f.HEADERS:
            if not stream_id & 1:
                raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, f"HEADERS on stream {stream_id}")
            if flags & (f.PADDED | f.WITH_PRIORITY):
                payload = f.without_padding(flags, payload)
            if flags & f.END_HEADERS:
                self._sink.head(flags, stream_id, payload)
            else:
                self._block = (flags, stream_id, [payload])
        elif kind == f.CONTINUATION:
            self._continue(flags, stream_id, payload)
        elif kind == f.PUSH_PROMISE:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "a client can't push")
        else:
            self._sink.control(kind, flags, stream_id, payload)

    def _continue(self, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is None or self._block[1] != stream_id:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "CONTINUATION of nothing")
        first_flags, _, parts = self._block
        parts.append(payload)
        if len(parts) > MAX_CONTINUATIONS or sum(map(len, parts)) > OTHER_FRAME_BYTES:
            raise ConnectionBroken(ErrorCode.ENHANCE_YOUR_CALM, "headers are too long")
        if flags & f.END_HEADERS:
            self._block = None
            self._sink.head(first_flags, stream_id, b"".join(parts))

    def _begin_data(self, data: bytes, body: int, size: int, flags: int, stream_id: int) -> int:
        """Take in what there is of a DATA frame; returns where what follows begins."""
        if size > DATA_FRAME_BYTES:
            raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, f"DATA of {size} bytes")
        self._sink.counted(stream_id, size)
        padding = 0
        if flags & f.PADDED:
            padding = data[body] if size else 256
            body += 1
            size -= 1 + padding
            if size < 0:
                raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "a DATA frame is all padding")
        end = body + size + padding
        if end <= len(data):
            self._sink.data(stream_id, _piece(data, body, body + size), is_last=bool(flags & f.END_STREAM))
            return end
        return self._go_on_with_data(_Split(stream_id, flags, size, padding), data, body)

    def _go_on_with_data(self, split: _Split, data: bytes, start: int) -> int:
        stream_id, flags, left, padding = split
        piece = _piece(data, start, start + left)
        left -= len(piece)
        start += len(piece)
        skipped = min(padding, len(data) - start) if not left else 0
        padding -= skipped
        is_whole = not left and not padding
        self._data = None if is_whole else _Split(stream_id, flags, left, padding)
        if piece or is_whole:
            self._sink.data(stream_id, piece, is_last=is_whole and bool(flags & f.END_STREAM))
        return start + skipped


def _piece(data: bytes, start: int, end: int) -> bytes | memoryview:
    """A part of what came: a copy when it is small, else a view, to be copied once, into its message."""
    return data[start:end] if end - start <= SMALL_BYTES else memoryview(data)[start:end]
