"""Unread answers of one connection: counts their bytes, and aborts a connection that reads nothing."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from torchere.serving.frontend.budgets import Budgets
from torchere.serving.io import watchdog
from torchere.serving.io.turn_writes import Buffer

SLICE_BYTES = 65_536  # size of the parts in which a long answer is written over TLS

logger = logging.getLogger(__name__)


class UnreadAnswers:
    """The write buffer of one connection, and the rest of an answer over TLS. Used on the event loop only.

    While the buffer is full, the bytes of both count in the budgets, writers wait, and a watchdog aborts the
    connection if the client reads nothing for long.

    A TLS transport encrypts all bytes that it gets, and passes them to its TCP transport, before it reports
    that it is full. Its buffer size does not include the bytes there, and its `close` drops them after half a
    minute. So over TLS answers are written in slices, and the rest waits here.

    Attributes:
        is_of_tls: the connection uses TLS, so call `write` and `close` here, not those of the transport.
    """

    __slots__ = (
        *("_budgets", "_bytes", "_closes", "_rest", "_room", "_times_full", "_transport"),
        *("_watchdog", "is_of_tls"),
    )

    def __init__(self, transport: asyncio.Transport, budgets: Budgets) -> None:
        self._transport = transport
        self._budgets = budgets
        self.is_of_tls = transport.get_extra_info("sslcontext") is not None
        if self.is_of_tls:
            transport.set_write_buffer_limits(SLICE_BYTES)
        self._rest: deque[memoryview] = deque()  # not written yet; empty if the buffer has room
        self._closes = False  # the connection is closed when the buffer has room
        self._bytes = 0  # of buffer and rest when the buffer got full; 0: it has room
        self._times_full = 0
        self._room: asyncio.Future[None] | None = None  # set when the full buffer has room again
        self._watchdog = watchdog.Stalls(watchdog.UNREAD_TIMEOUT_S, self._held_back, self._give_up)

    def begin(self, longest_bytes: int) -> str:
        """Count the bytes of a full buffer; return an error as `Budgets.flaw_of_answers`."""
        self._room = asyncio.get_running_loop().create_future()
        self._times_full += 1
        self._watchdog.watch()
        self._bytes = self._transport.get_write_buffer_size() + self._rest_bytes()
        self._budgets.unsent_bytes += self._bytes
        return self._budgets.flaw_of_answers(longest_bytes)

    def end(self) -> None:
        """Wake the writers that wait: the buffer has room again, or the connection is closed."""
        self._budgets.unsent_bytes -= self._bytes
        self._bytes = 0
        room, self._room = self._room, None
        if room is not None:
            room.set_result(None)
        self._write_rest()
        if self._closes and self._room is None:
            self._transport.close()

    def write(self, *buffers: Buffer) -> None:
        """Write buffers over TLS, in slices."""
        for buffer in buffers:
            if buffer:
                self._rest.append(memoryview(buffer))
        self._write_rest()

    def _write_rest(self) -> None:
        while self._rest and self._room is None and not self._transport.is_closing():
            whole = self._rest.popleft()
            if len(whole) > SLICE_BYTES:
                self._rest.appendleft(whole[SLICE_BYTES:])
            self._transport.write(whole[:SLICE_BYTES])  # may call `begin`

    def close(self) -> None:
        """Close the connection after all written bytes."""
        if self.is_of_tls and self._room is not None:
            self._closes = True
        else:
            self._transport.close()

    def stop(self) -> None:
        """As `end`, for the last time; stops the watchdog, which would keep this object."""
        self._rest.clear()
        self.end()
        self._watchdog.stop()

    async def wait(self) -> None:
        """Wait until the buffer has room, or the connection closes."""
        while self._room is not None and not self._transport.is_closing():
            await asyncio.shield(self._room)

    def _rest_bytes(self) -> int:
        return sum(map(len, self._rest))

    def _held_back(self) -> dict[None, tuple[int, int]]:
        """Return the progress of the client, for the watchdog; empty if no bytes wait for it, or unknown."""
        in_kernel = watchdog.bytes_in_kernel(self._transport) if self._room is not None else None
        if in_kernel is None:
            return {}
        held_bytes = self._rest_bytes() + self._transport.get_write_buffer_size() + in_kernel
        return {None: (self._times_full, held_bytes)}

    def _give_up(self, stalled: object) -> None:
        logger.info(
            "closed a connection whose client read nothing of its answer for %g s", watchdog.UNREAD_TIMEOUT_S
        )
        self._transport.abort()
