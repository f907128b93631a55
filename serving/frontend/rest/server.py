"""Running one REST listener: a uvicorn server that neither owns the process nor its signals."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from torchere.serving.frontend.rest.protocol import Protocol
from torchere.serving.frontend.tls import Certificates
from torchere.serving.settings import Address

BACKLOG = 1024
# uvloop takes one connection of a listening socket a turn (libuv does, since 1.45), and a turn may hold a
# whole batch: of 128 clients that came at once the last waited half a second. So the loop watches the same
# socket by so many descriptors.
ACCEPTED_A_TURN = 32
KEEP_ALIVE_S = 75  # idle connections; longer than the 60 s of common load balancers, so they close first
# Python 3.13 renamed these with RFC 9110; TorchServe's clients see the names of RFC 2616 under every Python.
STATUS_LINE |= {
    413: b"HTTP/1.1 413 Request Entity Too Large\r\n",
    414: b"HTTP/1.1 414 Request-URI Too Long\r\n",
    416: b"HTTP/1.1 416 Requested Range Not Satisfiable\r\n",
    422: b"HTTP/1.1 422 Unprocessable Entity\r\n",
}


class RestServer:
    """One listener. `start` binds and serves, `stop` drains; call both on the loop that serves.

    Example:
        server = RestServer(app, Address(port=0), drain_timeout_s=30)
        await server.start()      # server.address has the port that was free
        ...
        await server.stop()
    """

    def __init__(
        self,
        app: ASGIApp,
        address: Address,
        *,
        drain_timeout_s: float = 30.0,
        certificates: Certificates | None = None,
    ) -> None:
        if address.tls and certificates is None:
            raise ValueError(f"{address} needs a certificate and a private key, and none was given")
        self.address = address
        config = _config(app, drain_timeout_s)
        config.load()
        if address.tls and certificates is not None:
            config.ssl = certificates.server_context()
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None
        self._socket: socket.socket | None = None

    async def start(self) -> Address:
        """Bind and begin to serve; returns the address with its real port.

        Raises:
            OSError: the address can't be bound.
        """
        self._socket = _bound_socket(self.address)
        if self.address.unix_path is None:
            self.address = Address(self.address.host, self._socket.getsockname()[1], tls=self.address.tls)
        again = [self._socket.dup() for _ in range(ACCEPTED_A_TURN - 1)]
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket, *again]))
        started = asyncio.create_task(self._server.up.wait())
        await asyncio.wait({self._task, started}, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if self._task.done():
            await self._task
        return self.address

    def drain(self) -> None:
        """Serve on, and end each connection with its next answer, so that clients look for another server."""
        self._server.server_state.draining = True
        for connection in self._server.server_state.connections:
            if isinstance(connection, Protocol):
                connection.drain()

    async def stop(self) -> None:
        """Refuse new connections, let requests finish for at most `drain_timeout_s`, cancel what is left."""
        if self._task is None:
            return
        self.drain()
        self._server.should_exit = True
        await self._task
        if self.address.unix_path is not None:
            Path(self.address.unix_path).unlink(missing_ok=True)


class _State(uvicorn.server.ServerState):
    """What the connections of a listener share."""

    def __init__(self) -> None:
        super().__init__()
        self.draining = False  # true: an answer ends its connection


class _Server(uvicorn.Server):
    """uvicorn's server, which tells when it is up, and leaves signals to `serving/server.py`."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.server_state: _State = _State()
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _config(app: ASGIApp, drain_timeout_s: float) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(drain_timeout_s)),
    )


def _bound_socket(address: Address) -> socket.socket:
    if address.unix_path is not None:
        Path(address.unix_path).unlink(missing_ok=True)  # left by a server that was killed
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(address.unix_path)
        return listening
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((address.host, address.port))
    except OSError:
        listening.close()
        raise
    return listening
