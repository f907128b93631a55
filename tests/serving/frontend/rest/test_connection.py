"""Requests that are sent ahead, that ask for another protocol, or that are none: on a real socket."""

import asyncio
import itertools
import logging
import shutil
from collections import Counter
from typing import Any

import pytest
import uvloop

from torchere.serving.access.client_limits import ClientLimits, Quota
from torchere.serving.frontend.rest.asgi import AppExchange
from torchere.serving.frontend.rest.bodies import MAX_LINE_BYTES, Chunks
from torchere.serving.frontend.rest.exchange import Exchange
from torchere.serving.frontend.rest.heads import MAX_HEADER_BYTES, MAX_REQUEST_LINE_BYTES
from torchere.serving.frontend.rest.predictions import Prediction
from torchere.serving.io import loop_time
from torchere.serving.io.loop_time import LoopTurns
from torchere.serving.types import InferResponse, StreamedResponse

HEAD = b"POST /predictions/echo HTTP/1.1\r\nHost: x\r\n"
CLOSE = b"Connection: close\r\n"
PING = b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"
LAST_PING = b"GET /ping HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
GARBAGE = b"GARBAGE\r\n\r\n"
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"


def plain(body: bytes, headers: bytes = b"") -> bytes:
    return HEAD + headers + b"Content-Length: %d\r\n\r\n" % len(body) + body


def chunked(*parts: bytes, trailer: bytes = b"", headers: bytes = b"") -> bytes:
    body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return HEAD + headers + b"Transfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n" + trailer + b"\r\n"


def answers(said: bytes) -> list[tuple[int, bytes]]:
    """Status and body of each answer, none of which is in chunks."""
    found = []
    while said:
        head, _, rest = said.partition(b"\r\n\r\n")
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        found.append((int(head.split(b" ")[1]), rest[:length]))
        said = rest[length:]
    return found


def said_to(planes, *pieces: bytes, **settings) -> bytes:
    """What the server says until it closes, to pieces that come one after the other."""

    async def main() -> bytes:
        async with planes.connected(**settings) as (_, reader, writer):
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0.01)
            return await asyncio.wait_for(reader.read(), 20)

    return asyncio.run(main())


KINDS = {
    "predictions": plain,
    "expecting": lambda body: plain(body, b"Expect: 200-ok\r\n"),
    "in chunks": lambda body: chunked(body[:2], body[2:]),
    "pings": lambda body: PING,
    "with blank lines": lambda body: b"\r\n\r\n" + plain(body) + b"\r\n",
    "with a trailer": lambda body: chunked(body, trailer=b"X-Sum: 1\r\n"),
    "full of ends": lambda body: chunked(*[b"\r\n\r\n"] * 16),
}


@pytest.mark.parametrize("size", [1 << 20, 1000, 61])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_hundreds_of_requests_sent_ahead_are_answered_in_their_order(planes, kind, size):
    async def echo(request):
        await asyncio.sleep(0)
        return InferResponse(request.parameters[0].value)

    async def main() -> bytes:
        planes.data.behave = echo
        text = b"".join([kind(b"body %d" % i) for i in range(200)]) + plain(b"last", CLOSE)
        async with planes.connected() as (_, reader, writer):
            for start in range(0, len(text), size):
                writer.write(text[start : start + size])
                await asyncio.sleep(0)
            return await asyncio.wait_for(reader.read(), 60)

    found = answers(asyncio.run(main()))
    assert [status for status, _ in found] == [200] * 201
    if planes.data.asked[0][2].parameters[0].value == b"body 0":
        assert [body for _, body in found] == [*[b"body %d" % i for i in range(200)], b"last"]


@pytest.fixture
def exchanges(monkeypatch):
    """The requests that are held: begun, and not answered."""
    held = set()
    init = Exchange.__init__

    def begin(exchange, *args):
        init(exchange, *args)
        held.add(exchange)

    def noting(let_go):
        def end(exchange):
            held.discard(exchange)
            let_go(exchange)

        return end

    monkeypatch.setattr(Exchange, "__init__", begin)
    for kind in (Prediction, AppExchange):
        monkeypatch.setattr(kind, "let_go", noting(kind.let_go))
    return held


@pytest.mark.parametrize("first", [b"", plain(b"x"), chunked(b"x")], ids=["the app", "a length", "chunks"])
def test_what_is_sent_ahead_takes_no_memory_but_its_bytes(planes, held, exchanges, first):
    async def main() -> None:
        planes.data.behave = held
        most = 0
        async with planes.connected() as (_, reader, writer):
            writer.write(first + PING * 5_000 + LAST_PING)
            for _ in range(50):
                most = max(most, len(exchanges))
                await asyncio.sleep(0.002)
            held.go_on.set()
            while len(await asyncio.wait_for(reader.read(2**16), 20)) > 0:
                most = max(most, len(exchanges))
        assert most <= 4

    asyncio.run(main())


