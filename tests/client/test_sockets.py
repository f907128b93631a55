"""What only real sockets show: nobody listens, an answer breaks off, an answer drips."""

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import certifi
import httpx
import pytest

from torchere.client import AsyncClient, Client, ClientError, ConnectionFailed, DeadlineExceeded, Retries

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n"


@contextmanager
def peer(answer: bytes, wait: threading.Event | None = None) -> Iterator[str]:
    """A server of one connection that sends `answer`, waits, and closes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(10)

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)
                if wait is not None:
                    wait.wait(30)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            if wait is not None:
                wait.set()
            thread.join()


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    with Client(address, retries=Retries(most=0)) as client, pytest.raises(ConnectionFailed) as caught:
        client.predict("net")
    assert caught.value.refused
    assert caught.value.message.startswith(f"no connection to {address}")


def test_an_answer_that_breaks_off_is_an_error() -> None:
    broke = pytest.raises(ConnectionFailed, match="broke")
    with peer(HEAD + b"half") as address, Client(address) as client, broke:
        client.predict("net")


def test_parts_that_came_are_given_before_the_break_is_told() -> None:
    with peer(HEAD + b"half") as address, Client(address) as client:
        parts = client.predict_stream("net")
        assert next(parts) == b"half"
        with pytest.raises(ConnectionFailed, match="broke"):
            next(parts)


@pytest.mark.parametrize("method", ["predict_stream", "infer_stream"])
def test_a_stream_that_is_closed_has_no_connection(method: str) -> None:
    async def left(address: str) -> list[object]:
        async with AsyncClient(address) as client:
            async with aclosing(getattr(client, method)("net", {"x": [1.0]})) as parts:
                await anext(parts)
            transport = client._http._transport
            assert isinstance(transport, httpx.AsyncHTTPTransport)
            return list(transport._pool.connections)

    begun = b'HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\ndata: {"outputs": []}\n\n'
    with peer(begun, threading.Event()) as address:
        assert asyncio.run(left(address)) == []


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The proxy of the environment: a socket whose `accept` raises BlockingIOError if no client has come."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{listening.getsockname()[1]}")
        listening.setblocking(False)
        yield listening


def ask(kind: str, address: str) -> bytes:
    """Return the answer of a prediction, by the client of a kind."""

    async def awaited() -> bytes:
        async with AsyncClient(address) as client:
            return (await client.predict("net", timeout_s=5)).body

    if kind == "asyncio":
        return asyncio.run(awaited())
    with Client(address) as client:
        return client.predict("net", timeout_s=5).body


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_a_server_of_this_machine_is_called_without_the_proxy(proxy: socket.socket, kind: str) -> None:
    with peer(HEAD + b"0123456789") as address:
        assert ask(kind, address) == b"0123456789"
    with pytest.raises(BlockingIOError):
        proxy.accept()


def test_the_management_api_of_this_machine_is_called_without_the_proxy(proxy: socket.socket) -> None:
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]"
    with peer(answer) as address, Client("http://example.invalid", management_address=address) as client:
        assert client.describe("net", timeout_s=5) == []
    with pytest.raises(BlockingIOError):
        proxy.accept()


def test_another_machine_is_called_through_the_proxy(proxy: socket.socket) -> None:
    with Client("http://example.invalid", timeout_s=0.2) as client, pytest.raises(DeadlineExceeded):
        client.predict("net")
    proxy.accept()[0].close()


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:80", "http://localhost", "https://[::1]:8443", "http://u@127.8.0.1:9/base"]
)
def test_each_form_of_an_address_of_this_machine_is_direct(proxy: socket.socket, address: str) -> None:
    with Client(address) as client:
        http = client._http
        assert http._transport_for_url(httpx.URL(address + "/x")) is http._transport


ODD_VARIABLES = [
    {"ALL_PROXY": "socks5://127.0.0.1:1"},
    {"all_proxy": "socks://127.0.0.1:1"},
    {"NO_PROXY": "localhost,127.0.0.1,[::1]"},
]


@pytest.fixture(params=ODD_VARIABLES, ids=lambda odd: next(iter(odd)))
def odd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of a proxy that other programs take, and httpx refuses, as without the package socksio."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    for name, value in request.param.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "socksio", None)


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_variables_that_httpx_refuses_leave_servers_of_this_machine_alone(odd: None, kind: str) -> None:
    with peer(HEAD + b"0123456789") as address:
        assert ask(kind, address) == b"0123456789"


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_variables_that_httpx_refuses_are_named(odd: None, kind: type[Client]) -> None:
    with pytest.raises(ValueError, match="HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY: found a value that"):
        kind("http://example.invalid")


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("address", ["https://example.invalid", "https://127.0.0.1:8443"])
@pytest.mark.parametrize("file", ["none.pem", "empty.pem"])
def test_certificates_that_can_not_be_loaded_are_named(
    kind: type[Client], address: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty.pem").touch()
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / file))
    with pytest.raises(ValueError, match=f"^SSL_CERT_FILE is .*/{file}: (No such file|.*X509)"):
        kind(address)


def test_an_error_of_another_file_is_not_one_of_the_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", certifi.where())
    monkeypatch.setenv("SSLKEYLOGFILE", str(tmp_path / "none" / "keys"))
    with pytest.raises(FileNotFoundError):
        Client("https://127.0.0.1:8443")


@contextmanager
def keeping_alive() -> Iterator[tuple[str, list[int]]]:
    """A server that keeps its connections; its address, and the client's port of each request."""
    ports: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            ports.append(self.client_address[1])
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", ports
        finally:
            server.shutdown()
            thread.join()


def test_a_forked_process_uses_connections_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with keeping_alive() as (address, ports), Client(address) as client:
        client.predict("net", b"1")
        client.predict("net", b"2")
        forked_from = client._http
        monkeypatch.setattr("os.getpid", lambda: 0)
        client.predict("net", b"3")
        client.predict("net", b"4")
        assert not forked_from.is_closed
        forked_from.close()
    assert ports[0] == ports[1] != ports[2] == ports[3]


def test_a_transport_of_the_callers_is_not_used_in_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> Client:
        return Client(transport=httpx.MockTransport(lambda _: httpx.Response(200)))

    with made() as used, made() as unused:
        used.predict("net")
        monkeypatch.setattr("os.getpid", lambda: 0)
        assert unused.predict("net").body == b""
        with pytest.raises(ClientError, match="make a client in each process"):
            used.predict("net")


def test_a_server_that_says_nothing_is_given_up_at_the_deadline() -> None:
    late = pytest.raises(DeadlineExceeded, match=r"no answer within 0.2 s")
    with peer(HEAD, threading.Event()) as address, Client(address, timeout_s=0.2) as client, late:
        client.predict("net")
