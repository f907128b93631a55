"""What an ASGI app gets, and how its answers are framed."""

import asyncio

import pytest
import uvloop

PING = b"%b /any/path?a=1 HTTP/%b\r\nHost: x\r\n%b\r\n"
OK = {"type": "http.response.start", "status": 200, "headers": []}


def part(body: bytes, *, more: bool = False) -> dict:
    return {"type": "http.response.body", "body": body, "more_body": more}


@pytest.fixture
def tell(planes):
    """`tell(app, *pieces)`: what a server with that app says to the pieces, until it closes."""

    async def main(app, pieces: tuple[bytes, ...]) -> bytes:
        async with planes.connected() as (server, reader, writer):
            server.listener.routes = app
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0.01)
            return await asyncio.wait_for(reader.read(), 20)

    return lambda app, *pieces: asyncio.run(main(app, pieces))


def ask(method: bytes = b"GET", version: bytes = b"1.1", headers: bytes = b"Connection: close\r\n") -> bytes:
    return PING % (method, version, headers)


def answering(*messages: dict):
    async def app(scope, receive, send):
        for message in messages:
            await send(message)

    return app


def split(said: bytes) -> tuple[list[bytes], bytes]:
    head, _, body = said.partition(b"\r\n\r\n")
    return head.split(b"\r\n"), body


def test_the_scope_says_what_the_head_says(tell):
    scopes = []

    async def app(scope, receive, send):
        scopes.append(scope)
        await answering(OK, part(b""))(scope, receive, send)

    tell(app, b"PUT /a%20b/?c=%20 HTTP/1.1\r\nHost: x\r\nX-Mixed: V\r\nConnection: close\r\n\r\n")
    (scope,) = scopes
    named = ("type", "method", "path", "raw_path", "query_string", "http_version", "scheme", "root_path")
    assert [scope[name] for name in named] == [
        *("http", "PUT", "/a b", b"/a%20b/", b"c=%20", "1.1", "http", ""),
    ]
    assert scope["headers"] == [(b"host", b"x"), (b"x-mixed", b"V"), (b"connection", b"close")]
    assert scope["client"][0] == scope["server"][0] == "127.0.0.1"


def test_the_parts_of_an_answer_are_sent_together_with_their_length(tell):
    app = answering(OK, part(b"one", more=True), part(b"", more=True), part(b"three"))
    lines, body = split(tell(app, ask()))
    assert b"content-length: 8" in lines
    assert body == b"onethree"


def test_a_client_of_http_1_0_gets_it_with_its_length_too(tell):
    app = answering(OK, part(b"one", more=True), part(b"two"))
    lines, body = split(tell(app, ask(version=b"1.0")))
    assert not any(line.startswith(b"transfer-encoding") for line in lines)
    assert (b"content-length: 6" in lines, body) == (True, b"onetwo")


def test_the_answer_to_head_has_no_body(tell):
    lines, body = split(tell(answering(OK, part(b"one")), ask(b"HEAD")))
    assert (b"content-length: 3" in lines, body) == (True, b"")


def test_an_app_does_not_frame_its_answer_itself(tell):
    own = [(b"Connection", b"close"), (b"Transfer-Encoding", b"chunked"), (b"Content-Length", b"4")]
    lines, body = split(tell(answering({**OK, "headers": own}, part(b"one")), ask()))
    framing = (b"connection:", b"transfer-encoding:", b"content-length:")
    found = sorted(line for line in lines if line.startswith(framing))
    assert (found, body) == ([b"connection: close", b"content-length: 3"], b"one")


BUGS = {
    "no answer": [],
    "a body without a head": [part(b"x")],
    "a header that would forge others": [{**OK, "headers": [(b"x", b"a\r\nset-cookie: b")]}],
}


@pytest.mark.parametrize("messages", BUGS.values(), ids=BUGS)
def test_a_mistake_of_the_app_is_a_500_and_a_line_in_the_log(tell, caplog, messages):
    assert tell(answering(*messages), ask(headers=b"")).startswith(b"HTTP/1.1 500 ")
    assert "failed unexpectedly" in caplog.text