def test_the_socket_is_not_read_while_requests_wait(planes):
    async def main() -> None:
        planes.data.behave = lambda request: asyncio.Event().wait()
        async with planes.connected() as (_, _, writer):
            writer.write(chunked(b"x"))
            writer.write(PING * 1_000_000)
            await asyncio.sleep(0.5)
            assert writer.transport.get_write_buffer_size() > 10_000_000

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["predictions", "expecting", "in chunks"])
@pytest.mark.parametrize("behind", [b"P", PING, PING * 1000], ids=["a byte", "a request", "many"])
def test_a_client_that_leaves_is_noticed_though_it_had_sent_something_ahead(planes, kind, behind):
    async def main() -> None:
        planes.data.behave = lambda request: asyncio.Event().wait()
        async with planes.connected() as (_, _, writer):
            writer.write(KINDS[kind](b"abcd") + behind)
            while not planes.data.asked:
                await asyncio.sleep(0.002)
            writer.write(behind)
            writer.close()
            while not planes.data.withdrawn:
                await asyncio.sleep(0.002)

    asyncio.run(asyncio.wait_for(main(), 10))


def test_other_connections_have_their_turn_between_requests_that_were_sent_ahead(planes):
    turns = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def turn() -> None:
            turns.append(len(planes.data.asked))
            if turns[-1] < 50:
                loop.call_soon(turn)

        def admit(request, model, version):
            planes.data.asked.append(request)
            request.finish(InferResponse(b""))
            return object()

        planes.data.admit = admit
        async with planes.connected() as (_, reader, writer):
            turn()
            writer.write(plain(b"x") * 50 + plain(b"x", CLOSE))
            assert (await asyncio.wait_for(reader.read(), 20)).count(b"HTTP/1.1 200") == 51

    asyncio.run(main())
    assert len(set(turns)) > 25


