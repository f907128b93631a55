"""A REST server on a real socket, over planes that answer what a test tells them to."""

import asyncio
import contextlib
from typing import Any

import pytest

from torchere.serving.access.identity import Role
from torchere.serving.config.server_settings import Address
from torchere.serving.frontend.rest.server import RestServer, listener_of
from torchere.serving.types import InferResponse, StreamedResponse


@pytest.fixture
def planes(planes):
    """The planes of all frontends, with two context managers more, for use within a coroutine.

    `serving(...)` is a server over them on a free port; `connected(...)` is that, and a client's reader and
    writer.
    """

    @contextlib.asynccontextmanager
    async def serving(surface: Role = "inference", **settings):
        listener = listener_of(frozenset({surface}), planes.data, planes.control, planes.services(**settings))
        server = RestServer(listener, Address(port=0), drain_timeout_s=5)
        await server.start()
        try:
            yield server
        finally:
            await server.stop()
            connections: list[Any] = list(listener.connections)
            for connection in connections:  # whose request is never answered
                connection.transport.abort()
            await asyncio.sleep(0)

    @contextlib.asynccontextmanager
    async def connected(surface: Role = "inference", **settings):
        async with serving(surface, **settings) as server:
            reader, writer = await asyncio.open_connection(server.address.host, server.address.port)
            try:
                yield server, reader, writer
            finally:
                writer.transport.abort()

    planes.serving, planes.connected = serving, connected
    return planes


@pytest.fixture
def talk(planes):
    """`talk(*messages, **settings)`: what a server says to these bytes, sent at once, until it closes."""

    async def main(messages: tuple[bytes, ...], settings: dict) -> bytes:
        async with planes.connected(**settings) as (_, reader, writer):
            writer.write(b"".join(messages))
            return await asyncio.wait_for(reader.read(), 20)

    return lambda *messages, **settings: asyncio.run(main(messages, settings))


class Held:
    """For `planes.data.behave`: requests wait for `go_on`, and are answered with what they brought."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()  # one waits
        self.go_on = asyncio.Event()

    async def __call__(self, request) -> InferResponse:
        self.arrived.set()
        await self.go_on.wait()
        return InferResponse(request.parameters[0].value)


@pytest.fixture
def held() -> Held:
    """A behaviour that holds requests back until the test lets them go on."""
    return Held()


class Endless:
    """For `planes.data.behave`: an answer that streams `first`, then nothing until it is given up."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def __call__(self, request) -> StreamedResponse:
        return StreamedResponse(InferResponse(b""), self._parts())

    async def _parts(self):
        try:
            yield b"first"
            await asyncio.Event().wait()
        finally:
            self.ended.set()


@pytest.fixture
def endless() -> Endless:
    """A behaviour whose answer never ends."""
    return Endless()