@pytest.mark.parametrize("messages", [[OK], [OK, part(b"one", more=True)]])
def test_an_answer_that_is_not_ended_is_a_mistake_too(tell, messages):
    assert tell(answering(*messages), ask(headers=b"")).startswith(b"HTTP/1.1 500 ")


@pytest.mark.parametrize("chunked", [False, True])
def test_an_app_gets_the_body_piece_by_piece_and_no_more_than_it_asks_for(planes, chunked):
    size = 3_000_000

    async def main() -> None:
        taken, most = 0, 0

        async def app(scope, receive, send):
            nonlocal taken, most
            more = True
            while more:
                await asyncio.sleep(0)
                message = await receive()
                taken, most = taken + len(message["body"]), max(most, len(message["body"]))
                more = message["more_body"]
            await send(OK)
            await send(part(b""))

        async with planes.connected() as (server, reader, writer):
            server.listener.routes = app
            framing = b"Transfer-Encoding: chunked\r\n" if chunked else b"Content-Length: %d\r\n" % size
            writer.write(ask(b"POST", headers=framing + b"Connection: close\r\n"))
            for _ in range(30):
                piece = bytes(size // 30)
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            if chunked:
                writer.write(b"0\r\n\r\n")
            assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 200")
        assert (taken, most < 200_000) == (size, True)

    asyncio.run(main())


def test_an_app_hears_that_its_client_left_and_goes_on(planes):
    async def main() -> None:
        heard, done = asyncio.Event(), asyncio.Event()

        async def app(scope, receive, send):
            assert (await receive())["type"] == "http.request"
            heard.set()
            assert (await receive())["type"] == "http.disconnect"
            await send(OK)
            await send(part(b"to no client"))
            done.set()

        async with planes.connected() as (server, _, writer):
            server.listener.routes = app
            writer.write(ask(headers=b""))
            await asyncio.wait_for(heard.wait(), 20)
            writer.close()
            await asyncio.wait_for(done.wait(), 20)

    asyncio.run(main())


def test_a_second_request_is_answered_behind_the_first(tell):
    app = answering({**OK, "headers": [(b"content-length", b"2")]}, part(b"ok"))
    assert tell(app, ask(headers=b"") + ask()).count(b"\r\n\r\nok") == 2


LONG = bytes(80_000)  # uvloop reads all of it before the app begins
LONG_POST = ask(b"POST", headers=b"Content-Length: %d\r\n" % len(LONG)) + LONG


@pytest.mark.parametrize("reads", [True, False], ids=["read", "unread"])
def test_a_connection_goes_on_behind_a_long_body_that_came_before_the_app_began(planes, reads):
    sized = {**OK, "headers": [(b"content-length", b"2")]}

    async def app(scope, receive, send):
        more = reads
        while more:
            more = (await receive())["more_body"]
        await answering(sized, part(b"ok"))(scope, receive, send)

    async def main() -> None:
        async with planes.connected() as (server, reader, writer):
            server.listener.routes = app
            for _ in range(3):
                writer.write(LONG_POST)
                assert (await asyncio.wait_for(reader.readuntil(b"ok"), 20)).startswith(b"HTTP/1.1 200")

    uvloop.run(main())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_an_app_with_a_long_body_hears_that_its_client_left(planes, run):
    async def main() -> None:
        whole, left = asyncio.Event(), asyncio.Event()

        async def app(scope, receive, send):
            while (await receive())["more_body"]:
                pass
            whole.set()
            assert (await receive())["type"] == "http.disconnect"
            left.set()
            await answering(OK, part(b""))(scope, receive, send)

        async with planes.connected() as (server, _, writer):
            server.listener.routes = app
            writer.write(LONG_POST)
            await asyncio.wait_for(whole.wait(), 20)
            writer.close()
            await asyncio.wait_for(left.wait(), 5)

    run(main())
