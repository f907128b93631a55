"""Frames of HTTP/2 (RFC 9113): layout, parser, and the errors that end streams and connections."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES = 9
HEAD = struct.Struct(">HBBBL")  # length (16 bits and 8 bits), type, flags, stream
_U32 = struct.Struct(">L")
_SETTING = struct.Struct(">HL")
_GOAWAY = struct.Struct(">LL")
MAX_STREAM_ID = 2**31 - 1
MAX_WINDOW = 2**31 - 1
DEFAULT_WINDOW = 65_535
DEFAULT_FRAME_BYTES = 16_384
MAX_FRAME_BYTES = 2**24 - 1
PRIORITY_BYTES = 5  # a stream and a weight
PING_BYTES = 8
MIN_GOAWAY_BYTES = _GOAWAY.size

# Types. Plain integers, as they are compared for every frame.
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    range(10)
)
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
WITH_PRIORITY = 0x20

# Limits on the frames of a client.
DATA_FRAME_BYTES = 2**20  # announced as MAX_FRAME_SIZE; DATA is consumed as it arrives
OTHER_FRAME_BYTES = 32_768  # of every other frame, and of a header block with its continuations
MAX_CONTINUATIONS = 16
COUNTED_BYTES = 64  # that count as one frame, because each byte may be a header field, which takes 2 us
SMALL_BYTES = 4096  # copying less than this is cheaper than slicing views of it

Piece = bytes | memoryview


class ErrorCode(IntEnum):
    """Why a stream or a connection ends (RFC 9113, 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class Setting(IntEnum):
    """Parameters of a SETTINGS frame (RFC 9113, 6.5.2)."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class ConnectionBroken(Exception):
    """A connection error (RFC 9113, 5.4.1): the connection ends with GOAWAY and `code`."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class StreamBroken(Exception):
    """A stream error (RFC 9113, 5.4.2): the stream ends with RST_STREAM and `code`."""

    def __init__(self, stream_id: int, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.stream_id = stream_id
        self.code = code


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Encode one frame."""
    return head(len(payload), kind, flags, stream_id) + payload


def head(length: int, kind: int, flags: int, stream_id: int) -> bytes:
    """Encode the nine bytes before a payload of `length` bytes."""
    return HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream_id)


def settings_frame(settings: dict[Setting, int]) -> bytes:
    """Encode a SETTINGS frame."""
    payload = b"".join([_SETTING.pack(name, value) for name, value in settings.items()])
    return frame(SETTINGS, 0, 0, payload)


def read_settings(payload: bytes) -> Iterator[tuple[int, int]]:
    """Parse a SETTINGS frame into names and values; callers ignore unknown names.

    Raises:
        ConnectionBroken: a setting is incomplete, or a value is out of its range.
    """
    if len(payload) % _SETTING.size:
        raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes")
    for name, value in _SETTING.iter_unpack(payload):
        if name == Setting.INITIAL_WINDOW_SIZE and value > MAX_WINDOW:
            raise ConnectionBroken(ErrorCode.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE {value}")
        if name == Setting.ENABLE_PUSH and value > 1:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH {value}")
        if name == Setting.MAX_FRAME_SIZE and not DEFAULT_FRAME_BYTES <= value <= MAX_FRAME_BYTES:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, f"MAX_FRAME_SIZE {value}")
        yield name, value


def window_update(stream_id: int, increment: int) -> bytes:
    """Encode WINDOW_UPDATE: the peer may send `increment` bytes more."""
    return frame(WINDOW_UPDATE, 0, stream_id, _U32.pack(increment))


def reset_stream(stream_id: int, code: ErrorCode) -> bytes:
    """Encode RST_STREAM."""
    return frame(RST_STREAM, 0, stream_id, _U32.pack(code))


def goaway(last_stream_id: int, code: ErrorCode, message: str = "") -> bytes:
    """Encode GOAWAY: streams above `last_stream_id` were not processed; clients may retry them elsewhere."""
    return frame(GOAWAY, 0, 0, _GOAWAY.pack(last_stream_id, code) + message.encode()[:1000])


def read_u32(payload: bytes) -> int:
    """Read the number that RST_STREAM and WINDOW_UPDATE carry, without its reserved bit.

    Raises:
        ConnectionBroken: the payload does not have four bytes.
    """
    if len(payload) != _U32.size:
        raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, f"found {len(payload)} bytes, expected 4")
    return int(_U32.unpack(payload)[0]) & MAX_WINDOW


def without_padding(flags: int, payload: bytes) -> bytes:
    """Return the header block of a HEADERS frame, without padding and priority.

    Raises:
        ConnectionBroken: the padding is longer than the frame.
    """
    start, padding = 0, 0
    if flags & PADDED:
        padding, start = payload[0] if payload else 256, 1
    if flags & WITH_PRIORITY:
        start += PRIORITY_BYTES
    end = len(payload) - padding
    if end < start:
        raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "a HEADERS frame is all padding")
    return payload[start:end]


class FrameCallbacks(NamedTuple):
    """The consumers of parsed frames. Each may raise `ConnectionBroken`."""

    # DATA of `size` bytes has begun, and `empty` of its frames neither carry bytes nor end their stream.
    # Called before `data`, for flow control.
    data_size: Callable[[int, int, int], None]  # stream_id, size, empty
    # Payload of DATA, valid until the callback returns; the flag says whether it ends the stream.
    data: Callable[[int, Sequence[Piece], bool], None]
    headers: Callable[[int, int, bytes], None]  # flags of the first frame, stream_id, whole header block
    control: Callable[[int, int, int, bytes], None]  # type, flags, stream_id, payload of any other frame


class _PartialData(NamedTuple):
    """A DATA frame whose end has not arrived."""

    stream_id: int
    flags: int
    left: int
    padding: int


class FrameReader:
    """Parses the frames of one connection. Buffers at most one frame that is not DATA."""

    __slots__ = ("_block", "_data", "_emit", "_rest", "greeted")

    def __init__(self, callbacks: FrameCallbacks) -> None:
        self._emit = callbacks
        self._rest = b""  # the beginning of a frame
        self.greeted = False  # the client's preface has arrived
        self._block: tuple[int, int, list[bytes]] | None = None  # flags, stream and parts of split headers
        self._data: _PartialData | None = None

    def feed(self, data: Piece, max_frames: int = sys.maxsize) -> Piece:
        """Parse about `max_frames` frames; `data` is not kept.

        A run of DATA counts as one frame. Any other frame counts as one, and one more per `COUNTED_BYTES`.

        Returns:
            The bytes after that many frames, to be fed next; b"" when all were consumed.

        Raises:
            ConnectionBroken: the bytes are not HTTP/2, or a frame exceeds its limit.
        """
        if self._rest:
            data = self._rest + data
            self._rest = b""
        elif len(data) <= SMALL_BYTES:
            data = bytes(data)
        start = 0
        if not self.greeted:
            start = len(PREFACE)
            if data[:start] != PREFACE[: len(data)]:
                raise ConnectionBroken(
                    ErrorCode.PROTOCOL_ERROR, "expected HTTP/2, by prior knowledge or by ALPN"
                )
            if len(data) < start + HEAD_BYTES:
                self._rest = bytes(data)
                return b""
            if data[start + 3] != SETTINGS:
                raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "expected SETTINGS behind the preface")
            self.greeted = True
        if self._data is not None:
            start = self._continue_data(self._data, data, start)
        start, is_all = self._frames(data, start, max_frames)
        if not is_all:
            return data[start:]
        self._rest = bytes(data[start:])
        return b""

    def _frames(self, data: Piece, start: int, max_frames: int) -> tuple[int, bool]:
        """Parse whole frames, and DATA even when it is incomplete.

        Returns:
            The offset of the rest, and whether the rest is only the beginning of a frame.
        """
        end = len(data)
        while end - start >= HEAD_BYTES:
            if max_frames <= 0:
                return start, False
            max_frames -= 1
            high, low, kind, flags, stream_id = HEAD.unpack_from(data, start)
            size = high << 8 | low
            stream_id &= MAX_STREAM_ID
            body = start + HEAD_BYTES
            if self._block is not None and kind != CONTINUATION:
                raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "headers are not complete")
            if kind == DATA:
                if flags & PADDED and body == end and size:
                    break  # wait for the length of the padding
                start = self._run_of_data(data, start, stream_id) or self._begin_data(
                    data, body, size, flags, stream_id
                )
                continue
            if size > OTHER_FRAME_BYTES:
                raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {size} bytes")
            if end - body < size:
                break
            start = body + size
            max_frames -= size // COUNTED_BYTES
            self._whole(kind, flags, stream_id, bytes(data[body:start]))
        return start, True

    def _whole(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == HEADERS:
            if not stream_id & 1:
                raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, f"HEADERS on stream {stream_id}")
            if flags & (PADDED | WITH_PRIORITY):
                payload = without_padding(flags, payload)
            if flags & END_HEADERS:
                self._emit.headers(flags, stream_id, payload)
            else:
                self._block = (flags, stream_id, [payload])
        elif kind == CONTINUATION:
            self._continue_headers(flags, stream_id, payload)
        elif kind == PUSH_PROMISE:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "a client can't push")
        else:
            self._emit.control(kind, flags, stream_id, payload)

    def _continue_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is None or self._block[1] != stream_id:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "CONTINUATION of nothing")
        first_flags, _, parts = self._block
        parts.append(payload)
        if len(parts) > MAX_CONTINUATIONS or sum(map(len, parts)) > OTHER_FRAME_BYTES:
            raise ConnectionBroken(ErrorCode.ENHANCE_YOUR_CALM, "headers are too long")
        if flags & END_HEADERS:
            self._block = None
            self._emit.headers(first_flags, stream_id, b"".join(parts))

    def _run_of_data(self, data: Piece, start: int, stream_id: int) -> int:
        """Consume consecutive whole DATA frames of one stream without padding, as a long message has them.

        Returns where the next frame begins; 0: there is no such frame. One callback for each frame would cost
        more than the copy of its payload.
        """
        end, total, empty, flags = len(data), 0, 0, 0
        pieces: list[Piece] = []
        while not flags and end - start >= HEAD_BYTES:
            high, low, kind, flags, found_id = HEAD.unpack_from(data, start)
            size = high << 8 | low
            body, start_of_next = start + HEAD_BYTES, start + HEAD_BYTES + size
            if (
                kind != DATA
                or found_id & MAX_STREAM_ID != stream_id
                or flags & PADDED
                or start_of_next > end
                or size > DATA_FRAME_BYTES
            ):
                flags = 0
                break
            pieces.append(data[body:start_of_next])
            total += size
            empty += not (size or flags & END_STREAM)
            start = start_of_next
        if not pieces:
            return 0
        self._emit.data_size(stream_id, total, empty)
        self._emit.data(stream_id, pieces, bool(flags & END_STREAM))
        return start

    def _begin_data(self, data: Piece, body: int, size: int, flags: int, stream_id: int) -> int:
        """Consume the beginning of a DATA frame; returns where the next frame begins."""
        if size > DATA_FRAME_BYTES:
            raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, f"DATA of {size} bytes")
        frame_bytes, padding = size, 0
        if flags & PADDED:
            padding = data[body] if size else 256
            body += 1
            size -= 1 + padding
            if size < 0:
                raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "a DATA frame is all padding")
        self._emit.data_size(stream_id, frame_bytes, int(not (size or flags & END_STREAM)))
        return self._continue_data(_PartialData(stream_id, flags, size, padding), data, body)

    def _continue_data(self, partial: _PartialData, data: Piece, start: int) -> int:
        stream_id, flags, left, padding = partial
        piece = data[start : start + left]
        left -= len(piece)
        start += len(piece)
        skipped = min(padding, len(data) - start)  # 0 while some payload is missing
        padding -= skipped
        is_whole = not left and not padding
        self._data = None if is_whole else _PartialData(stream_id, flags, left, padding)
        if piece or is_whole:
            self._emit.data(stream_id, (piece,), is_whole and bool(flags & END_STREAM))
        return start + skipped
