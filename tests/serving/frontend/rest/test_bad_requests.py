"""Requests that are hostile or broken, on a real socket: each has a defined answer, and the next one too.

`docs/bad-inputs.md` names these tests.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from contextlib import suppress

import pytest

from torchere.serving.frontend.rest import connection
from torchere.serving.frontend.rest.bodies import Chunks

PING = b"GET /ping HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
HEAD = b"POST /predictions/echo HTTP/1.1\r\nHost: x\r\n"
REQUEST = HEAD + b"Content-Length: 5\r\n\r\nhello"
INVALID = b"HTTP/1.1 400 Bad Request"
MOST_CHUNKS = 1_000_000


@pytest.fixture(autouse=True)
def short_linger(monkeypatch):
    """Refused bodies are read for a moment only."""
    monkeypatch.setattr(connection, "UNREAD_LINGER_S", 0.1)


def statuses(said: bytes) -> list[bytes]:
    return re.findall(rb"HTTP/1\.1 (\d+)", said)


def test_a_body_of_a_million_chunks_is_put_together():
    chunks, found = Chunks(), 0
    stream = b"1\r\nx\r\n" * (MOST_CHUNKS // 10)
    for _ in range(10):
        for start in range(0, len(stream), 65_536):
            _, pieces = chunks.feed(stream[start : start + 65_536], 0)
            found += sum(map(len, pieces))
    chunks.feed(b"0\r\n\r\n", 0)
    assert (found, chunks.over) == (MOST_CHUNKS, True)


def test_a_body_in_tiny_chunks_is_counted_as_any_other(planes, talk):
    chunk = b"1\r\nx\r\n"
    said = talk(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 2000, max_request_bytes=1000)
    assert said.startswith(b"HTTP/1.1 413 ")
    assert not planes.data.asked


def test_a_malformed_chunk_before_a_long_rest_is_answered(planes, monkeypatch):
    monkeypatch.setattr(connection, "UNREAD_LINGER_S", 10.0)

    def upload(address) -> bytes:
        with socket.create_connection((address.host, address.port), 20) as client:
            client.sendall(
                HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nzz\r\n" + bytes(6_000_000)
            )
            return client.recv(100)

    async def main():
        async with planes.serving() as server:
            said = await asyncio.to_thread(upload, server.address)
            while server.listener.connections:
                await asyncio.sleep(0.01)
            return said

    assert asyncio.run(asyncio.wait_for(main(), 20)).startswith(INVALID)
    assert not planes.data.asked


def test_bytes_behind_a_body_are_the_next_request(planes, talk):
    said = talk(HEAD + b"Content-Length: 2\r\n\r\nhello\r\n\r\n")  # "llo" is not a request
    assert statuses(said) == [b"200", b"400"]
    assert [bytes(request.parameters[0].value) for _, _, request in planes.data.asked] == [b"he"]


@pytest.mark.parametrize(
    "lines",
    [
        b"X: a\0b",
        b"X: a\rb",
        b"X: a\nY: b",
        b"X: a\r\n folded",
        b"X\0: a",
        b"X y: a",
        b": a",
    ],
    ids=[
        *("NUL", "CR", "LF", "folded", "NUL in a name", "blank in a name"),
        "no name",
    ],
)
def test_header_lines_that_no_reader_should_take_are_refused(planes, talk, lines):
    assert talk(HEAD + lines + b"\r\nContent-Length: 0\r\n\r\n" + PING).startswith(INVALID)
    assert not planes.data.asked


@pytest.mark.parametrize(
    "message",
    [
        HEAD + b"X: " + b"a" * 65_536 + b"\r\n\r\n",
        HEAD + b"".join(b"X%d: 1\r\n" % number for number in range(10_000)) + b"\r\n",
        b"GET /" + b"a" * 65_536 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["a header of 64 KB", "10,000 headers", "a path of 64 KB"],
)
def test_a_head_without_measure_ends_the_connection(planes, talk, message):
    with suppress(ConnectionResetError):  # the answer is lost where the head had not been read to its end
        assert talk(message).startswith(INVALID)
    assert not planes.data.asked


def test_a_header_beyond_ascii_reaches_the_handler_byte_for_byte(planes, talk):
    talk(HEAD + b"X-Name: \xc3\xa9\xff\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    assert dict(planes.data.asked[0][2].headers)["X-Name"].encode("latin-1") == b"\xc3\xa9\xff"


@pytest.mark.parametrize(
    "name",
    [
        *(b"..", b"%2e%2e", b"%252e%252e", b"%00", b"echo%00", b"echo;x=1", b"..\\echo", b"%5cecho", b"%ff"),
        *(b"echo/../none", b"none/..%2fecho", b"x" * 3000),
    ],
)
def test_a_path_is_no_way_to_another_model(planes, talk, name):
    request = b"POST /predictions/%b HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    said = talk(request % name)
    assert statuses(said) in ([b"404"], [b"400"])
    assert not planes.data.asked


@pytest.mark.parametrize("path", [b"//predictions/echo", b"/predictions//echo", b"\\predictions\\echo"])
def test_a_path_of_odd_slashes_is_found_or_refused(planes, talk, path):
    said = talk(b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    assert statuses(said) in ([b"404"], [b"400"])
    assert not planes.data.asked


@pytest.mark.parametrize(
    "message",
    [
        b"FROBNICATE /ping HTTP/1.1\r\nHost: x\r\n\r\n",
        b"get /ping HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /ping\r\n\r\n",
        b"GET /ping HTTP/0.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=[
        *("an unknown method", "lower case", "no version", "HTTP/0.9", "HTTP/2", "TLS", "no UTF-8"),
    ],
)
def test_another_protocol_is_refused_and_the_connection_ends(planes, talk, message):
    assert talk(message + PING).startswith(INVALID)


@pytest.mark.parametrize("length", [2**31, 2**32 + 5])
def test_lengths_about_the_bounds_of_integers_are_too_long(planes, talk, length):
    said = talk(HEAD + b"Content-Length: %d\r\n\r\nhello" % length)
    assert said.startswith(b"HTTP/1.1 413 ")
    assert not planes.data.asked


@pytest.mark.parametrize(
    "length", [b"9" * 40, b"18446744073709551616", b"-1", b"+5", b"0x5", b"5 5", b"5,5", b""]
)
def test_lengths_that_are_none_are_refused(planes, talk, length):
    assert talk(HEAD + b"Content-Length: %b\r\n\r\nhello" % length).startswith(INVALID)
    assert not planes.data.asked


@pytest.mark.parametrize(("over", "status"), [(-1, b"200"), (0, b"200"), (1, b"413")])
def test_a_body_may_be_as_long_as_the_limit_and_not_a_byte_longer(planes, talk, over, status):
    body = b"x" * (1000 + over)
    said = talk(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    assert statuses(said) == [status]


def test_a_client_may_leave_at_any_byte_of_a_request_or_answer(planes):
    async def main() -> None:
        async with planes.serving() as server:
            address = (server.address.host, server.address.port)
            for end in range(1, len(REQUEST) + 1):
                for reset in (False, True):
                    with socket.create_connection(address) as client:
                        if reset:  # an RST instead of a FIN
                            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        client.sendall(REQUEST[:end])
                    await asyncio.sleep(0)
            reader, writer = await asyncio.open_connection(*address)
            writer.write(PING)
            assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 200 OK")
            writer.close()
            while server.listener.connections:
                await asyncio.sleep(0.01)
            assert not [task for task in server.listener.tasks if not task.done()]

    asyncio.run(main())


@pytest.mark.parametrize("sent", [b"", b"hel"])
def test_a_go_ahead_that_is_not_used_ends_with_408(planes, talk, monkeypatch, sent):
    monkeypatch.setattr(connection, "BODY_TIMEOUT_S", 0.2)
    said = talk(HEAD + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n" + sent)
    assert statuses(said)[-1] == b"408"
    assert not planes.data.asked


SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    "lines",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5",
        b"Transfer-Encoding:\tchunked\r\nContent-Length: 5",
        b"Transfer-Encoding: chunked, identity",
        b"Transfer-Encoding: xchunked",
        b"Transfer-Encoding : chunked",
        b"Transfer_Encoding: chunked\r\nTransfer-Encoding: identity",
        b"Content-Length: 5\r\nContent-Length: 6",
        b"X: y\nTransfer-Encoding: chunked",
    ],
)
def test_a_request_that_a_proxy_may_read_otherwise_ends_the_connection(planes, talk, lines):
    said = talk(HEAD + lines + b"\r\n\r\n0\r\n\r\n" + SMUGGLED)
    assert statuses(said) == [b"400"]
    assert not planes.data.asked


@pytest.mark.parametrize(
    "lines",
    [b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked"],
)
def test_a_transfer_coding_that_is_not_decoded_is_refused_as_such(planes, talk, lines):
    said = talk(HEAD + lines + b"\r\n\r\n0\r\n\r\n" + SMUGGLED)
    assert statuses(said) == [b"501"]
    assert not planes.data.asked


@pytest.mark.parametrize(
    ("path", "lines", "status"),
    [
        (b"", b"Authorization: Bearer inference\r\n", b"200"),
        (b"?authorization=Bearer%20inference&token=inference&key=inference", b"", b"400"),
        (b"", b"Authorization: Bearer wrong\r\nAuthorization: Bearer inference\r\n", b"400"),
        (b"", b"Cookie: authorization=Bearer inference\r\n", b"400"),
        (b"", b"Proxy-Authorization: Bearer inference\r\n", b"400"),
        (b"", b"Authorization: Bearer management\r\n", b"400"),
        (b"", b"Authorization: Basic aW5mZXJlbmNl\r\n", b"400"),
    ],
)
def test_a_key_counts_in_the_first_header_of_its_name_only(planes, talk, path, lines, status):
    head = b"POST /predictions/echo%b HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n"
    assert statuses(talk(head % path + lines + b"\r\n", keys=planes.keys)) == [status]
    assert len(planes.data.asked) == (status == b"200")


def test_the_name_of_a_file_is_not_used(planes, talk):
    part = b'--b\r\nContent-Disposition: form-data; name="f"; filename="../../%b"\r\n\r\nx\r\n--b--\r\n'
    for name in (b"a\0b", b"a" * 900, b"%2e%2e/etc", b"c:\\x"):
        body = part % name
        head = HEAD + b"Content-Type: multipart/form-data; boundary=b\r\nConnection: close\r\n"
        said = talk(head + b"Content-Length: %d\r\n\r\n" % len(body) + body, max_request_bytes=5000)
        assert statuses(said) in ([b"200"], [b"400"])
    for _, _, request in planes.data.asked:
        assert [(each.name, bytes(each.value)) for each in request.parameters] == [("f", b"x")]


def test_a_load_over_the_network_brings_no_content_of_files(planes, talk):
    body = b'{"parameters": {"file:1/../../x": "aGk=", "config": "{}", "initial_workers": 2}}'
    head = b"POST /v2/repository/models/new/load HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    said = talk(
        head + b"Content-Length: %d\r\n\r\n" % len(body) + body,
        surface="management",
        open_inference_protocol=True,
    )
    assert statuses(said) == [b"400"]
    assert b"parameters.file:1/../../x: found the bytes of a file" in said
    assert not [call for call in planes.control.calls if call[0] == "register"]


@pytest.mark.parametrize(
    "path", [b"/predictions/echo", b"/v2/models/echo/infer", b"/models", b"/explanations/echo"]
)
def test_without_a_key_nobody_is_told_to_send_the_body(talk, planes, path):
    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n" % path
    said = talk(head, keys=planes.keys)
    assert b"100 Continue" not in said
    assert statuses(said)[0] in (b"400", b"404", 400, 404)


def test_after_a_refusal_of_the_connection_the_app_sends_no_go_ahead(planes, caplog):
    async def main():
        async with planes.connected("management") as (_, reader, writer):
            head = b"POST /models HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            writer.write(head + b"Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
            answer = await asyncio.wait_for(reader.read(), 20)
            await asyncio.sleep(0.05)
            writer.close()
        return answer

    answer = asyncio.run(main())
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"100 Continue" not in answer
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_client_can_send_a_body_after_a_bad_head_and_read_the_refusal(planes, monkeypatch):
    monkeypatch.setattr(connection, "UNREAD_LINGER_S", 5)

    async def main():
        async with planes.connected() as (server, reader, writer):
            writer.write(HEAD + b"Cookie: %b\r\nContent-Length: 6000000\r\n\r\n" % (b"a" * 9000))
            answer = await reader.read()  # the server has ended its side, and drops further bytes
            for _ in range(20):
                writer.write(bytes(65_536))
                await writer.drain()
                await asyncio.sleep(0.01)
            writer.close()
            while server.listener.connections:
                await asyncio.sleep(0.01)
            return answer

    answer = asyncio.run(asyncio.wait_for(main(), 4))
    assert answer.startswith(INVALID)
    assert statuses(answer) == [b"400"]


def test_a_bad_head_is_not_waited_for_longer_than_a_refused_body(planes):
    async def main():
        async with planes.connected() as (server, reader, writer):
            writer.write(b"nonsense\r\n\r\n")
            assert statuses(await reader.read()) == [b"400"]
            while server.listener.connections:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 4))
