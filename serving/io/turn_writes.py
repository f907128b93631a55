"""Sends what a connection has to send in one turn of the event loop with one system call.

uvloop makes a system call for each write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

Buffer = bytes | bytearray | memoryview
Buffers = Sequence[Buffer]

AT_ONCE_BYTES = 65_536  # wait for the end of the turn at most; beyond it all goes out at once


class TurnWrites:
    """Holds frames until the end of the turn. Lives on the event loop.

    A batch answers many calls of one gRPC connection in one turn; a system call for each was a fifth of what
    a call cost.
    """

    __slots__ = ("_held", "_held_bytes", "_is_due", "_loop", "_transport")

    def __init__(self) -> None:
        self._held: list[Buffer] = []
        self._held_bytes = 0
        self._is_due = False  # a flush is to come

    def begin(self, transport: asyncio.Transport) -> None:
        """The connection is there; nothing may be written before."""
        self._transport = transport
        self._loop = asyncio.get_running_loop()

    def write(self, data: Buffer) -> None:
        """Send one or more whole frames."""
        self._held.append(data)
        self._count(len(data))

    def write_all(self, buffers: Buffers) -> None:
        """Send what is whole frames together."""
        self._held += buffers
        self._count(sum(map(len, buffers)))

    def expect_flush(self) -> None:
        """The caller calls `flush` itself, before this turn is over."""
        self._is_due = True

    def flush(self) -> None:
        """Send what is held."""
        self._is_due = False
        if self._held:
            self._send()

    def close(self) -> None:
        """Send what is held, and end the connection."""
        self.flush()
        self._transport.close()

    def _count(self, size: int) -> None:
        self._held_bytes += size
        if self._held_bytes > AT_ONCE_BYTES:
            self._send()
        elif not self._is_due:
            self._is_due = True
            self._loop.call_soon(self.flush)

    def _send(self) -> None:
        held, size = self._held, self._held_bytes
        self._held, self._held_bytes = [], 0
        if self._transport.is_closing():
            return
        if size > AT_ONCE_BYTES:
            write_together(self._transport, held)
        else:
            self._transport.write(held[0] if len(held) == 1 else b"".join(held))


def write_together(transport: asyncio.WriteTransport, buffers: Buffers) -> None:
    """Send buffers in one system call, uncopied; pauses the protocol when too much is left over.

    `writelines` of asyncio's own loop does not pause it in Python 3.12 and 3.13.0; setting the limits does.
    """
    transport.writelines(buffers)
    low, high = transport.get_write_buffer_limits()
    if transport.get_write_buffer_size() > high:
        transport.set_write_buffer_limits(high, low)