UPGRADING = {
    "at once": [plain(b"hello", UPGRADE)],
    "body by itself": [plain(b"hello", UPGRADE)[:-5], b"hello"],
    "in pieces": [plain(b"hello", UPGRADE)[i : i + 10] for i in range(0, 200, 10)],
    "chunked": [chunked(b"he", b"llo", headers=UPGRADE)],
    "websocket": [
        plain(b"hello", b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n")
    ],
    "HTTP/1.0": [plain(b"hello", UPGRADE).replace(b"HTTP/1.1", b"HTTP/1.0")],
}


@pytest.mark.parametrize("pieces", UPGRADING.values(), ids=UPGRADING)
def test_a_wish_for_another_protocol_is_passed_over_and_the_body_is_read(planes, pieces):
    again = [plain(body, UPGRADE) for body in (b"second", b"second", b"others")]
    rest = [] if b"HTTP/1.0" in pieces[0] else [*again, plain(b"last", CLOSE)]
    found = answers(said_to(planes, *pieces, *rest))
    assert [status for status, _ in found] == [200] * (1 + len(rest))
    assert [body for _, body in found] == [b"hello", b"second", b"second", b"others", b"last"][: len(found)]
    assert not any("Upgrade" in dict(request.headers) for _, _, request in planes.data.asked)


def test_a_body_behind_a_wish_for_another_protocol_is_no_request(planes):
    head = plain(PING, b"Connection: Upgrade\r\nUpgrade: other\r\n")[: -len(PING)]
    found = answers(said_to(planes, head, PING, plain(b"", CLOSE)))
    assert found == [(200, PING), (200, b"")]


def test_a_handler_sees_the_head_without_the_wish(planes):
    said_to(planes, plain(b"x", b"X-Mixed: a\r\nUpgrade: h2c\r\nConnection: Upgrade, close\r\n"))
    headers = dict(planes.data.asked[0][2].headers)
    assert headers["X-Mixed"] == "a"
    assert "Upgrade" not in headers


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_curl_may_ask_for_http2(planes):
    async def main() -> bytes:
        async with planes.serving() as server:
            url = f"http://127.0.0.1:{server.address.port}/predictions/echo"
            curl = await asyncio.create_subprocess_exec(
                *("curl", "-s", "--http2", "-H", "Content-Type: text/plain", "-d", "hello", url, url),
                stdout=asyncio.subprocess.PIPE,
            )
            said, _ = await asyncio.wait_for(curl.communicate(), 20)
            return said

    assert asyncio.run(main()) == b"hellohello"


def test_nothing_is_taken_for_a_request_behind_connect(planes):
    found = answers(said_to(planes, b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n" + PING + PING))
    assert len(found) == 1
    assert found[0][0] >= 400


def test_a_trailer_is_no_header(planes):
    headers = b"X-User: from-gateway\r\nConnection: close\r\n"
    trailer = b"X-User: evil\r\nx-torchere-priority: 9\r\n"
    assert answers(said_to(planes, chunked(b"abc", headers=headers, trailer=trailer))) == [(200, b"abc")]
    request = planes.data.asked[0][2]
    assert [value for name, value in request.headers if name.lower() == "x-user"] == ["from-gateway"]
    assert "x-torchere-priority" not in dict(request.headers)


def test_a_trailer_is_bounded_as_a_head_is(planes):
    found = answers(said_to(planes, chunked(b"abc", trailer=b"X: " + b"a" * 9000 + b"\r\n")))
    assert [status for status, _ in found] == [400]


@pytest.mark.parametrize("name", [b"Connection", b"connection", b"Proxy-Connection"])
def test_a_trailer_that_would_close_the_connection_is_refused(planes, name):
    """The parser would say nothing of the requests behind it."""
    text = chunked(b"abc", trailer=name + b": close\r\n")
    for pieces in ([text + LAST_PING], [text, LAST_PING]):
        assert [status for status, _ in answers(said_to(planes, *pieces))] == [400]
    assert planes.data.asked == []


ENDLESS = {
    "a value": (PING[:-4] + b"\r\nX: ", b"a"),
    "a name": (PING[:-2], b"a"),
    "blanks": (PING[:-4] + b"\r\nX:", b" "),
    "a trailer": (chunked(b"abc")[:-2] + b"X: ", b"a"),
    "a chunk's extension": (chunked(b"abc")[:-5] + b"3;", b"a"),
    "a chunk's length": (chunked(b"abc")[:-5], b"0"),
}


@pytest.mark.parametrize(("begun", "more"), ENDLESS.values(), ids=ENDLESS)
def test_what_has_no_end_is_refused_before_it_comes(planes, begun, more):
    said = said_to(planes, plain(b"x"), begun, *[more * 4096] * (MAX_LINE_BYTES // 4096 + 1))
    assert [status for status, _ in answers(said)] == [200, 400]
    assert len(planes.data.asked) == 1


@pytest.mark.parametrize("size", [100, 5000])
def test_a_head_as_long_as_may_be_is_read_in_pieces(planes, size):
    target = b"/predictions/echo?" + b"a" * (MAX_REQUEST_LINE_BYTES - 18)
    long = b"X: " + b"a" * (MAX_HEADER_BYTES - 60) + b"\r\n"
    text = plain(b"abc", long + CLOSE).replace(b"/predictions/echo", target)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert answers(said_to(planes, *pieces)) == [(200, b"abc")]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_requests_may_come_in_pieces_of_any_size(planes, kind):
    text = kind(b"abcd") * 2 + plain(b"last", CLOSE)

    async def main(size: int) -> bytes:
        async with planes.connected() as (server, reader, _):
            (connection,) = server.listener.connections
            start = 0
            while start < len(text):
                room = connection.get_buffer(-1)[:size]
                piece = text[start : start + len(room)]
                room[: len(piece)] = piece
                connection.buffer_updated(len(piece))
                start += len(piece)
                await asyncio.sleep(0)
            return await asyncio.wait_for(reader.read(), 20)

    for size in (1, 2, 3, 5, 17):
        found = answers(asyncio.run(main(size)))
        assert [status for status, _ in found] == [200] * 3
        assert found[2][1] == b"last"


def test_what_is_no_http_waits_for_the_answer_before(planes):
    async def late(request):
        await asyncio.sleep(0.1)
        return InferResponse(b"late")

    planes.data.behave = late
    for pieces in ((plain(b"x"), GARBAGE), (plain(b"x") + GARBAGE,), (chunked(b"x") + GARBAGE,)):
        found = answers(said_to(planes, *pieces))
        assert [status for status, _ in found] == [200, 400]
        assert found[0][1] == b"late"


@pytest.mark.parametrize("request_text", [plain(b"x"), chunked(b"x")], ids=["a length", "chunks"])
def test_what_is_no_http_is_not_answered_within_a_streamed_answer(planes, request_text):
    async def parts():
        for _ in range(10):
            yield b"part"
            await asyncio.sleep(0.01)

    async def behave(request):
        return StreamedResponse(InferResponse(b""), parts())

    planes.data.behave = behave
    said = said_to(planes, request_text, GARBAGE)
    stream, end, rest = said.partition(b"0\r\n\r\n")
    assert stream.count(b"4\r\npart\r\n") == 10
    assert end
    assert [status for status, _ in answers(rest)] == [400]


@pytest.mark.parametrize("rest", [b"no chunk\r\n", b"0\r\nConnection: close\r\n\r\n" + LAST_PING])
def test_a_broken_body_of_a_request_that_is_answered_just_ends_the_connection(planes, rest):
    head = b"GET /ping HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nabcd\r\n"

    async def main() -> bytes:
        async with planes.connected() as (_, reader, writer):
            writer.write(head)
            answer = await asyncio.wait_for(reader.readuntil(b"}\n"), 20)
            writer.write(rest)
            return answer + await asyncio.wait_for(reader.read(), 20)

    assert [status for status, _ in answers(asyncio.run(main()))] == [200]


def test_a_body_that_nobody_reads_leaves_turns_to_others(planes, monkeypatch):
    decoded: list[Any] = []

    def noting(chunks, data, start):
        end, pieces = feed(chunks, data, start)
        decoded.append(sum(map(len, pieces)))
        return end, pieces

    feed = Chunks.feed
    monkeypatch.setattr(Chunks, "feed", noting)
    head = b"GET /ping HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = chunked(*[b"abcd"] * 200_000).removeprefix(chunked()[: -len(b"0\r\n\r\n")])
    came = [0]

    async def main() -> bytes:
        loop = asyncio.get_running_loop()
        async with planes.connected() as (server, reader, writer):
            writer.write(head)
            await reader.readuntil(b"}\n")
            (connection,) = server.listener.connections

            def turn() -> None:
                came.append(sum(decoded))
                if connection in server.listener.connections:
                    loop.call_soon(turn)

            turn()
            writer.write(body + LAST_PING)
            return await asyncio.wait_for(reader.read(), 20)

    found = answers(uvloop.run(main()))
    assert [status for status, _ in found] == [200]
    assert came[-1] == 800_000
    assert max(after - before for before, after in itertools.pairwise(came)) < 400_000


def test_a_request_behind_a_body_full_of_ends_is_found(planes):
    ends = [b"\r\n\r\n" * 5000]
    found = answers(said_to(planes, chunked(*ends) + PING * 10 + LAST_PING, max_request_bytes=100_000))
    assert [status for status, _ in found] == [200] * 12
    assert found[0][1] == ends[0]


IDLE = {
    "after a ping": [PING, b"\r\n"],
    "after a prediction": [plain(b"x"), b"\r\n"],
    "after a known head": [plain(b"x"), plain(b"x"), b"\n"],
    "again and again": [PING, *[b"\r\n"] * 5],
    "after a late body": [PING.replace(b"\r\n\r\n", b"\r\nContent-Length: 3\r\n\r\n"), b"", b"", b"abc"],
}


@pytest.mark.parametrize("pieces", IDLE.values(), ids=IDLE)
def test_a_connection_on_which_no_request_begins_is_idle(planes, pieces):
    found = answers(said_to(planes, *pieces, keep_alive_s=0.3))
    assert [status for status, _ in found] == [200] * sum(piece.count(b"HTTP/1.1") for piece in pieces)


@pytest.mark.parametrize("text", [GARBAGE, plain(b"x", UPGRADE + CLOSE)], ids=["garbage", "upgrade"])
def test_nobody_can_fill_the_log_with_bad_requests(planes, text, caplog):
    caplog.set_level(logging.WARNING)
    assert said_to(planes, text)
    assert not [record for record in caplog.records if record.name.startswith("torchere")]


def test_chunks_wait_for_their_turn_of_the_loop_and_none_is_forgotten(planes, monkeypatch):
    waited = []
    put_off = LoopTurns.put_off
    monkeypatch.setattr(loop_time, "SHARED_TURN_S", 1e-9)  # each read takes a whole turn
    monkeypatch.setattr(loop_time, "LEAST_TURN_S", 1e-9)

    def counted(*args):
        waited.append(args)
        put_off(*args)

    monkeypatch.setattr(LoopTurns, "put_off", counted)

    async def ask(address, text):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(text)
        try:
            return await asyncio.wait_for(reader.read(), 60)
        finally:
            writer.close()

    async def echo(request):
        return InferResponse(request.parameters[0].value)

    async def main():
        planes.data.behave = echo
        async with planes.serving(max_request_bytes=100_000) as server:
            text = chunked(*[b"x"] * 20_000) + chunked(b"a", b"b", headers=CLOSE)
            return await asyncio.gather(*[ask(server.address, text) for _ in range(4)])

    for answer in asyncio.run(main()):
        assert answers(answer) == [(200, b"x" * 20_000), (200, b"ab")]
    assert waited


def test_each_request_of_a_connection_is_charged_to_its_client(planes):
    limits = ClientLimits(Quota(rate=0.001, burst=3), Counter())
    said = said_to(planes, plain(b"1"), plain(b"2"), plain(b"34"), plain(b"5"), client_limits=limits)
    assert [status for status, _ in answers(said)] == [200, 200, 200, 429]
    assert len(planes.data.asked) == 3
