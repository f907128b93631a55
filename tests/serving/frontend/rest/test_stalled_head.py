"""A client that begins a head and does not end it, or never begins one, loses the connection."""

import asyncio

import pytest

from torchere.serving.config.server_settings import Address
from torchere.serving.frontend.rest import connection
from torchere.serving.types import InferResponse

TIMEOUT_S = 0.3
POST = b"POST /predictions/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx"
PING = b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = (
    POST.replace(b"Content-Length: 1\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n1\r\n") + b"\r\n0\r\n\r\n"
)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", TIMEOUT_S)


def conversations(planes, *pieces_of_each: list[bytes]) -> list[bytes]:
    """What the server says on connections of so many pieces until it closes them; the pieces come slowly."""

    async def talk(address: Address, pieces: list[bytes]) -> bytes:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(TIMEOUT_S / 3)
        said = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        return said

    async def main() -> list[bytes]:
        async with planes.serving() as server:
            return await asyncio.gather(*[talk(server.address, pieces) for pieces in pieces_of_each])

    return asyncio.run(main())


@pytest.mark.parametrize("before", [[], [POST], [POST, POST], [PING], [CHUNKED]])
def test_a_head_that_stops_coming_ends_the_connection(planes, before):
    """75 s of keep-alive do not."""
    (said,) = conversations(planes, [*before, POST[:20], POST[20:30]])
    assert said.count(b"HTTP/1.1 ") == said.count(b"HTTP/1.1 200 OK") == len(before)


def test_a_connection_that_never_begins_a_head_is_ended(planes):
    assert conversations(planes, [], [b"\r\n"]) == [b"", b""]


@pytest.mark.parametrize("message", [POST, PING, CHUNKED])
def test_a_request_whose_head_has_come_has_its_time(planes, message):
    async def behave(request):
        await asyncio.sleep(2 * TIMEOUT_S)
        return InferResponse(b"late")

    planes.data.behave = behave
    last = message.replace(b"Host: x\r\n", b"Host: x\r\nConnection: close\r\n")
    alone, known, cut = conversations(planes, [last], [message, b"", message, last], [last[:20], last[20:]])
    assert [said.count(b"HTTP/1.1 200 OK") for said in (alone, known, cut)] == [1, 3, 1]
