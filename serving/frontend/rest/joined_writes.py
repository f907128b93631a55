"""A transport that sends the head and the body of an answer together.

uvicorn writes them one after the other, and each write is a system call that wakes the client: for small
answers that was nearly half of what the event loop did (py-spy, 32 connections).
"""

from __future__ import annotations

import asyncio
from typing import Any

from torchere.serving.turn_writes import write_together

LARGE_BYTES = 65_536  # from here on putting together what is sent costs more than sending it in two


class JoinedWrites:
    """Holds a write back until the next one, or the end of this turn of the loop, whichever comes first.

    Everything else goes to the transport as it is. Used on the event loop only.
    """

    __slots__ = ("_held", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held: bytes | None = None

    def write(self, data: bytes) -> None:
        """Send `data` after what was held; hold it when nothing was."""
        held, self._held = self._held, None
        if held is not None:
            self._write_both(held, data)
            return
        self._held = data
        self._loop.call_soon(self.flush)

    def write_whole(self, head: bytes, body: bytes = b"") -> None:
        """Send both now, after what was held."""
        if self._held is not None:
            self.flush()
        self._write_both(head, body)

    def _write_both(self, first: bytes, second: bytes) -> None:
        if self._transport.is_closing():
            return  # the client left a moment ago, and the protocol has not heard of it
        if len(second) > LARGE_BYTES:
            write_together(self._transport, (first, second))
        else:
            self._transport.write(first + second)

    def flush(self) -> None:
        """Send what is held."""
        held, self._held = self._held, None
        if held is not None and not self._transport.is_closing():
            self._transport.write(held)

    def close(self) -> None:
        """Send what is held, and close."""
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        """Whether it is closed, or about to be."""
        return self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
