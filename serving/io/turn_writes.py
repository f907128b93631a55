"""Write coalescing: one system call sends all frames that a connection gets in one event-loop turn.

uvloop makes a system call for each write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

Buffer = bytes | bytearray | memoryview
Buffers = Sequence[Buffer]

AT_ONCE_BYTES = 65_536  # limit on bytes that are held until the end of the turn; more are sent immediately


class TurnWrites:
    """Buffers frames until the end of the event-loop turn. Use it on the event loop only.

    A finished batch answers many calls of one gRPC connection in the same turn; one system call per answer
    was a fifth of the cost of a call.
    """

    __slots__ = ("_held", "_held_bytes", "_is_due", "_loop", "_transport")

    def __init__(self) -> None:
        self._held: list[Buffer] = []
        self._held_bytes = 0
        self._is_due = False  # a flush is scheduled

    def begin(self, transport: asyncio.Transport) -> None:
        """Set the transport of the connection. Call it before any write."""
        self._transport = transport
        self._loop = asyncio.get_running_loop()

    def write(self, data: Buffer) -> None:
        """Buffer or send one or more complete frames."""
        self._held.append(data)
        self._count(len(data))

    def write_all(self, buffers: Buffers) -> None:
        """Hold `buffers`, which together contain complete frames, or send them if too many bytes are held."""
        self._held += buffers
        self._count(sum(map(len, buffers)))

    def expect_flush(self) -> None:
        """Expect the caller to call `flush` before the end of this turn, so that no flush is scheduled."""
        self._is_due = True

    def flush(self) -> None:
        """Send the frames that are held."""
        self._is_due = False
        if self._held:
            self._send()

    def close(self) -> None:
        """Send the buffered frames and close the connection."""
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
    """Send buffers in one system call, without copying; pause the protocol if too many bytes are unsent.

    `writelines` of asyncio's own event loop does not pause the protocol in Python 3.12 and 3.13.0; setting
    the write-buffer limits does.
    """
    transport.writelines(buffers)
    low, high = transport.get_write_buffer_limits()
    if transport.get_write_buffer_size() > high:
        transport.set_write_buffer_limits(high, low)
