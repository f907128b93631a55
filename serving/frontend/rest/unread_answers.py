"""Answers that the client of one connection leaves unread: they are counted, and do not last for ever."""

from __future__ import annotations

import asyncio

from torchere.serving.frontend.budgets import Budgets
from torchere.serving.io.watchdog import Unread, untaken_bytes


class UnreadAnswers:
    """The write buffer of one connection that was full. Used on the event loop only.

    While it is full its bytes count in the budgets, writers wait, and a watchdog aborts the connection once
    the client has read nothing for long.
    """

    __slots__ = ("_budgets", "_bytes", "_room", "_times_full", "_transport", "_watchdog")

    def __init__(self, transport: asyncio.Transport, budgets: Budgets) -> None:
        self._transport = transport
        self._budgets = budgets
        self._bytes = 0  # in the buffer when it got full; 0: it has room
        self._times_full = 0
        self._room: asyncio.Future[None] | None = None  # set when the full buffer has room again
        self._watchdog = Unread(self._held_back, lambda _: transport.abort())

    def begin(self, longest_bytes: int) -> str:
        """Count the bytes of a full buffer; return an error if all connections hold too much, else "".

        Args:
            longest_bytes: the greatest size of an answer.
        """
        self._room = asyncio.get_running_loop().create_future()
        self._times_full += 1
        self._watchdog.watch()
        self._bytes = self._transport.get_write_buffer_size()
        self._budgets.unsent_bytes += self._bytes
        return self._budgets.flaw_of_answers(longest_bytes)

    def end(self) -> None:
        """Go on with the writers that wait: the buffer has room again, or the connection is closed."""
        self._budgets.unsent_bytes -= self._bytes
        self._bytes = 0
        room, self._room = self._room, None
        if room is not None:
            room.set_result(None)

    def stop(self) -> None:
        """As `end`, for the last time: without it the watchdog would keep this object."""
        self.end()
        self._watchdog.stop()

    async def wait(self) -> None:
        """Wait until the buffer has room, or the connection closes."""
        while self._room is not None and not self._transport.is_closing():
            await asyncio.shield(self._room)

    def _held_back(self) -> tuple[int, int] | None:
        untaken = untaken_bytes(self._transport) if self._room is not None else None
        return None if untaken is None else (self._times_full, untaken)
