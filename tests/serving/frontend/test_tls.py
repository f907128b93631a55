"""Certificates that are replaced while the server runs, shown to real clients over REST and gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import json
import logging
import socket
import ssl
import sys
import time
from asyncio import constants
from pathlib import Path

import grpc
import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from grpc_health.v1 import health_pb2

from torchere.archiver.signature import Signature, TensorSpec
from torchere.serving.access.tls import Certificates, CertificateUnusable, TlsFiles
from torchere.serving.config.server_settings import Address
from torchere.serving.errors import HandlerFailed, ServingError
from torchere.serving.frontend import budgets as budget_module
from torchere.serving.frontend.grpc.server import inference_server
from torchere.serving.frontend.rest.server import RestServer, listener_of
from torchere.serving.frontend.tls_server import bound_sockets
from torchere.serving.io import watchdog
from torchere.serving.io.addresses import refuse_taken
from torchere.serving.types import InferResponse, StreamedResponse

NEVER_ENDS = datetime.datetime(2100, 1, 1)


def make_pair(
    name: str,
    pass_phrase: bytes | None = None,
    until: datetime.datetime = NEVER_ENDS,
    rsa_bits: int = 0,
) -> tuple[bytes, bytes]:
    """A self-signed certificate for `localhost` with that organisation, and its key, in PEM."""
    key = rsa.generate_private_key(65537, rsa_bits) if rsa_bits else ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, name)])
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(2020, 1, 1))
        .not_valid_after(until)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    secret = (
        serialization.BestAvailableEncryption(pass_phrase) if pass_phrase else serialization.NoEncryption()
    )
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return made.public_bytes(pem), key.private_bytes(pem, form, secret)


@pytest.fixture(scope="module")
def pairs() -> dict[str, tuple[bytes, bytes]]:
    return {name: make_pair(name) for name in ("first", "second")}


@pytest.fixture
def files(tmp_path: Path, pairs: dict[str, tuple[bytes, bytes]]) -> TlsFiles:
    found = TlsFiles(tmp_path / "tls.crt", tmp_path / "tls.key")
    write(found, *pairs["first"])
    return found


def write(files: TlsFiles, certificate: bytes, private_key: bytes) -> None:
    for path, content in ((files.certificate, certificate), (files.private_key, private_key)):
        draft = path.with_suffix(".draft")
        draft.write_bytes(content)
        draft.replace(path)


@contextlib.asynccontextmanager
async def rest_server(planes, certificates, **settings):
    services = planes.services(max_request_bytes=2**20, **settings)
    app = listener_of(frozenset({"inference"}), planes.data, planes.control, services)
    server = RestServer(app, Address(port=0, tls=True), drain_timeout_s=2, certificates=certificates)
    yield await server.start()
    await server.stop()


class RestClient:
    """One connection with keep-alive; `organisation` is who the server said it is."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        certificate = x509.load_der_x509_certificate(shown)
        (named,) = certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)
        self.organisation = named.value

    @classmethod
    async def connect(cls, address: Address) -> RestClient:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return cls(*await asyncio.open_connection(address.host, address.port, ssl=context))

    async def ask(self) -> bytes:
        self.writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = await self._reader.readuntil(b"\r\n\r\n")
        await self._reader.readuntil(b"}\n")
        return head.partition(b"\r\n")[0]

    async def answer(self, length: int) -> bytes:
        await self._reader.readuntil(b"\r\n\r\n")
        return await self._reader.readexactly(length)

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


def test_a_stream_that_breaks_off_says_no_farewell_to_a_client_of_http_1_0(planes, files):
    async def chunks():
        yield b"one"
        raise HandlerFailed

    async def behave(request):
        return StreamedResponse(InferResponse(b""), chunks())

    def read_all(address):
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with (
            socket.create_connection((address.host, address.port), timeout=20) as plain,
            context.wrap_socket(plain, suppress_ragged_eofs=False) as client,
        ):
            client.sendall(b"POST /predictions/echo HTTP/1.0\r\nContent-Length: 0\r\n\r\n")
            with contextlib.suppress(ssl.SSLEOFError, ConnectionResetError):
                while client.recv(65536):
                    pass
                return "farewell"
        return "broken off"

    async def main():
        async with rest_server(planes, Certificates(files)) as address:
            return await asyncio.to_thread(read_all, address)

    planes.data.behave = behave
    assert uvloop.run(main()) == "broken off"


