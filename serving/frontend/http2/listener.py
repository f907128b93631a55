"""State shared by the HTTP/2 connections of one listening socket."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Protocol

from torchere.serving.frontend.budgets import Budgets
from torchere.serving.frontend.connection_limit import ConnectionLimit, IdleConnection
from torchere.serving.frontend.http2.graceful_close import GracefulClose
from torchere.serving.frontend.http2.messages import MessageFailed
from torchere.serving.frontend.http2.stream import CallListener, Stream

READ_BUFFER_BYTES = 262_144
AGE_SPREAD = 0.1  # the maximum age of a connection varies by up to this share, at random


class ListedConnection(IdleConnection, Hashable, Protocol):
    """The part of a connection that its listener uses."""

    closing: GracefulClose

    def end_calls(self, error: MessageFailed) -> None:
        """End its open calls with an error, and close it after them."""

    def abort(self) -> None:
        """Close it now."""


@dataclass(slots=True)
class Listener:
    """State shared by the connections of one listening socket; used on its event loop only.

    Attributes:
        open_call: returns the listener of a new call; it may answer the stream at once.
        receive_limit_bytes: maximum size of a received message.
        send_limit_bytes: maximum size of a sent message.
        age_s: maximum age of a connection, in seconds, after which it is closed gracefully; None: no limit.
        age_grace_s: maximum duration of its last calls after that, in seconds; None: no limit.
        min_upload_rate: bytes per second that a client must send of an incomplete message; 0: any number.
        draining: new connections are closed gracefully at once.
        budgets: memory budgets for the bytes that the server buffers for clients.
        connection_limit: makes room for a new connection, or refuses it; None: no limit.
        connections: the open connections.
        read_buffer: shared by all connections, so that it stays in the processor's cache.
    """

    open_call: Callable[[Stream], CallListener]
    receive_limit_bytes: int
    send_limit_bytes: int
    age_s: float | None = None
    age_grace_s: float | None = None
    min_upload_rate: float = 0.0
    draining: bool = False
    budgets: Budgets = field(default_factory=Budgets)
    connection_limit: ConnectionLimit | None = None
    connections: set[ListedConnection] = field(default_factory=set)
    read_buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(READ_BUFFER_BYTES)))
    _all_closed: asyncio.Future[None] | None = None

    def new_age_s(self) -> float | None:
        """Return the maximum age of a new connection, varied at random so that reconnects do not coincide."""
        varied = random.uniform(1 - AGE_SPREAD, 1 + AGE_SPREAD)
        return None if self.age_s is None else self.age_s * varied

    def drain(self) -> None:
        """Close every connection gracefully, including those that are still in a TLS handshake."""
        self.draining = True
        for connection in list(self.connections):
            connection.closing.begin()

    async def all_closed(self, timeout_s: float) -> None:
        """Wait until the last connection is closed, for `timeout_s` at most."""
        if self.connections:
            self._all_closed = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._all_closed}, timeout=timeout_s)

    def end_calls(self, error: MessageFailed) -> None:
        """End every open call with an error, and close the connections after that."""
        for connection in list(self.connections):
            connection.end_calls(error)

    def abort(self) -> None:
        """Close every connection now."""
        for connection in list(self.connections):
            connection.abort()

    def lost(self, connection: ListedConnection) -> None:
        """Forget a connection that is closed."""
        self.connections.discard(connection)
        if not self.connections and self._all_closed is not None and not self._all_closed.done():
            self._all_closed.set_result(None)
