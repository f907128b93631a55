"""Every request is counted once and has one line in the access log, however it ends."""

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import pytest

from torchere.serving.errors import HandlerFailed, LeftUnread
from torchere.serving.frontend.rest import connection
from torchere.serving.frontend.rest.server import RestServer
from torchere.serving.types import InferResponse, StreamedResponse

HEAD = b"POST %b HTTP/1.1\r\nHost: x\r\n%b\r\n"
PLAIN, QUERY, EVENTS = b"/predictions/echo", b"/models/echo/invoke", b"/v2/models/echo/generate_stream"
NO_REQUEST = "GET /bad-request HTTP/1.1"
PART = b'{"outputs":[{"name":"t","datatype":"BYTES","shape":[1],"data":["a"]}]}'


def post(path: bytes, body: bytes = b"{}", headers: bytes = b"") -> bytes:
    return HEAD % (path, headers + b"Content-Length: %d\r\n" % len(body)) + body


@pytest.fixture
def counted(planes, caplog):
    """`counted(message, until=None)`: (line, status) of the access log, what was counted, and what came.

    The client reads until the connection ends, or until it has read `until`; then it leaves.
    """

    async def asked(server: RestServer) -> None:
        """Return when the request has come; at the handler, if that is told how to behave."""
        connections: Any = server.listener.connections
        while not any(each.exchange for each in connections) or (
            planes.data.behave and not planes.data.asked
        ):
            await asyncio.sleep(0.001)

    async def main(message: bytes, until: bytes | None) -> bytes:
        async with planes.connected() as (server, reader, writer):
            writer.write(message)
            if until is None:
                return await asyncio.wait_for(reader.read(), 20)
            await asyncio.wait_for(asked(server), 20)
            return await asyncio.wait_for(reader.readuntil(until), 20) if until else b""

    def ask(message: bytes, until: bytes | None = None) -> tuple[list, dict, bytes]:
        with caplog.at_level("INFO", "ACCESS_LOG"):
            said = asyncio.run(main(message, until))
        messages = [record.getMessage() for record in caplog.records if record.name == "ACCESS_LOG"]
        found = [re.fullmatch(r'/127.0.0.1:\d+ "(.*)" (\d+) \d+', message) for message in messages]
        counts = re.findall(r"Requests(\d)XX\{[^}]*} (\d+)", planes.metrics.exposition())
        lines = [(match[1], int(match[2])) for match in found if match is not None]
        assert len(lines) == len(messages)
        return lines, {digit: count for digit, count in counts if count != "0"}, said

    return ask


def one(path: bytes | str, status: int) -> tuple[list, dict]:
    """What `counted` finds of one request with this outcome."""
    line = path if isinstance(path, str) else f"POST {path.decode()} HTTP/1.1"
    return [(line, status)], {str(status // 100): "1"}


@pytest.mark.parametrize(
    "message",
    [b"GARBAGE\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", HEAD % (PLAIN, b"A: %b\r\n" % (b"a" * 9000))],
    ids=["garbage", "TLS", "a long head"],
)
def test_what_is_no_request_counts_as_400(counted, message):
    lines, counts, said = counted(message)
    assert said.startswith(b"HTTP/1.1 400")
    assert (lines, counts) == one(NO_REQUEST, 400)


def test_what_is_sent_behind_a_refusal_is_no_request(counted):
    last = post(PLAIN)  # comes with the one before it as one piece, for all that its length looks like
    none = b"/predictions/none"
    lines, counts, said = counted(post(none, b"", b"X-Length: %d\r\n" % len(last)) + last)
    assert said.count(b"HTTP/1.1 ") == 1
    assert (lines, counts) == one(none, 404)


@pytest.mark.parametrize("path", [PLAIN, QUERY, b"/ping"])
def test_a_broken_body_counts_as_400(counted, path):
    lines, counts, said = counted(HEAD % (path, b"Transfer-Encoding: chunked\r\n") + b"zz\r\nx\r\n0\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 400")
    assert (lines, counts) == one(path, 400)


@pytest.mark.parametrize("path", [PLAIN, QUERY])
def test_a_body_that_stops_coming_counts_as_408(counted, path, monkeypatch):
    monkeypatch.setattr(connection, "BODY_TIMEOUT_S", 0.1)
    lines, counts, said = counted(HEAD % (path, b"Content-Length: 9\r\n") + b"x")
    assert said.startswith(b"HTTP/1.1 408")
    assert (lines, counts) == one(path, 408)


@pytest.mark.parametrize("path", [PLAIN, QUERY])
def test_a_client_that_leaves_in_the_midst_of_its_body_counts_as_499(counted, path):
    lines, counts, _ = counted(HEAD % (path, b"Content-Length: 9\r\n") + b"x", until=b"")
    assert (lines, counts) == one(path, 499)


@pytest.mark.parametrize("path", [PLAIN, QUERY])
def test_a_client_that_does_not_wait_for_its_answer_counts_as_499(planes, counted, path):
    async def behave(request):
        await asyncio.Event().wait()

    planes.data.behave = behave
    lines, counts, _ = counted(post(path), until=b"")
    assert (lines, counts) == one(path, 499)
    assert planes.data.withdrawn == 1


def test_an_answer_that_comes_as_its_client_leaves_is_not_counted_as_well(planes, counted):
    def admit(request, model, version):
        late = SimpleNamespace(withdraw=lambda request: request.finish(InferResponse(b"late")))
        return SimpleNamespace(batcher=late)

    planes.data.admit = admit
    lines, counts, _ = counted(post(PLAIN), until=b"")
    assert (lines, counts) == one(PLAIN, 499)


def streaming(planes, error: Exception | None) -> None:
    """Answer with a part and then the error; None: with nothing more for ever."""

    async def chunks():
        yield PART
        if error is None:
            await asyncio.Event().wait()
        assert error is not None
        raise error

    async def behave(request):
        return StreamedResponse(InferResponse(b""), chunks())

    planes.data.behave = behave


@pytest.mark.parametrize("path", [PLAIN, QUERY, EVENTS])
def test_a_client_that_leaves_in_the_midst_of_a_stream_counts_as_499(planes, counted, path):
    streaming(planes, None)
    lines, counts, _ = counted(post(path), until=b'"a"')
    assert (lines, counts) == one(path, 499)


@pytest.mark.parametrize(
    ("error", "status"),
    [(HandlerFailed("no", 503), 503), (HandlerFailed("no", 429), 429), (LeftUnread(1), 499)],
    ids=["503", "429", "read too slowly"],
)
@pytest.mark.parametrize("path", [PLAIN, QUERY, EVENTS])
def test_a_stream_that_fails_counts_as_what_it_failed_at(planes, counted, path, error, status):
    streaming(planes, error)
    lines, counts, said = counted(post(path, headers=b"Connection: close\r\n"))
    assert said.startswith(b"HTTP/1.1 200 OK")
    assert said.endswith(b"0\r\n\r\n") == (path == EVENTS)  # which ends with the error as an event
    assert (lines, counts) == one(path, status)


@pytest.mark.parametrize("path", [PLAIN, QUERY, EVENTS])
def test_a_stream_that_a_bug_ends_counts_as_500(planes, counted, caplog, path):
    streaming(planes, ZeroDivisionError("bug"))
    lines, counts, said = counted(post(path))
    assert not said.endswith(b"0\r\n\r\n")
    assert (lines, counts) == one(path, 500)
    assert "bug" in caplog.text
