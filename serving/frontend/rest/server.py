"""Servers of the REST ports: the listeners that the settings name; each is bound, served and drained."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from functools import partial
from pathlib import Path

from torchere.serving.access.tls import Certificates
from torchere.serving.config.server_settings import Address, ServerSettings
from torchere.serving.frontend.authorisation import Surfaces
from torchere.serving.frontend.connection_limit import listening_descriptors, open_file_limit
from torchere.serving.frontend.control import ControlPlane
from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.rest.connection import Connection
from torchere.serving.frontend.rest.listener import Listener
from torchere.serving.frontend.rest.routes import routes
from torchere.serving.frontend.services import Services
from torchere.serving.frontend.tls_server import TlsServer, bound_sockets

BACKLOG = 1024
MIN_DRAIN_S = 1.0  # requests on their way to idle connections are answered even without a drain timeout
LOOK_S = 0.05  # between two checks whether all connections are closed

logger = logging.getLogger(__name__)


class RestServer:
    """Server of one listener. `start` binds and serves, `stop` drains; call both on the serving loop.

    Example:
        server = RestServer(listener, Address(port=0), drain_timeout_s=30)
        await server.start()      # server.address has the port that was free
        ...
        await server.stop()
    """

    def __init__(
        self,
        listener: Listener,
        address: Address,
        *,
        drain_timeout_s: float = 30.0,
        certificates: Certificates | None = None,
    ) -> None:
        if address.tls and certificates is None:
            raise ValueError(f"{address} needs a certificate and a private key, and none was given")
        self.address = address
        self.listener = listener
        self.drain_timeout_s = max(MIN_DRAIN_S, drain_timeout_s)
        self._context = certificates.server_context() if address.tls and certificates is not None else None
        self._servers: list[asyncio.Server | TlsServer] = []
        self._sockets: list[socket.socket] = []

    async def start(self) -> Address:
        """Bind and begin to serve; return the address with its actual port.

        Raises:
            OSError: the address can't be bound.
        """
        (bound,) = await bound_sockets(self.address, BACKLOG, only_first=True)
        if self.address.unix_path is None:
            self.address = Address(self.address.host, bound.getsockname()[1], tls=self.address.tls)
        loop, listener = asyncio.get_running_loop(), self.listener
        connected = partial(Connection, listener)
        if self._context is not None:
            limit, others = listener.connection_limit, listener.connections
            self._servers.append(TlsServer([bound], self._context, limit, others, connected))
            return self.address
        descriptors = listening_descriptors(open_file_limit())
        self._sockets = [bound, *(bound.dup() for _ in range(descriptors - 1))]
        try:
            for each in self._sockets:
                self._servers.append(await loop.create_server(connected, sock=each, backlog=BACKLOG))
        except BaseException:
            self._close()
            raise
        return self.address

    def drain(self) -> None:
        """Close each connection after its next response, so that clients move to another server.

        New connections are still accepted.
        """
        self.listener.draining = True
        for connection in self.listener.connections:
            connection.announce_end()

    async def stop(self) -> None:
        """Refuse new connections, drain requests for at most `drain_timeout_s`, then cancel remaining tasks.

        Predictions without a task are not cancelled: they are answered when their versions are closed.
        """
        if not self._servers:
            return
        self.drain()
        self._close()
        listener = self.listener
        listener.stopping = True
        for connection in list(listener.connections):
            connection.shutdown()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._until_closed(), self.drain_timeout_s)
        if listener.tasks:
            logger.error("Cancelled after the drain timeout: %d answers in parts", len(listener.tasks))
            for task in listener.tasks:
                task.cancel()

    async def _until_closed(self) -> None:
        while self.listener.connections or self.listener.tasks:
            await asyncio.sleep(LOOK_S)

    def _close(self) -> None:
        for server in self._servers:
            server.close()
        for each in self._sockets:
            each.close()
        self._servers, self._sockets = [], []
        if self.address.unix_path is not None:
            Path(self.address.unix_path).unlink(missing_ok=True)


def listener_of(
    surfaces: Surfaces, dataplane: DataPlane, controlplane: ControlPlane, services: Services
) -> Listener:
    """Return the listener of a port that serves the named APIs. Use it on one event loop only."""
    return Listener(surfaces, services, dataplane, routes(surfaces, dataplane, controlplane, services))


def listeners(settings: ServerSettings) -> list[tuple[Address, Surfaces]]:
    """Return the addresses to listen on, each with its APIs; equal addresses share one listener.

    Port 0 means any free port, so two addresses with port 0 are never equal. A listener shared by two or more
    APIs serves the metrics too, if a metrics address is configured.
    """
    wanted: list[tuple[Address, Surfaces]] = [
        (settings.inference_address, frozenset({"inference"})),
        (settings.management_address, frozenset({"management"})),
    ]
    if settings.metrics_address is not None:
        wanted.append((settings.metrics_address, frozenset({"metrics"})))
    merged: dict[object, tuple[Address, Surfaces]] = {}
    for address, surfaces in wanted:
        is_fixed = address.unix_path is not None or address.port != 0
        place = address if is_fixed else object()
        merged[place] = (address, surfaces | merged[place][1] if place in merged else surfaces)
    extra: Surfaces = frozenset() if settings.metrics_address is None else frozenset({"metrics"})
    return [
        (address, surfaces | extra if len(surfaces) > 1 else surfaces)
        for address, surfaces in merged.values()
    ]
