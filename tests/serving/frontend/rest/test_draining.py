"""How connections end when the server does: nobody loses a request that was on its way."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from torchere.serving.frontend.rest import listener

DIRECT = b"POST /predictions/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx"
FRAMEWORK = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"


@contextlib.asynccontextmanager
async def serving(planes):
    connections = []
    async with planes.serving() as server:

        async def connect():
            reader, writer = await asyncio.open_connection(server.address.host, server.address.port)
            connections.append(writer)
            return SimpleNamespace(reader=reader, writer=writer)

        yield SimpleNamespace(server=server, connect=connect)
    for writer in connections:
        writer.close()


async def head(connection) -> list[bytes]:
    """The connection headers of the next answer; its body is read, too."""
    lines = (await connection.reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
    (length,) = [int(line.split()[1]) for line in lines if line.startswith(b"content-length")]
    await connection.reader.readexactly(length)
    return [line for line in lines if line.startswith(b"connection:")]


@pytest.mark.parametrize("request_bytes", [DIRECT, FRAMEWORK])
def test_while_draining_an_answer_says_that_it_is_the_last(planes, request_bytes):
    async def main():
        async with serving(planes) as served:
            connection = await served.connect()
            connection.writer.write(request_bytes)
            before = await head(connection)
            served.server.drain()
            connection.writer.write(request_bytes)
            after = await head(connection)
            return before, after, await connection.reader.read()

    assert asyncio.run(main()) == ([b"connection: keep-alive"], [b"connection: close"], b"")


@pytest.mark.parametrize("request_bytes", [DIRECT, DIRECT.replace(b"Host: x", b"Host: x\r\nExpect: x")])
def test_the_answer_to_a_request_that_came_before_is_the_last_as_well(planes, held, request_bytes):
    async def main():
        planes.data.behave = held
        async with serving(planes) as served:
            connection = await served.connect()
            connection.writer.write(request_bytes)
            await held.arrived.wait()
            served.server.drain()
            held.go_on.set()
            return await head(connection), await connection.reader.read()

    assert asyncio.run(main()) == ([b"connection: close"], b"")


@pytest.mark.parametrize("request_bytes", [DIRECT, FRAMEWORK])
def test_while_draining_new_connections_are_served(planes, request_bytes):
    async def main():
        async with serving(planes) as served:
            served.server.drain()
            connection = await served.connect()
            connection.writer.write(request_bytes)
            return await head(connection)

    assert asyncio.run(main()) == [b"connection: close"]


@pytest.mark.parametrize("request_bytes", [DIRECT, FRAMEWORK])
def test_a_request_on_its_way_to_an_idle_connection_is_answered(planes, request_bytes):
    async def main():
        async with serving(planes) as served:
            fresh, used = await served.connect(), await served.connect()
            used.writer.write(request_bytes)
            await head(used)
            served.server.drain()
            stopping = asyncio.create_task(served.server.stop())
            while not served.server.listener.stopping:
                await asyncio.sleep(0)
            answers = []
            for connection in (fresh, used):
                connection.writer.write(request_bytes)
                answers.append(await head(connection))
            await stopping
            return answers

    assert asyncio.run(main()) == [[b"connection: close"]] * 2


def test_a_head_that_has_begun_may_end(planes):
    async def main():
        async with serving(planes) as served:
            connection = await served.connect()
            connection.writer.write(DIRECT[:20])
            stopping = asyncio.create_task(served.server.stop())
            await asyncio.wait([stopping], timeout=1)  # longer than idle connections stay
            connection.writer.write(DIRECT[20:])
            answer = await head(connection)
            await stopping
            return answer

    assert asyncio.run(main()) == [b"connection: close"]


HEAD = DIRECT.removesuffix(b"x")


@pytest.mark.parametrize("before", [0, 1, 1000], ids=["no byte before the stop", "one", "all"])
@pytest.mark.parametrize(
    ("beginning", "said"),
    [
        (DIRECT[:20], b""),
        (HEAD, b"HTTP/1.1 408 Request Timeout"),
        (
            HEAD.replace(b"Content-Length: 1", b"Transfer-Encoding: chunked") + b"5\r\nx",
            b"HTTP/1.1 408 Request Timeout",
        ),
    ],
    ids=["head", "body", "chunk"],
)
def test_a_request_whose_rest_does_not_come_does_not_hold_up_the_end(
    planes, monkeypatch, beginning, said, before
):
    monkeypatch.setattr(listener, "STOPPING_TIMEOUT_S", 0.3)

    async def main():
        async with serving(planes) as served:
            connection = await served.connect()
            connection.writer.write(beginning[:before])
            await asyncio.sleep(0.1)
            stopping = asyncio.create_task(served.server.stop())
            await asyncio.sleep(0.1)
            connection.writer.write(beginning[before:])
            answer = await asyncio.wait_for(connection.reader.read(), 3)
            connection.writer.close()
            await asyncio.wait_for(stopping, 1)
            return answer.partition(b"\r\n")[0]

    assert asyncio.run(main()) == said


def test_a_body_that_keeps_coming_in_a_stop_is_waited_for(planes, monkeypatch):
    monkeypatch.setattr(listener, "STOPPING_TIMEOUT_S", 0.3)

    async def main():
        async with serving(planes) as served:
            connection = await served.connect()
            connection.writer.write(HEAD.replace(b"Length: 1", b"Length: 1600"))
            await asyncio.sleep(0.1)
            stopping = asyncio.create_task(served.server.stop())
            for _ in range(8):
                await asyncio.sleep(0.1)
                connection.writer.write(b"x" * 200)
            answer = await head(connection)
            await stopping
            return answer

    assert asyncio.run(main()) == [b"connection: close"]


def test_idle_connections_do_not_hold_up_the_end(planes):
    async def main():
        async with serving(planes) as served:
            connection = await served.connect()
            connection.writer.write(DIRECT)
            await head(connection)
            await asyncio.wait_for(served.server.stop(), 3)
            return await connection.reader.read()

    assert asyncio.run(main()) == b""


def test_a_client_that_asks_for_the_end_hears_it_once(planes):
    async def main():
        async with serving(planes) as served:
            connection = await served.connect()
            connection.writer.write(FRAMEWORK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            return await head(connection)

    assert asyncio.run(main()) == [b"connection: close"]


def test_a_prediction_that_outlasts_the_drain_may_still_be_answered(planes, held):
    async def main():
        planes.data.behave = held
        async with planes.connected() as (server, reader, writer):
            writer.write(DIRECT)
            await held.arrived.wait()
            server.drain_timeout_s = 0.05
            await server.stop()
            held.go_on.set()
            return await asyncio.wait_for(reader.read(), 20)

    assert asyncio.run(main()).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("request_bytes", [DIRECT, DIRECT.replace(b"Host: x", b"Host: x\r\nExpect: x")])
def test_a_stream_that_does_not_end_in_time_is_given_up(planes, endless, request_bytes):
    async def main():
        planes.data.behave = endless
        async with planes.connected() as (server, reader, writer):
            writer.write(request_bytes)
            await reader.readuntil(b"first")
            server.drain_timeout_s = 0.05
            await server.stop()
            await asyncio.wait_for(endless.ended.wait(), 20)

    asyncio.run(main())
