"""Timeout for clients that read none of their response."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import struct
import termios
from collections.abc import Callable
from typing import TypeVar

from torchere.serving.frontend.stalls import Stalls

UNREAD_TIMEOUT_S = 150.0  # between two checks: a client that read nothing in between is disconnected

logger = logging.getLogger(__name__)
T = TypeVar("T")


def untaken_bytes(transport: asyncio.WriteTransport) -> int | None:
    """Return the number of written bytes that the client has not received, in our and the kernel's buffer.

    The kernel may hold megabytes, and accepts more only when a good part of them is gone, so our buffer alone
    says little about a slow client.

    Returns:
        None where the number is unknown: asyncio's TLS transport does not expose its encrypted bytes.
    """
    connection = transport.get_extra_info("socket")
    if connection is None or transport.get_extra_info("sslcontext") is not None:
        return None
    try:
        (in_kernel,) = struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)))
    except (OSError, ValueError):  # the socket was closed just now
        return None
    return transport.get_write_buffer_size() + int(in_kernel)


class Unread(Stalls[None, T]):
    """Watchdog that ends a connection whose client stopped reading. Used on the event loop only.

    It ends the connection after one to two `UNREAD_TIMEOUT_S` without progress.

    Args:
        held_back: returns None when nothing waits for the client, else a value that changes as soon as the
            client reads a byte.
        give_up: ends the connection; gets the last value of `held_back`.
    """

    __slots__ = ()

    def __init__(self, held_back: Callable[[], T | None], give_up: Callable[[T], None]) -> None:
        def waiting() -> dict[None, T]:
            held = held_back()
            return {} if held is None else {None: held}

        def stalled(held: dict[None, T]) -> None:
            logger.info("a client took nothing of its answer for %g s: given up", UNREAD_TIMEOUT_S)
            give_up(held[None])

        super().__init__(UNREAD_TIMEOUT_S, waiting, stalled)
