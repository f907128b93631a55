"""The link between front and worker: one message each way for each turn of the front's event loop."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import cast

BATCH = struct.Struct("<II")  # bytes behind it, items
ITEM = struct.Struct("<III")  # request, model (asked) or gRPC status (answered), bytes of its body
MAX_BATCH = 32
SOCKET_BUFFER_BYTES = 4 * 2**20
CONNECT_S, POLL_S = 30.0, 0.05

Answer = Callable[[int, memoryview], None]  # gRPC status and body


class Link(asyncio.Protocol):
    """The front's end. Used on its event loop only."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._answers: dict[int, Answer] = {}
        self._parts: list[bytes | memoryview] = []
        self._items = self._number = 0
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The worker accepted."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass of it

    def ask(self, model: int, body: bytes | memoryview, answer: Answer) -> None:
        """Send a request with the others of this turn."""
        self._number = self._number + 1 & 0xFFFFFFFF
        self._answers[self._number] = answer
        if not self._items:
            self._loop.call_soon(self._flush)
        self._items += 1
        self._parts += (ITEM.pack(self._number, model, len(body)), body)

    def _flush(self) -> None:
        assert self._transport is not None
        size = sum(map(len, self._parts))
        self._transport.writelines([BATCH.pack(size, self._items), *self._parts])
        self._parts, self._items = [], 0

    def data_received(self, data: bytes) -> None:
        """Answers came, several in each message."""
        self._received += data
        while len(self._received) >= BATCH.size:
            size, items = BATCH.unpack_from(self._received)
            end = BATCH.size + size
            if len(self._received) < end:
                return
            view, at = memoryview(self._received)[BATCH.size : end], 0
            self._received = self._received[end:]  # the views keep the rest
            for _ in range(items):
                number, status, length = ITEM.unpack_from(view, at)
                at += ITEM.size
                self._answers.pop(number)(status, view[at : at + length])
                at += length


async def connected(path: str) -> Link:
    """Connect to the worker that listens, or soon will, on a Unix socket."""
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + CONNECT_S
    while True:
        sock = socket.socket(socket.AF_UNIX)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, path)
        except OSError:
            sock.close()
            if loop.time() > give_up_s:
                raise
            await asyncio.sleep(POLL_S)
        else:
            _, link = await loop.create_connection(Link, sock=sock)
            return link
