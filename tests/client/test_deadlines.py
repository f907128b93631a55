"""One deadline for all steps of a call: connecting, sending, reading."""

import asyncio
import math
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from scripted_transport import Caller, Clock, Server

from torchere.client import AsyncClient, Client, ConnectionFailed, DeadlineExceeded
from torchere.client.transport import TimeLeft


def test_each_step_may_take_what_the_ones_before_have_left() -> None:
    remaining_s = iter([3.0, 2.5, -1.0])
    left = TimeLeft(lambda: next(remaining_s))
    assert (left.get("connect"), left.get("write"), left.get("read")) == (3.0, 2.5, 0.001)


@pytest.mark.parametrize("remaining_s", [math.inf, 1e10])
def test_more_time_than_sockets_know_is_no_bound(remaining_s: float) -> None:
    assert TimeLeft(lambda: remaining_s)["read"] is None


def test_httpx_gets_what_is_left_at_each_step(clock: Clock) -> None:
    found: list[float | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        timeouts = request.extensions["timeout"]
        for step in ("connect", "write", "read"):
            found.append(timeouts.get(step))
            clock.sleep(2)
        return httpx.Response(200)

    with Client(transport=httpx.MockTransport(answer)) as client:
        client.predict("net", timeout_s=10)
    assert found == [10, 8, 6]


class SlowLine(httpx.BaseTransport):
    """Takes a second for each piece of a request."""

    def __init__(self, clock: Clock) -> None:
        self.sent_bytes = 0
        self._clock = clock

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        assert isinstance(request.stream, httpx.SyncByteStream)
        for piece in request.stream:
            self.sent_bytes += len(piece)
            self._clock.sleep(1)
        return httpx.Response(200)


def test_a_slow_line_is_given_up_at_the_deadline(clock: Clock) -> None:
    line = SlowLine(clock)
    late = pytest.raises(DeadlineExceeded, match="no answer within 3 s")
    with Client(transport=line) as client, late:
        client.predict("net", bytes(10_000_000), timeout_s=3)
    assert 0 < line.sent_bytes < 10_000_000


class BreaksOff(httpx.SyncByteStream, httpx.AsyncByteStream):
    """An answer whose last part comes after two seconds, and which is broken off behind it."""

    def __init__(self, clock: Clock, part: bytes) -> None:
        self._clock = clock
        self._part = part

    def __iter__(self) -> Iterator[bytes]:
        self._clock.sleep(2)
        yield self._part
        raise httpx.RemoteProtocolError("incomplete chunked read")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self:
            yield part


class Breaking(Server):
    """Begins each answer, and breaks it off."""

    def __init__(self, clock: Clock, part: bytes = b"") -> None:
        super().__init__()
        self._broken = BreaksOff(clock, part)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=self._broken)


def test_a_stream_that_the_server_breaks_off_at_the_deadline_is_too_late(call: Caller, clock: Clock) -> None:
    with pytest.raises(DeadlineExceeded, match="no answer within 2 s"):
        call(Breaking(clock), lambda client: client.predict_stream("net", timeout_s=2))
    with pytest.raises(ConnectionFailed, match="broke"):
        call(Breaking(clock), lambda client: client.predict_stream("net", timeout_s=3))


def test_an_event_that_says_that_the_time_is_over_is_no_failure_of_the_model(
    call: Caller, clock: Clock
) -> None:
    server = Breaking(clock, b'data: {"error": "The deadline of the request passed"}\n\n')
    with pytest.raises(DeadlineExceeded, match="no answer within 1 s"):
        call(server, lambda client: client.infer_stream("net", {"x": [1.0]}, timeout_s=1))


def test_no_call_waits_for_the_connection_of_another() -> None:
    calls = 101  # httpx's own limit is 100

    async def answered() -> int:
        all_came = asyncio.Event()
        came = 0

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal came
            await reader.readuntil(b"\r\n\r\n")
            came += 1
            if came == calls:
                all_came.set()
            await all_came.wait()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=2 * calls)
        address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, AsyncClient(address, timeout_s=20) as client:
            return len(await asyncio.gather(*(client.predict("net") for _ in range(calls))))

    assert asyncio.run(answered()) == calls
