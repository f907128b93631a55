"""What only a real socket shows: bytes on the wire, limits of the parser, clients that go away."""

import asyncio
import contextlib
import gc
import ipaddress
import json
import socket
import struct
import weakref
from pathlib import Path
from typing import Any

import pytest
import uvloop

from torchere.serving.config.server_settings import Address
from torchere.serving.errors import HandlerFailed
from torchere.serving.frontend.rest.connection import Connection
from torchere.serving.frontend.rest.server import RestServer, listener_of
from torchere.serving.types import InferResponse, StreamedResponse

POST = b"POST /predictions/echo HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%s\r\n"


@contextlib.asynccontextmanager
async def serving(planes, **settings):
    """A server on a free port, and `talk(*pieces)`: what it answers until it closes the connection."""
    async with planes.serving(**settings) as server:
        address = server.address

        async def talk(*pieces: bytes) -> bytes:
            reader, writer = await asyncio.open_connection(address.host, address.port)
            with contextlib.suppress(ConnectionError):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
            answer = await asyncio.wait_for(reader.read(), 20)
            writer.close()
            return answer

        yield talk, address


def request(body: bytes = b"", headers: bytes = b"", close: bool = True) -> bytes:
    headers += b"Connection: close\r\n" if close else b""
    return POST % (len(body), headers) + body


