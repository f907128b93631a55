"""Frames of HTTP/2 (RFC 9113): numbers, layout, and the errors that end streams and connections. Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum

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
MIN_GOAWAY_BYTES = _GOAWAY.size

# Types. Plain integers, as they are compared for every frame.
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    range(10)
)
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
WITH_PRIORITY = 0x20


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
    """What an end of a connection tells the other about itself (RFC 9113, 6.5.2)."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class ConnectionBroken(Exception):
    """The peer broke the protocol in a way that ends the connection."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class StreamBroken(Exception):
    """The peer broke the protocol in a way that ends one stream."""

    def __init__(self, stream_id: int, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.stream_id = stream_id
        self.code = code


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """One whole frame."""
    return head(len(payload), kind, flags, stream_id) + payload


def head(length: int, kind: int, flags: int, stream_id: int) -> bytes:
    """The nine bytes before a payload of `length` bytes."""
    return HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream_id)


def settings_frame(settings: dict[Setting, int]) -> bytes:
    """What this end tells about itself."""
    payload = b"".join([_SETTING.pack(name, value) for name, value in settings.items()])
    return frame(SETTINGS, 0, 0, payload)


def read_settings(payload: bytes) -> Iterator[tuple[int, int]]:
    """What the peer tells about itself, name and value; unknown names are to be ignored.

    Raises:
        ConnectionBroken: no whole number of settings, or a value out of its range.
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
    """Leave to send `increment` bytes more."""
    return frame(WINDOW_UPDATE, 0, stream_id, _U32.pack(increment))


def reset_stream(stream_id: int, code: ErrorCode) -> bytes:
    """The end of a stream, at once."""
    return frame(RST_STREAM, 0, stream_id, _U32.pack(code))


def goaway(last_stream_id: int, code: ErrorCode, message: str = "") -> bytes:
    """The end of a connection: streams above `last_stream_id` were not taken, so they may go elsewhere."""
    return frame(GOAWAY, 0, 0, _GOAWAY.pack(last_stream_id, code) + message.encode()[:1000])


def read_u32(payload: bytes) -> int:
    """The number that RST_STREAM and WINDOW_UPDATE carry, its reserved bit taken off.

    Raises:
        ConnectionBroken: not four bytes.
    """
    if len(payload) != _U32.size:
        raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, f"found {len(payload)} bytes, expected 4")
    return int(_U32.unpack(payload)[0]) & MAX_WINDOW


def without_padding(flags: int, payload: bytes) -> bytes:
    """The content of a HEADERS frame, its padding and priority taken off.

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
