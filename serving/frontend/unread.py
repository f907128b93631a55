"""How long a client may take nothing of what is there for it."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import struct
import termios
from collections.abc import Callable

UNREAD_TIMEOUT_S = 60.0  # between two looks: a client that took nothing from one to the next is given up

logger = logging.getLogger(__name__)


def untaken_bytes(transport: asyncio.WriteTransport) -> int:
    """What was written and the client has not got, here and in the kernel, which may hold megabytes of it.

    The kernel takes more only when a good part of that is gone, so what is here says little of a slow client.
    """
    here = transport.get_write_buffer_size()
    connection = transport.get_extra_info("socket")
    try:
        (in_kernel,) = struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)))
    except OSError:  # closed a moment ago
        in_kernel = 0
    return here + int(in_kernel)


class Unread:
    """Ends a connection whose client stopped reading, and would hold its answers for ever. Loop only.

    Looks now and then while something is held back, rather than counting what goes out; so a client has
    between one and two `UNREAD_TIMEOUT_S`.

    Args:
        held_back: None when nothing waits for the client, else what changes as soon as it takes a byte.
        give_up: ends the connection at once.
    """

    def __init__(self, held_back: Callable[[], object], give_up: Callable[[], None]) -> None:
        self._held_back = held_back
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Something may be held back from now on; said again, it means nothing more."""
        if self._timer is None:
            self._look_later()

    def stop(self) -> None:
        """The connection is gone."""
        if self._timer is not None:
            self._timer.cancel()

    def _look_later(self) -> None:
        self._timer = self._loop.call_later(UNREAD_TIMEOUT_S, self._look, self._held_back())

    def _look(self, before: object) -> None:
        self._timer = None
        now = self._held_back()
        if now is None:
            return
        if now == before:
            logger.info("a client took nothing of its answer for %g s: connection closed", UNREAD_TIMEOUT_S)
            self._give_up()
        else:
            self._look_later()
