"""How long a client may take nothing of what is there for it."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import struct
import termios
from collections.abc import Callable
from typing import TypeVar

from torchere.serving.frontend.stalls import Stalls

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


class Unread(Stalls[None, T]):
    """Gives up what a client stopped reading, and would hold for ever. Used on the event loop only.

    A client has between one and two `UNREAD_TIMEOUT_S`.

    Args:
        held_back: None when nothing waits for the client, else what changes as soon as it takes a byte.
        give_up: ends the connection; gets what was held back.
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
