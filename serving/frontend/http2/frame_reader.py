"""Bytes of a client into frames: DATA as it comes, in pieces or many frames at once, all others whole."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torchere.serving.frontend.http2 import frames as f
from torchere.serving.frontend.http2.frames import ConnectionBroken, ErrorCode

DATA_FRAME_BYTES = 2**20  # at most; such a frame is taken in as it comes
OTHER_FRAME_BYTES = 32_768  # of all other frames, and of a header block in several
MAX_CONTINUATIONS = 16
SMALL_BYTES = 4096  # below it bytes cost less than views

Piece = bytes | memoryview


class FrameSink(Protocol):
    """Who acts on frames. All may raise `ConnectionBroken`."""

    def counted(self, stream_id: int, size: int, empty: int) -> None:
        """DATA of this size came, of which nothing was handed on yet: for flow control.

        So many frames of it were `empty`, and did not even end their stream.
        """

    def data(self, stream_id: int, pieces: Sequence[Piece], *, is_last: bool) -> None:
        """DATA, to be used or copied before this returns; `is_last` of its stream."""

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

    def feed(self, data: Piece, most: int = sys.maxsize) -> Piece:
        """Take in what came, up to `most` frames, a run of DATA counted as one.

        Returns:
            What is left behind so many, to be fed next; b"": the memory is not looked at again.

        Raises:
            ConnectionBroken: it is no HTTP/2, or too much of it.
        """
        if self._rest:
            data = self._rest + data
            self._rest = b""
        elif len(data) <= SMALL_BYTES:
            data = bytes(data)
        start = 0
        if not self._greeted:
            start = len(f.PREFACE)
            if data[:start] != f.PREFACE[: len(data)]:
                raise ConnectionBroken(
                    ErrorCode.PROTOCOL_ERROR, "expected HTTP/2, by prior knowledge or by ALPN"
                )
            if len(data) < start + f.HEAD_BYTES:
                self._rest = bytes(data)
                return b""
            if data[start + 3] != f.SETTINGS:
                raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "expected SETTINGS behind the preface")
            self._greeted = True
        if self._data is not None:
            start = self._go_on_with_data(self._data, data, start)
        start, is_all = self._frames(data, start, most)
        if not is_all:
            return data[start:]
        self._rest = bytes(data[start:])
        return b""

    def _frames(self, data: Piece, start: int, most: int) -> tuple[int, bool]:
        """Take in whole frames, and DATA even when it is not whole.

        Returns:
            Where the rest begins, and whether it is the beginning of a frame only.
        """
        end = len(data)
        while end - start >= f.HEAD_BYTES:
            if not most:
                return start, False
            most -= 1
            high, low, kind, flags, stream_id = f.HEAD.unpack_from(data, start)
            size = high << 8 | low
            stream_id &= f.MAX_STREAM_ID
            body = start + f.HEAD_BYTES
            if self._block is not None and kind != f.CONTINUATION:
                raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "headers are not complete")
            if kind == f.DATA:
                if flags & f.PADDED and body == end and size:
                    break  # how long the padding is comes first
                start = self._run_of_data(data, start, stream_id) or self._begin_data(
                    data, body, size, flags, stream_id
                )
                continue
            if size > OTHER_FRAME_BYTES:
                raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {size} bytes")
            if end - body < size:
                break
            start = body + size
            self._whole(kind, flags, stream_id, bytes(data[body:start]))
        return start, True

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

    def _run_of_data(self, data: Piece, start: int, stream_id: int) -> int:
        """Take in whole frames without padding that follow one another, as those of a long message do.

        Returns where what follows begins; 0: there is none. One step for each frame would cost more than
        the copy of what is in it.
        """
        end, total, empty, flags = len(data), 0, 0, 0
        pieces: list[Piece] = []
        while not flags and end - start >= f.HEAD_BYTES:
            high, low, kind, flags, found_id = f.HEAD.unpack_from(data, start)
            size = high << 8 | low
            body, start_of_next = start + f.HEAD_BYTES, start + f.HEAD_BYTES + size
            if (
                kind != f.DATA
                or found_id & f.MAX_STREAM_ID != stream_id
                or flags & f.PADDED
                or start_of_next > end
                or size > DATA_FRAME_BYTES
            ):
                flags = 0
                break
            pieces.append(data[body:start_of_next])
            total += size
            empty += not (size or flags & f.END_STREAM)
            start = start_of_next
        if not pieces:
            return 0
        self._sink.counted(stream_id, total, empty)
        self._sink.data(stream_id, pieces, is_last=bool(flags & f.END_STREAM))
        return start

    def _begin_data(self, data: Piece, body: int, size: int, flags: int, stream_id: int) -> int:
        """Take in what there is of a DATA frame; returns where what follows begins."""
        if size > DATA_FRAME_BYTES:
            raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, f"DATA of {size} bytes")
        frame_bytes, padding = size, 0
        if flags & f.PADDED:
            padding = data[body] if size else 256
            body += 1
            size -= 1 + padding
            if size < 0:
                raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "a DATA frame is all padding")
        self._sink.counted(stream_id, frame_bytes, int(not (size or flags & f.END_STREAM)))
        return self._go_on_with_data(_Split(stream_id, flags, size, padding), data, body)

    def _go_on_with_data(self, split: _Split, data: Piece, start: int) -> int:
        stream_id, flags, left, padding = split
        piece = data[start : start + left]
        left -= len(piece)
        start += len(piece)
        skipped = min(padding, len(data) - start)  # none while some is left
        padding -= skipped
        is_whole = not left and not padding
        self._data = None if is_whole else _Split(stream_id, flags, left, padding)
        if piece or is_whole:
            self._sink.data(stream_id, (piece,), is_last=is_whole and bool(flags & f.END_STREAM))
        return start + skipped
