"""A byte stream cut into frames: by `FrameProtocol` in the server, by `FrameReader` in a worker."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from torchere.serving.execution.wire import HEADER, MAX_FRAME_BYTES

_ROOM_BYTES = 65_536  # of a reader: all batches that are sent ahead, unless they are large


class FrameProtocol(asyncio.Protocol):
    """Calls `on_frame(payload)` for every complete frame, and `on_lost()` once when the stream ends.

    A payload is good until its call returns. A length over the limit ends the connection: whoever is at the
    other end does not speak our language. `fault` says so then, in words.
    """

    def __init__(self, on_frame: Callable[[memoryview], None], on_lost: Callable[[], None]) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._begun = bytearray()  # of a frame that is not there as a whole
        self._transport: asyncio.BaseTransport | None = None
        self.fault = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the transport, to end it when the stream is not frames."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Hand on what is complete now, keep the rest."""
        begun = self._begun
        if begun:
            begun += data
            with memoryview(begun) as view:
                cut = self._cut(view)
            del begun[:cut]
        else:
            with memoryview(data) as view:
                cut = self._cut(view)
                begun += view[cut:]

    def _cut(self, view: memoryview) -> int:
        """Hand on all frames that `view` begins with; where the rest begins."""
        start, size = 0, len(view)
        while size - start >= HEADER.size:
            (length,) = HEADER.unpack_from(view, start)
            if length > MAX_FRAME_BYTES:
                self._refuse(length)
                break
            end = start + HEADER.size + int(length)
            if end > size:
                break
            with view[start + HEADER.size : end] as payload:
                self._on_frame(payload)
            start = end
        return start

    def _refuse(self, length: int) -> None:
        self.fault = f"sent a frame of {length} bytes, expected at most {MAX_FRAME_BYTES}"
        if self._transport is not None:
            self._transport.abort()  # type: ignore[attr-defined]

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell that nothing more will come."""
        self._on_lost()


class FrameReader:
    """Reads frames from a blocking socket, as many with one system call as have come. Not thread-safe."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._room = memoryview(bytearray(_ROOM_BYTES))
        self._start = 0  # of what was read and not handed out
        self._end = 0

    def next(self) -> memoryview | None:
        """The payload of the next frame, good until the next call; None: the stream has ended."""
        while True:
            held = self._end - self._start
            if held >= HEADER.size:
                (length,) = HEADER.unpack_from(self._room, self._start)
                begin = self._start + HEADER.size
                if begin + length <= self._end:
                    self._start = begin + length
                    return self._room[begin : self._start]
                if HEADER.size + length > _ROOM_BYTES:
                    return self._large(length)
            if not self._read_more():
                return None

    def _read_more(self) -> bool:
        """Add what has come to what is held; False: the stream has ended."""
        if self._start:
            rest = bytes(self._room[self._start : self._end])
            self._start, self._end = 0, len(rest)
            self._room[: self._end] = rest
        count = self._connection.recv_into(self._room[self._end :])
        self._end += count
        return count > 0

    def _large(self, length: int) -> memoryview | None:
        """A payload that is longer than our room, of which some is held."""
        payload = memoryview(bytearray(length))
        held = self._room[self._start + HEADER.size : self._end]
        payload[: len(held)] = held
        filled = len(held)
        self._start = self._end = 0
        while filled < length:
            count = self._connection.recv_into(payload[filled:])
            if not count:
                return None
            filled += count
        return payload
