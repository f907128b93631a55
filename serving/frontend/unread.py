"""How long a client may take nothing of what is there for it."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import struct
import termios
from collections.abc import Callable
from typing import Generic, TypeVar

UNREAD_TIMEOUT_S = 150.0  # between two looks: what was not taken at all from one to the next is given up

logger = logging.getLogger(__name__)
T = TypeVar("T")


def untaken_bytes(transport: asyncio.WriteTransport) -> int | None:
    """What was written and the client has not got, here and in the kernel, which may hold megabytes of it.

    The kernel takes more only when a good part of that is gone, so what is here says little of a slow client.

    Returns:
        None where it can't be told: TLS keeps what it has encrypted to itself.
    """
    connection = transport.get_extra_info("socket")
    if connection is None or transport.get_extra_info("sslcontext") is not None:
        return None
    try:
        (in_kernel,) = struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)))
    except (OSError, ValueError):  # closed a moment ago
        return None
    return transport.get_write_buffer_size() + int(in_kernel)


class Unread(Generic[T]):
    """Gives up what a client stopped reading, and would hold for ever. Used on the event loop only.

    Looks now and then while something is held back, rather than counting what goes out; so a client has
    between one and two `UNREAD_TIMEOUT_S`.

    Args:
        held_back: None when nothing waits for the client, else what changes as soon as it takes a byte.
        give_up: ends the connection, or the call; gets what was held back.
    """

    def __init__(self, held_back: Callable[[], T | None], give_up: Callable[[T], None]) -> None:
        self._held_back = held_back
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False

    def watch(self) -> None:
        """Something may be held back from now on; said again, it means nothing more."""
        if self._timer is None:
            self._look_later()

    def stop(self) -> None:
        """The connection is gone."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()

    def _look_later(self) -> None:
        if not self._is_over:
            self._timer = self._loop.call_later(UNREAD_TIMEOUT_S, self._look, self._held_back())

    def _look(self, before: T | None) -> None:
        self._timer = None
        now = self._held_back()
        if now is None:
            return
        if now == before:
            logger.info("a client took nothing of its answer for %g s: given up", UNREAD_TIMEOUT_S)
            self._give_up(now)
        self._look_later()
