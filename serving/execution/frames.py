"""Cuts a byte stream into frames; used by the server's end of a worker's socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from torchere.serving.execution.wire import HEADER, MAX_FRAME_BYTES


class FrameProtocol(asyncio.Protocol):
    """Calls `on_frame(payload)` for every complete frame, and `on_lost()` once when the stream ends.

    A length over the limit ends the connection: whoever is at the other end does not speak our language.
    `fault` says so then, in words.
    """

    def __init__(self, on_frame: Callable[[memoryview], None], on_lost: Callable[[], None]) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._buffer = bytearray()
        self._transport: asyncio.BaseTransport | None = None
        self.fault = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the transport, to end it when the stream is not frames."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Add what came, hand on what is complete."""
        self._buffer += data
        start = 0
        while (end := self._frame_end(start)) is not None:
            with memoryview(self._buffer) as view, view[start + HEADER.size : end] as payload:
                self._on_frame(payload)
            start = end
        del self._buffer[:start]

    def _frame_end(self, start: int) -> int | None:
        if len(self._buffer) < start + HEADER.size:
            return None
        (length,) = HEADER.unpack_from(self._buffer, start)
        if length > MAX_FRAME_BYTES:
            self.fault = f"sent a frame of {length} bytes, expected at most {MAX_FRAME_BYTES}"
            if self._transport is not None:
                self._transport.abort()  # type: ignore[attr-defined]
            return None
        end = start + HEADER.size + int(length)
        return end if len(self._buffer) >= end else None

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell that nothing more will come."""
        self._on_lost()
