"""A client that begins a body and sends no more of it is told so, and its connection ends."""

import asyncio
import json
import time

import pytest

from torchere.serving.frontend.rest import connection
from torchere.serving.frontend.rest.listener import READ_BYTES
from torchere.serving.types import InferResponse

TIMEOUT_S = 0.3
LARGE = READ_BYTES + 50_000
HEAD = b"POST %b HTTP/1.1\r\nHost: x\r\n%b\r\n"


def head(length: int, path: bytes = b"/predictions/echo") -> bytes:
    return HEAD % (path, b"Content-Length: %d\r\n" % length)


BEGINNINGS = {
    "small": head(100) + b"x",
    "large": head(LARGE) + b"x" * 1000,
    "nothing of it": head(100),
    "in chunks": HEAD % (b"/predictions/echo", b"Transfer-Encoding: chunked\r\n") + b"4\r\nabcd\r\n8\r\nx",
    "of tensors": head(100, b"/v2/models/echo/infer") + b"{",
}


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(connection, "BODY_TIMEOUT_S", TIMEOUT_S)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("beginning", BEGINNINGS.values(), ids=BEGINNINGS)
def test_a_body_that_stops_coming_is_answered_with_408_and_the_end(planes, talk, beginning):
    began_s = time.monotonic()
    said = talk(beginning, max_request_bytes=2 * LARGE)
    assert time.monotonic() - began_s >= TIMEOUT_S * 0.9
    status, _, rest = said.partition(b"\r\n")
    assert status == b"HTTP/1.1 408 Request Timeout"
    assert b"connection: close" in rest
    body = json.loads(rest.partition(b"\r\n\r\n")[2])
    assert body["type"] == "RequestTimeoutException"
    assert body.get("error") == (body["message"] if b" /v2/" in beginning else None)
    assert not planes.data.asked


@pytest.mark.usefixtures("impatient")
def test_a_body_that_the_app_waits_for_is_answered_with_408_as_well(planes, talk):
    json_head = head(100, b"/models").replace(b"Host", b"Content-Type: application/json\r\nHost")
    assert talk(json_head + b"{", surface="management").startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert not planes.control.calls


def trickled(planes, *pieces: bytes, every_s: float, rate: int = 0) -> bytes:
    """What the server says to pieces sent one after the other, until it closes or has answered all."""

    async def echo(request):
        return InferResponse(bytes(request.parameters[0].value))

    async def main() -> bytes:
        planes.data.behave = echo
        async with planes.connected(max_request_bytes=2 * LARGE, min_upload_rate=rate) as (_, reader, writer):
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(every_s)
            return await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)

    return asyncio.run(main())


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("size", [6, LARGE], ids=["small", "large"])
def test_a_slow_body_that_keeps_coming_is_waited_for(planes, size):
    piece = b"x" * (size // 6 + 1)
    said = trickled(planes, head(6 * len(piece)), *[piece] * 6, every_s=TIMEOUT_S / 3)
    assert said.startswith(b"HTTP/1.1 200 OK")
    assert len(planes.data.asked) == 1


RATE = 10_000  # bytes a second
PIECE_BYTES = int(RATE * TIMEOUT_S / 3)  # sent every TIMEOUT_S / 3


@pytest.mark.usefixtures("impatient")
def test_a_body_above_the_least_rate_is_waited_for(planes):
    pieces = [b"x" * 2 * PIECE_BYTES] * 9
    said = trickled(planes, head(18 * PIECE_BYTES), *pieces, every_s=TIMEOUT_S / 3, rate=RATE)
    assert said.startswith(b"HTTP/1.1 200 OK")


def dripped(planes, beginning: bytes) -> bytes:
    """Send a byte again and again behind a beginning, and return all that the server answers."""

    async def main() -> bytes:
        async with planes.connected(max_request_bytes=2 * LARGE, min_upload_rate=RATE) as (_, reader, writer):
            writer.write(beginning)
            answer = asyncio.ensure_future(reader.read())
            while not answer.done():
                writer.write(b"0")
                await asyncio.wait({answer}, timeout=TIMEOUT_S / 10)
            return answer.result()

    return asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("beginning", BEGINNINGS.values(), ids=BEGINNINGS)
def test_a_body_that_drips_is_answered_with_408(planes, beginning):
    long_chunk = beginning.replace(b"8\r\nx", b"fff\r\nx")
    assert dripped(planes, long_chunk).startswith(b"HTTP/1.1 408 Request Timeout")
    assert not planes.data.asked


@pytest.mark.usefixtures("impatient")
def test_a_refused_body_that_drips_holds_no_connection(planes):
    unknown = head(LARGE, b"/v2/models/none/infer").replace(b"Host", b"Content-Encoding: odd\r\nHost")
    assert dripped(planes, unknown).startswith(b"HTTP/1.1 4")


@pytest.mark.usefixtures("impatient")
def test_a_connection_is_not_ended_for_a_body_that_is_whole(planes):
    said = trickled(planes, head(4) + b"ab", b"cd", *[b""] * 5, head(2) + b"ef", every_s=TIMEOUT_S / 3)
    assert said.startswith(b"HTTP/1.1 200 OK")
    assert len(planes.data.asked) == 2