def test_a_new_pair_is_shown_to_new_rest_connections_and_old_ones_go_on(planes, files, pairs):
    async def main():
        certificates = Certificates(files)
        async with rest_server(planes, certificates) as address:
            old = await RestClient.connect(address)
            await old.ask()
            write(files, *pairs["second"])
            certificates.refresh()
            new = await RestClient.connect(address)
            answers = [await old.ask(), await new.ask()]
            for client in (old, new):
                await client.close()
            return old.organisation, new.organisation, answers

    assert uvloop.run(main()) == ("first", "second", [b"HTTP/1.1 200 OK"] * 2)


def test_a_handshake_that_ends_while_the_server_stops_does_not_hold_up_the_stop(planes, files):
    async def main():
        services = planes.services()
        listener = listener_of(frozenset({"inference"}), planes.data, planes.control, services)
        address = Address(port=0, tls=True)
        server = RestServer(listener, address, drain_timeout_s=15, certificates=Certificates(files))
        address = await server.start()
        busy = await RestClient.connect(address)
        await busy.ask()
        busy.writer.write(b"GET /livez HTTP/1.1\r\n")  # the stop waits for the rest
        reader, writer = await asyncio.open_connection(address.host, address.port)
        while not listener.connection_limit.handshakes:
            await asyncio.sleep(0)
        stopping = asyncio.ensure_future(server.stop())
        await asyncio.sleep(0)
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        await asyncio.get_running_loop().start_tls(writer.transport, writer.transport.get_protocol(), context)
        while listener.connection_limit.handshakes:
            await asyncio.sleep(0)
        busy.writer.write(b"Host: localhost\r\n\r\n")
        await asyncio.wait_for(stopping, 5)
        assert await reader.read() == b""
        await busy.close()

    uvloop.run(main())


# The server runs on uvloop; the standard library's loop is tried where it tells a protocol from the next one.
_OLD_TLS = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="asyncio's TLS gives the rest of a record to the protocol before"
)


@pytest.mark.parametrize("run", [pytest.param(asyncio.run, marks=_OLD_TLS), uvloop.run])
def test_large_bodies_come_through_whole(planes, files, run):
    tensor = bytes(range(250)) * 2000
    specs = (TensorSpec("x", "UINT8", (-1,)),)
    described = {"name": "x", "shape": [len(tensor)], "datatype": "UINT8"}
    said = json.dumps({"inputs": [described | {"parameters": {"binary_data_size": len(tensor)}}]}).encode()
    head = "POST /v2/models/echo/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n{}\r\n"
    request = head.format(len(said) + len(tensor), f"Inference-Header-Content-Length: {len(said)}\r\n")

    async def echo(request):
        return InferResponse(bytes(request.parameters[0].value))

    async def main():
        planes.data.behave = echo
        planes.data.known = dataclasses.replace(planes.data.known, signature=Signature(specs, specs))
        async with rest_server(planes, Certificates(files)) as address:
            client = await RestClient.connect(address)
            client.writer.write((request.encode() + said + tensor) * 2)
            answers = [await client.answer(len(tensor)), await client.answer(len(tensor))]
            await client.close()
        return answers

    assert run(main()) == [tensor, tensor]


LONG = bytes(8 * 2**20)
TIMEOUT_S = 0.3


@contextlib.asynccontextmanager
async def asked_for_long(planes, address, headers=b""):
    """The reader of a client with little room, which has asked for a long answer."""

    async def behave(request):
        return InferResponse(LONG)

    planes.data.behave = behave
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32_768)
    plain.setblocking(False)
    await asyncio.get_running_loop().sock_connect(plain, (address.host, address.port))
    reader, writer = await asyncio.open_connection(sock=plain, ssl=context, server_hostname="localhost")
    writer.write(b"POST /predictions/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n%b\r\n" % headers)
    try:
        yield reader
    finally:
        writer.transport.abort()


async def taken_of_long(reader, every_s=0.0):
    """The number of bytes that come until the long answer is whole or the connection ends."""
    taken = 0
    with contextlib.suppress(OSError):
        await reader.readuntil(b"\r\n\r\n")
        while taken < len(LONG) and (piece := await asyncio.wait_for(reader.read(2**18), 20)):
            taken += len(piece)
            await asyncio.sleep(every_s)
    return taken


