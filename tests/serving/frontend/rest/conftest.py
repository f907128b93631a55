"""Talking to a REST server in bytes."""

import asyncio
import contextlib

import pytest

from torchere.serving.frontend.rest.app import listener_app
from torchere.serving.frontend.rest.server import RestServer
from torchere.serving.settings import Address


@pytest.fixture
def talk(planes):
    """`talk(*messages, **settings)`: what a server says to these bytes, sent at once, until it closes."""

    async def main(messages: tuple[bytes, ...], settings: dict) -> bytes:
        app = listener_app(frozenset({"inference"}), planes.data, planes.control, planes.services(**settings))
        server = RestServer(app, Address(port=0), drain_timeout_s=2)
        address = await server.start()
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(b"".join(messages))
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        await server.stop()
        return answer

    return lambda *messages, **settings: asyncio.run(main(messages, settings))