def split(answer: bytes) -> tuple[bytes, list[bytes], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *headers = head.split(b"\r\n")
    return status, headers, body


def test_header_names_reach_the_handler_as_the_client_wrote_them(planes):
    async def main():
        async with serving(planes) as (talk, _):
            await talk(request(headers=b"X-Test-Header: abc\r\n"))

    asyncio.run(main())
    headers = dict(planes.data.asked[0][2].headers)
    assert headers["X-Test-Header"] == "abc"
    assert "x-test-header" not in headers
    assert headers["Host"] == "x"


def test_blanks_around_a_header_are_no_part_of_its_value(planes):
    async def main():
        async with serving(planes) as (talk, _):
            await talk(request(headers=b"X-Blanks:  inner  blanks \t \r\n"))

    asyncio.run(main())
    assert dict(planes.data.asked[0][2].headers)["X-Blanks"] == "inner  blanks"


def test_one_connection_carries_many_requests_and_a_failure_ends_it(planes):
    async def main():
        async with serving(planes) as (talk, _):
            bad = b"POST /predictions/none HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
            return await talk(request(b"one", close=False), request(b"two", close=False), bad)

    answer = asyncio.run(main())
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert answer.count(b"connection: keep-alive") == 2
    assert answer.count(b"HTTP/1.1 404 Not Found") == 1


@pytest.mark.parametrize(
    "message",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",
        b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 9000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X-Many: 1\r\n" * 2000 + b"\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET /ping HTTP/1.1\r\n\r\n",
        b"GET /ping HTTP/1.1\r\nHost: x\r\nhost: x\r\n\r\n",
        b"GET /ping HTTP/2.0\r\nHost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
def test_what_is_no_http_gets_the_known_refusal(planes, message):
    async def main():
        async with serving(planes) as (talk, _):
            return await talk(message)

    status, headers, body = split(asyncio.run(main()))
    assert status == b"HTTP/1.1 400 Bad Request"
    assert b"content-type: application/json" in headers
    assert json.loads(body) == {
        "code": 400,
        "type": "BadRequestException",
        "message": "Invalid HTTP message.",
    }


OLD = b"POST /predictions/echo HTTP/1.0\r\nConnection: %s\r\nContent-Length: 1\r\n\r\nx"


def test_a_client_of_http_1_0_keeps_its_connection_when_it_asks_to(planes):
    async def main():
        async with serving(planes) as (talk, _):
            return await talk(OLD % b"Keep-Alive", OLD % b"keep-alive", OLD % b"close")

    answers = asyncio.run(main()).split(b"HTTP/1.1 200 OK")[1:]
    assert [b"connection: keep-alive" in answer for answer in answers] == [True, True, False]
    assert [answer.partition(b"\r\n\r\n")[2] for answer in answers] == [b"x"] * 3


def test_a_body_in_chunks_ends_a_connection_of_http_1_0(planes):
    async def main():
        async with serving(planes) as (talk, _):
            old = (OLD % b"keep-alive").replace(b"Content-Length: 1", b"Transfer-Encoding: chunked")
            return await talk(old[:-1] + b"1\r\nx\r\n0\r\n\r\n")

    _, headers, body = split(asyncio.run(main()))
    assert (b"connection: close" in headers, body) == (True, b"x")


def test_a_client_of_http_1_0_sees_the_end_of_a_stream_by_that_of_the_connection(planes):
    async def chunks():
        for part in (b"one", b"two"):
            yield part

    async def behave(request):
        return StreamedResponse(InferResponse(b""), chunks())

    async def main():
        async with serving(planes) as (talk, _):
            return await talk(OLD % b"Keep-Alive")

    planes.data.behave = behave
    _, headers, body = split(asyncio.run(main()))
    assert b"connection: close" in headers
    assert not any(line.startswith((b"transfer-encoding", b"content-length")) for line in headers)
    assert body == b"onetwo"  # RFC 9112, 6.1: no chunks for who may know none


def test_a_client_of_http_1_0_gets_an_answer_without_content_in_order(planes):
    async def behave(request):
        return InferResponse(b"", status=204)

    async def main():
        async with serving(planes) as (talk, _):
            return await talk(OLD % b"close")

    planes.data.behave = behave
    assert split(asyncio.run(main()))[0] == b"HTTP/1.1 204 No Content"


def test_a_client_of_http_1_0_does_not_take_a_stream_that_breaks_off_for_whole(planes):
    async def chunks():
        yield b"one"
        raise HandlerFailed

    async def behave(request):
        return StreamedResponse(InferResponse(b""), chunks())

    async def main():
        async with serving(planes) as (talk, _):
            await talk(OLD % b"Keep-Alive")

    planes.data.behave = behave
    with pytest.raises(ConnectionResetError):
        asyncio.run(main())


def test_a_body_that_is_too_large_is_refused_and_the_client_gets_to_see_it(planes):
    async def main():
        async with serving(planes, max_request_bytes=100_000) as (talk, _):
            return await talk(request(b"a" * 1_500_000))

    status, headers, body = split(asyncio.run(main()))
    assert status == b"HTTP/1.1 413 Request Entity Too Large"
    assert b"connection: close" in headers
    assert b"longer than max_request_size=100000 bytes" in body


@pytest.mark.parametrize("text", [request(bytes(1_500_000)), request(bytes(1_500_000), close=False)])
@pytest.mark.parametrize("expects", [False, True], ids=["at once", "after a while"])
def test_a_client_that_sends_a_large_body_to_nowhere_gets_to_see_that(planes, text, expects):
    """Its body is read as far as it comes: with bytes of it unread the kernel would reset the connection."""
    text = text.replace(b"/predictions/echo", b"/prediction/echo")
    head, end, body = text.partition(b"\r\n\r\n")

    async def main():
        async with serving(planes) as (talk, address):
            if not expects:
                return await talk(text)
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(head + b"\r\nExpect: 100-continue" + end)
            answer = await reader.readuntil(b"}\n")  # all of it, and no word to go on
            writer.write(body)
            answer += await reader.read()
            writer.close()
            return answer

    status, headers, said = split(asyncio.run(main()))
    assert status == b"HTTP/1.1 404 Not Found"
    assert b"connection: close" in headers
    assert json.loads(said)["code"] == 404


def test_a_client_without_its_key_gets_to_see_that_however_much_it_sends(planes):
    async def main():
        async with serving(planes, keys=planes.keys, max_request_bytes=1_000_000) as (talk, _):
            return await talk(request(b"a" * 900_000))

    status, _, body = split(asyncio.run(main()))
    assert status.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["type"] == "InvalidKeyException"
    assert planes.data.asked == []


def test_a_body_in_many_pieces_arrives_whole(planes):
    async def main():
        async with serving(planes) as (talk, _):
            head = b"POST /predictions/echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            chunks = [b"1\r\n%c\r\n" % byte for byte in b"hello"]
            return await talk(head + b"Transfer-Encoding: chunked\r\n\r\n", *chunks, b"0\r\n\r\n")

    assert split(asyncio.run(main()))[2] == b"hello"


def test_a_client_that_waits_for_a_go_ahead_gets_one(planes):
    async def main():
        async with serving(planes) as (talk, _):
            return await talk(request(b"abc", b"Expect: 100-continue\r\n"))

    assert asyncio.run(main()).startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")


def test_a_client_of_http_1_0_is_not_told_to_go_on(planes):
    async def main():
        async with serving(planes) as (talk, _):
            return await talk((OLD % b"close").replace(b"Content", b"Expect: 100-continue\r\nContent"))

    assert asyncio.run(main()).startswith(b"HTTP/1.1 200 OK")


def test_a_client_that_goes_away_withdraws_its_request(planes):
    async def main():
        waiting, withdrawn = asyncio.Event(), asyncio.Event()

        async def behave(request):
            waiting.set()
            try:
                await asyncio.Event().wait()
            finally:
                withdrawn.set()

        planes.data.behave = behave
        async with serving(planes) as (_, address):
            _, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(request(b"x"))
            await asyncio.wait_for(waiting.wait(), 20)
            writer.close()
            await asyncio.wait_for(withdrawn.wait(), 20)

    asyncio.run(main())
    assert planes.data.withdrawn == 1


def test_a_request_that_waits_long_is_answered_all_the_same(planes, held):
    async def main():
        planes.data.behave = held
        async with serving(planes) as (talk, _):
            talking = asyncio.create_task(talk(request(b"late")))
            await held.arrived.wait()
            asyncio.get_running_loop().call_later(0.05, held.go_on.set)
            return await talking

    assert split(asyncio.run(main()))[2] == b"late"


def test_stopping_lets_a_request_finish(planes, held):
    async def main():
        planes.data.behave = held
        async with planes.connected() as (server, reader, writer):
            writer.write(request(b"done", close=False))
            await held.arrived.wait()
            stopping = asyncio.create_task(server.stop())
            asyncio.get_running_loop().call_soon(held.go_on.set)
            answer = await reader.read()
            await stopping
            return answer

    assert split(asyncio.run(main()))[2] == b"done"


async def answer_to_x(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(request(b"x"))
    answer = await reader.read()
    writer.close()
    return answer


def test_a_unix_socket_serves_and_is_taken_away_at_the_end(planes, tmp_path):
    path = tmp_path / "t.sock"

    async def main():
        app = listener_of(frozenset({"inference"}), planes.data, planes.control, planes.services())
        server = RestServer(app, Address(unix_path=str(path)))
        await server.start()
        answer = await answer_to_x(*await asyncio.open_unix_connection(path))
        await server.stop()
        return answer

    assert split(asyncio.run(main()))[2] == b"x"
    assert not path.exists()


def link_local() -> Address:
    """Return an address of this machine that counts with its zone alone."""
    lines = Path("/proc/net/if_inet6")
    for digits, *_, interface in map(str.split, lines.read_text().splitlines() if lines.exists() else ()):
        if digits.startswith("fe80"):
            return Address(f"{ipaddress.IPv6Address(bytes.fromhex(digits))}%{interface}", 0)
    pytest.skip("no interface has an address of its link")


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("address_of", [link_local, lambda: Address("::ffff:127.0.0.1", 0)])
def test_addresses_of_ipv6_with_a_zone_or_of_ipv4_are_listened_on(planes, run, address_of):
    async def main():
        app = listener_of(frozenset({"inference"}), planes.data, planes.control, planes.services())
        server = RestServer(app, address_of())
        address = await server.start()
        found = await asyncio.to_thread(socket.getaddrinfo, address.host, address.port, 0, socket.SOCK_STREAM)
        connection = socket.socket(found[0][0])
        await asyncio.to_thread(connection.connect, found[0][4])
        answer = await answer_to_x(*await asyncio.open_connection(sock=connection))
        await server.stop()
        return answer

    assert split(run(main()))[2] == b"x"


def test_a_port_that_is_taken_is_an_error_at_the_start(planes):
    async def main():
        async with serving(planes) as (_, address):
            await RestServer(
                listener_of(frozenset({"inference"}), planes.data, planes.control, planes.services()),
                address,
            ).start()

    with pytest.raises(OSError, match="in use"):
        asyncio.run(main())


def test_a_tls_address_without_files_is_refused():
    unused: Any = None
    with pytest.raises(ValueError, match="needs a certificate"):
        RestServer(unused, Address(tls=True))


def test_clients_that_come_at_once_are_taken_in_within_a_few_turns_of_the_loop(planes):
    async def main() -> int:
        async with planes.serving() as server:
            connections = server.listener.connections
            place = server.address.host, server.address.port
            clients = [socket.create_connection(place) for _ in range(100)]
            turns = 0
            while len(connections) < len(clients):
                await asyncio.sleep(0)
                turns += 1
            for client in clients:
                client.close()
        return turns

    for policy in (asyncio.new_event_loop, uvloop.new_event_loop):
        loop = policy()
        turns = loop.run_until_complete(main())
        loop.close()
        assert turns < 20


PING = b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("by_reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize(
    "text", [request(b"x", close=False), PING, PING[:9]], ids=["a prediction", "the app", "half a head"]
)
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_connection_that_has_ended_is_freed_at_once(planes, monkeypatch, run, text, by_reset):
    """Without the garbage collector, and before any of its timers."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        freed = asyncio.Event()

        def made(connection, transport):
            weakref.finalize(connection, freed.set)
            connect(connection, transport)

        connect = Connection.connection_made
        monkeypatch.setattr(Connection, "connection_made", made)
        async with serving(planes) as (_, address):
            client = socket.create_connection((address.host, address.port))
            client.setblocking(False)
            await loop.sock_sendall(client, text)
            if text != PING[:9]:
                await loop.sock_recv(client, 65_536)
            if by_reset:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            await asyncio.wait_for(freed.wait(), 20)

    gc.disable()
    try:
        run(main())
    finally:
        gc.enable()