@pytest.mark.parametrize("run", [pytest.param(asyncio.run, marks=_OLD_TLS), uvloop.run])
@pytest.mark.parametrize("others_bytes", [0, 2 * len(LONG)])
def test_answers_that_clients_leave_count(planes, files, monkeypatch, run, others_bytes):
    monkeypatch.setattr(budget_module, "MIN_MESSAGES", 0)
    budgets = budget_module.Budgets(2 * len(LONG))
    budgets.unsent_bytes = others_bytes

    async def main():
        most = 0
        async with (
            rest_server(planes, Certificates(files), budgets=budgets) as address,
            asked_for_long(planes, address) as reader,
        ):
            began_s = time.monotonic()
            while not most and not budgets.refused["unsent"] and time.monotonic() - began_s < 10:
                await asyncio.sleep(0.001)
                most = budgets.unsent_bytes - others_bytes
            return most, await taken_of_long(reader)

    most, taken = run(main())
    assert (taken == len(LONG)) == (not others_bytes)
    assert most > len(LONG) // 4 or others_bytes
    assert (budgets.unsent_bytes, budgets.refused["unsent"]) == (others_bytes, bool(others_bytes))


@pytest.mark.parametrize("run", [pytest.param(asyncio.run, marks=_OLD_TLS), uvloop.run])
@pytest.mark.parametrize("headers", [b"", b"Connection: close\r\n"], ids=["kept", "closed"])
def test_a_client_that_takes_nothing_loses_the_connection(planes, files, monkeypatch, run, headers):
    monkeypatch.setattr(watchdog, "UNREAD_TIMEOUT_S", TIMEOUT_S)

    async def main():
        async with (
            rest_server(planes, Certificates(files)) as address,
            asked_for_long(planes, address, headers) as reader,
        ):
            await asyncio.sleep(4 * TIMEOUT_S)
            return await taken_of_long(reader)

    assert run(main()) < len(LONG)


@_OLD_TLS
@pytest.mark.parametrize("headers", [b"", b"Connection: close\r\n"], ids=["kept", "closed"])
def test_a_client_that_reads_slowly_gets_all(planes, files, monkeypatch, headers):
    """On asyncio's loop, whose time for the end of TLS can be set; uvloop's is half a minute."""
    monkeypatch.setattr(watchdog, "UNREAD_TIMEOUT_S", TIMEOUT_S)
    monkeypatch.setattr(constants, "SSL_SHUTDOWN_TIMEOUT", TIMEOUT_S, raising=False)

    async def main():
        async with (
            rest_server(planes, Certificates(files), keep_alive_s=TIMEOUT_S) as address,
            asked_for_long(planes, address, headers) as reader,
        ):
            began_s = time.monotonic()
            return await taken_of_long(reader, every_s=TIMEOUT_S / 6), time.monotonic() - began_s

    taken, took_s = asyncio.run(main())
    assert (taken, took_s > 3 * TIMEOUT_S) == (len(LONG), True)


