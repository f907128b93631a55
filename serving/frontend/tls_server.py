"""Accepts TLS connections, which count toward the limit of their listener as soon as the handshake begins.

asyncio's own server calls `connection_made` only after the TLS handshake. A client that never finishes the
handshake would hold a descriptor that no limit counts or takes back.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable, MutableSet, Sequence
from pathlib import Path
from typing import Any

from torchere.serving.access.tls import HANDSHAKE_TIMEOUT_S
from torchere.serving.config.server_settings import Address
from torchere.serving.frontend.connection_limit import ConnectionLimit

ACCEPTED_AT_ONCE = 32  # of one socket in a loop iteration
RETRY_S = 1.0  # after `accept` failed for want of descriptors or memory

logger = logging.getLogger(__name__)


class TlsServer:
    """Server of listening sockets, which `close` closes. Used on the event loop only.

    `others` are the listener's connections that finished their handshakes; `connected` creates a protocol.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        context: ssl.SSLContext,
        limit: ConnectionLimit,
        others: MutableSet[Any],
        connected: Callable[[], asyncio.BaseProtocol],
    ) -> None:
        self.sockets = tuple(sockets)
        self._context = context
        self._limit = limit
        self._others = others
        self._connected = connected
        self._loop = asyncio.get_running_loop()
        for each in self.sockets:
            each.setblocking(False)
            self._watch(each)

    def close(self) -> None:
        """Accept no more connections; handshakes go on."""
        for each in self.sockets:
            self._loop.remove_reader(each)
            each.close()
        self.sockets = ()

    def _watch(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:  # not closed in the meantime
            self._loop.add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as err:  # as asyncio does: the socket would be ready again at once
                logger.error("a TLS connection can't be accepted: %s", err)
                self._loop.remove_reader(listening)
                self._loop.call_later(RETRY_S, self._watch, listening)
                return
            if not self._limit.admits(self._others):
                accepted.close()
                continue
            accepted.setblocking(False)
            if accepted.family != socket.AF_UNIX:
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            handshake = _Handshake()
            self._limit.handshakes.add(handshake)
            handshake.task = self._loop.create_task(self._shake(accepted, handshake))

    async def _shake(self, accepted: socket.socket, handshake: _Handshake) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._connected, accepted, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
            )
        except OSError as err:  # errors of TLS and the timeout are of this kind
            logger.debug("a TLS handshake failed: %s", err)
        finally:
            self._limit.handshakes.discard(handshake)


class _Handshake:
    """The handshake of one connection, as the limit sees it."""

    __slots__ = ("_began_s", "task")

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self.task: asyncio.Task[None] | None = None

    def idle_since_s(self) -> float:
        """Return when the connection was accepted, because it has no request yet."""
        return self._began_s

    def close_idle(self) -> None:
        """Close the connection, because others need its place."""
        if self.task is not None:
            self.task.cancel()


async def bound_sockets(address: Address, backlog: int, *, only_first: bool = False) -> list[socket.socket]:
    """Return the listening sockets of an address.

    A host name has one for each of its addresses, or with `only_first` only one, for its first IPv4 address.
    `[::]` accepts IPv4, too, as in TorchServe: in a dual-stack cluster a pod has one address of each kind.

    Raises:
        OSError: the address can't be bound.
    """
    if address.unix_path is not None:
        Path(address.unix_path).unlink(missing_ok=True)  # may be left over from a killed server
        wanted: list[tuple[int, Any]] = [(socket.AF_UNIX, address.unix_path)]
    else:
        kind = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        # Unlike this function, `bind` and uvloop's own `getaddrinfo` drop the zone of an IPv6 address.
        found = await asyncio.to_thread(
            socket.getaddrinfo,
            address.host,
            address.port,
            family=kind if only_first else socket.AF_UNSPEC,
            type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )
        wanted = list(dict.fromkeys((family, bound) for family, _, _, _, bound in found))
        wanted = wanted[:1] if only_first else wanted
    sockets: list[socket.socket] = []
    try:
        for family, name in wanted:
            sockets.append(socket.socket(family, socket.SOCK_STREAM))
            if family == socket.AF_INET6:
                # A mapped address such as `::ffff:127.0.0.1` accepts IPv4, too.
                sockets[-1].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, False)
            sockets[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sockets[-1].bind(name)
            sockets[-1].listen(backlog)
    except OSError:
        for each in sockets:
            each.close()
        raise
    return sockets
