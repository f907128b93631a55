"""What the connections of one listener share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchere.serving.frontend.http2.connection import Connection
    from torchere.serving.frontend.http2.receiver import Receiver
    from torchere.serving.frontend.http2.stream import Stream

# Read at once, into the same memory for all connections, which stays in the processor's cache.
LANDING_BYTES = 262_144


@dataclass(slots=True)
class Listening:
    """One for each listener; used on its event loop only.

    Attributes:
        open_call: says who answers a call; its stream is ready to be answered.
        receive_limit_bytes: of a message that comes.
        send_limit_bytes: of a message that goes.
        age_s: how old a new connection may become before it is drained; None: any age.
        age_grace_s: how long it may take then to answer its last calls; None: as long as they take.
        leaving: nothing new is taken any more.
        connections: those that are up.
        landing: where what comes in on a connection lies until it has been looked at.
    """

    open_call: Callable[[Stream], Receiver]
    receive_limit_bytes: int
    send_limit_bytes: int
    age_s: Callable[[], float | None] = lambda: None
    age_grace_s: float | None = None
    leaving: bool = False
    connections: set[Connection] = field(default_factory=set)
    landing: memoryview = field(default_factory=lambda: memoryview(bytearray(LANDING_BYTES)))
    _emptied: asyncio.Future[None] | None = None

    async def emptied(self, timeout_s: float) -> None:
        """Wait until the last connection is gone, for so long at most."""
        if self.connections:
            self._emptied = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._emptied}, timeout=timeout_s)

    def lost(self, connection: Connection) -> None:
        """A connection is gone."""
        self.connections.discard(connection)
        if not self.connections and self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)