async def grpc_health(address: Address, trusted: bytes) -> str:
    """SERVING, or the code of the failure: a client that trusts one certificate tells which one is shown."""
    credentials = grpc.ssl_channel_credentials(trusted)
    options = [("grpc.ssl_target_name_override", "localhost"), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(f"127.0.0.1:{address.port}", credentials, options) as channel:
        call = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            health_pb2.HealthCheckRequest.SerializeToString,
            health_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = await call(health_pb2.HealthCheckRequest(), timeout=20)
        except grpc.aio.AioRpcError as err:
            return str(err.code().name)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


@contextlib.asynccontextmanager
async def grpc_server(planes, certificates):
    services = dataclasses.replace(planes.services(grpc_tls_enabled=True), certificates=certificates)
    server = inference_server(planes.data, planes.control, services, Address(port=0))
    yield await server.start()
    await server.stop(1)


def test_a_new_pair_is_shown_to_new_grpc_connections(planes, files, pairs):
    first, second = pairs["first"][0], pairs["second"][0]

    async def main():
        certificates = Certificates(files)
        async with grpc_server(planes, certificates) as address:
            before = [await grpc_health(address, first), await grpc_health(address, second)]
            write(files, *pairs["second"])
            certificates.refresh()
            return before, [await grpc_health(address, first), await grpc_health(address, second)]

    assert uvloop.run(main()) == (["SERVING", "UNAVAILABLE"], ["UNAVAILABLE", "SERVING"])


def test_a_broken_new_pair_is_logged_and_the_old_one_goes_on(planes, files, pairs, caplog):
    async def main():
        certificates = Certificates(files)
        async with rest_server(planes, certificates) as rest, grpc_server(planes, certificates) as address:
            write(files, pairs["second"][0], pairs["first"][1])  # of two pairs
            with caplog.at_level(logging.ERROR):
                certificates.refresh()
            client = await RestClient.connect(rest)
            await client.close()
            found = client.organisation, await grpc_health(address, pairs["first"][0])
            write(files, *pairs["second"])
            certificates.refresh()
            client = await RestClient.connect(rest)
            await client.close()
            return (*found, client.organisation)

    assert uvloop.run(main()) == ("first", "SERVING", "second")
    assert "The TLS certificate can't be used." in caplog.text
    assert "Those from before stay in force." in caplog.text


@pytest.mark.parametrize("missing", ["certificate", "private_key"])
def test_a_file_that_is_not_there_is_an_error_at_the_start(files, missing):
    getattr(files, missing).unlink()
    with pytest.raises(CertificateUnusable) as caught:
        Certificates(files)
    assert str(files.certificate) in caught.value.detail
    assert ": No such file or directory; expected a PEM chain" in caught.value.detail


def test_what_is_no_pem_is_said_without_openssls_line_of_c(files):
    write(files, b"no", b"pem")
    with pytest.raises(CertificateUnusable) as caught:
        Certificates(files)
    assert "_ssl.c" not in caught.value.detail


def test_a_key_with_a_pass_phrase_is_refused_and_nobody_is_asked_for_it(files):
    write(files, *make_pair("third", b"secret"))
    with pytest.raises(CertificateUnusable, match="can't be used") as caught:
        Certificates(files)
    assert "the key has a pass phrase" in caught.value.detail


def test_the_expiry_is_that_of_the_pair_in_force(files, pairs):
    before = NEVER_ENDS.replace(tzinfo=datetime.timezone.utc)
    renewed = make_pair("renewed", until=NEVER_ENDS + datetime.timedelta(days=90))
    certificates = Certificates(files)
    write(files, renewed[0], pairs["first"][1])  # the key does not belong to it
    certificates.refresh()
    assert certificates.value.expires_at_s == before.timestamp()
    write(files, *renewed)
    certificates.refresh()
    assert certificates.value.expires_at_s == (before + datetime.timedelta(days=90)).timestamp()


def test_a_certificate_whose_expiry_can_not_be_told_serves_all_the_same(files, caplog):
    text = files.certificate.read_text()
    files.certificate.write_text(
        text.replace("BEGIN CERT", "BEGIN X509 CERT").replace("END CERT", "END X509 CERT")
    )
    assert Certificates(files).value.expires_at_s is None
    assert "the expiry of the certificate can't be told" in caplog.text


def test_no_message_and_no_representation_holds_the_key(files, pairs):
    pair = Certificates(files).value
    assert pairs["first"][1].decode().splitlines()[1] not in repr(pair)


def test_a_client_without_tls_gets_no_answer(planes, files):
    async def main():
        async with rest_server(planes, Certificates(files)) as address:
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            said = b""
            with contextlib.suppress(ConnectionError):
                said = await asyncio.wait_for(reader.read(), 20)
            writer.close()
            client = await RestClient.connect(address)
            assert await client.ask() == b"HTTP/1.1 200 OK"
            await client.close()
            return said

    assert b"HTTP/" not in asyncio.run(main())


def test_a_key_of_1024_bits_is_refused_with_what_to_do_and_taken_under_the_old_name(planes, files, caplog):
    write(files, *make_pair("small", rsa_bits=1024))
    with pytest.raises(CertificateUnusable) as refused:
        Certificates(files)
    assert "openssl req -x509 -nodes -newkey rsa:2048" in refused.value.detail
    small = dataclasses.replace(files, small_keys=True)
    with pytest.raises(CertificateUnusable, match="client_ca_file"):
        Certificates(dataclasses.replace(small, client_ca=files.certificate.with_name("gone.pem")))
    assert "it is used" not in caplog.text
    certificates = Certificates(small)
    assert "it is used, as in TorchServe" in caplog.text

    async def main():
        async with rest_server(planes, certificates) as address:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.set_ciphers("DEFAULT:@SECLEVEL=1")
            reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context)
            client = RestClient(reader, writer)
            assert client.organisation == "small"
            assert await client.ask() == b"HTTP/1.1 200 OK"
            writer.close()

    uvloop.run(main()) if hasattr(uvloop, "run") else asyncio.run(main())


def test_the_unspecified_address_of_ipv6_takes_ipv4_too() -> None:
    sockets = asyncio.run(bound_sockets(Address("::", 0), 8))
    try:
        port = sockets[0].getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port), 10).close()
        with pytest.raises(ServingError, match="Address already in use"):
            refuse_taken([Address("0.0.0.0", port)])
    finally:
        for each in sockets:
            each.close()
