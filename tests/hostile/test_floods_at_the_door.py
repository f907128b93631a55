"""Floods of connections, watches and cancellations, by clients without a key, while others are answered.

Each test prints its figures and asserts the bounds of `floods`.
"""

from __future__ import annotations

import contextlib
import datetime
import gzip
import http.client
import re
import socket
import ssl
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from floods import CONTROL_S, FLOOD_S, RATE_BYTES, Figures, timed
from servers import start

from torchere.serving.frontend.connection_limit import MIN_FILES
from torchere.serving.frontend.grpc.protos.open_inference_pb2 import ModelInferRequest

MAX_CONNECTIONS = 150
ATTACKERS = 8
ATTACK_S = max(3.0, FLOOD_S)
CONTROLS = 120  # so many that one slow answer, of a machine that was busy, is not the 99th of a hundred
GROWTH_BYTES = 256 * 2**20
PATIENCE_S = 30.0
HELD_BYTES = 128 * 2**20
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
INFER, STREAM = (f"/inference.GRPCInferenceService/Model{name}" for name in ("Infer", "StreamInfer"))
SHORT_FIELD = b"\x78\0"  # that no message has
FRAME_BYTES = 16_384
END_STREAM, END_HEADERS = 1, 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
RESET = struct.pack(">BHBBII", 0, 4, 3, 0, 0, 8)


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """A server without models, with tokens on: an attacker has no key."""
    with tempfile.TemporaryDirectory() as root:
        (Path(root) / "store").mkdir()
        folder = Path(root) / "server"
        folder.mkdir()
        running = start(folder, properties=f"max_connections={MAX_CONNECTIONS}\n")
        running.until_ready()
        yield running
        running.stop()


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server without models that asks for no token: everybody may ask for predictions."""
    root = tmp_path_factory.mktemp("open")
    for name in ("store", "server"):
        (root / name).mkdir()
    properties = f"max_held_bytes={HELD_BYTES}\n"
    running = start(root / "server", "--disable-token-auth", properties=properties)
    running.until_ready()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The same with TLS on all ports."""
    root = tmp_path_factory.mktemp("tls")
    for name in ("store", "server"):
        (root / name).mkdir()
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    pem = serialization.Encoding.PEM
    (root / "certificate.pem").write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(pem))
    form = serialization.PrivateFormat.PKCS8
    (root / "key.pem").write_bytes(key.private_bytes(pem, form, serialization.NoEncryption()))
    running = start(
        root / "server",
        properties=f"max_connections={MAX_CONNECTIONS}\nenable_grpc_ssl=true\n"
        f"certificate_file={root}/certificate.pem\nprivate_key_file={root}/key.pem\n"
        "inference_address=https://127.0.0.1:0\nmanagement_address=https://127.0.0.1:0\n",
    )
    yield running
    running.stop()


class Control:
    """Control requests, each on a new connection, from a thread of its own; growth of the server's memory."""

    def __init__(self, server: Any, api: str = "inference", *, tls: bool = False) -> None:
        self._client: Any = http.client.HTTPConnection
        if tls:
            self._client = partial(http.client.HTTPSConnection, context=ssl._create_unverified_context())
        self._server = server
        self._api = api
        self._process = psutil.Process(server.process.pid)
        self._before_bytes = self._process.memory_info().rss
        self.figures = Figures()

    def ask(self) -> None:
        with timed(self.figures, self._process):
            client = self._client(self._server.rest[self._api], timeout=PATIENCE_S)
            client.request("GET", "/livez")
            answer = client.getresponse()
            assert answer.status == 200
            answer.read()
            client.close()
        grown_bytes = self._process.memory_info().rss - self._before_bytes
        self.figures.grown_bytes = max(self.figures.grown_bytes, grown_bytes)

    def ask_for(self, duration_s: float) -> None:
        end_s = time.monotonic() + duration_s
        while time.monotonic() < end_s:
            self.ask()

    def check(self, name: str, capsys: Any, limit_bytes: int = 0) -> None:
        """Print the figures and check them against the bounds."""
        with capsys.disabled():
            print(f"\n{name}: {self.figures}")
        assert self.figures.quantile(0.99) <= CONTROL_S
        assert self.figures.grown_bytes <= limit_bytes + GROWTH_BYTES


def refusals(server: Any, budget: str) -> int:
    text = server.call("GET", "/metrics", api="metrics").body.decode()
    found = re.search(rf'torchere_budget_refusals_total{{budget="{budget}",?}} ([0-9.e+]+)', text)
    return 0 if found is None else int(float(found[1]))


def connected(address: str) -> socket.socket:
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), PATIENCE_S)


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream_id) + payload


def data(stream_id: int, payload: bytes, *, ends: bool = True) -> bytes:
    """Data frames within the size that every server takes."""
    parts = [payload[at : at + FRAME_BYTES] for at in range(0, len(payload), FRAME_BYTES)]
    flags = [0] * (len(parts) - 1) + [END_STREAM * ends]
    return b"".join(frame(0, flag, stream_id, part) for flag, part in zip(flags, parts, strict=True))


def head(stream_id: int, method: str, *, gzipped: bool = False) -> bytes:
    """The frame of the headers of a call."""
    lines = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": "x",
        "content-type": "application/grpc",
        "te": "trailers",
    } | ({"grpc-encoding": "gzip"} if gzipped else {})
    block = b"".join(
        b"\0%c%b%c%b" % (len(name), name.encode(), len(value), value.encode())
        for name, value in lines.items()
    )
    return frame(1, END_HEADERS, stream_id, block)


def watch(stream_id: int) -> bytes:
    """Frames of a call of `Watch`, with its whole request, for the server itself."""
    return head(stream_id, WATCH) + data(stream_id, bytes(5))


def reset(stream_id: int) -> bytes:
    return RESET[:5] + stream_id.to_bytes(4, "big") + RESET[9:]


def test_idle_connections_leave_room_for_others_and_for_the_other_ports(server, capsys):
    controls = [Control(server), Control(server, "management")]
    descriptors = psutil.Process(server.process.pid).num_fds()
    with contextlib.ExitStack() as stack:
        for _ in range(2 * MAX_CONNECTIONS):
            for address in (server.rest["inference"], server.grpc["inference"]):
                stack.enter_context(connected(address))
        for _ in range(CONTROLS):
            for control in controls:
                control.ask()
        held = psutil.Process(server.process.pid).num_fds() - descriptors
    for control, port in zip(controls, ("inference", "management"), strict=True):
        control.check(f"idle connections, {port} port", capsys)
    assert held <= 2 * MAX_CONNECTIONS + 16
    assert refusals(server, "connections") >= 2 * MAX_CONNECTIONS


def test_idle_connections_leave_room_where_there_are_few_descriptors(tmp_path):
    for name in ("store", "server"):
        (tmp_path / name).mkdir()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nulimit -n {MIN_FILES}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    running = start(tmp_path / "server", python=str(python))
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(MIN_FILES):
                for address in (*running.rest.values(), *running.grpc.values()):
                    stack.enter_context(connected(address))
            for api in ("inference", "management"):
                assert running.call("GET", "/livez", api=api).status == 200
            assert running.call("GET", "/metrics", api="metrics").status == 200
    finally:
        running.stop()


def test_tls_handshakes_that_never_end_leave_room_for_others(tls_server, capsys):
    controls = [Control(tls_server, api, tls=True) for api in ("inference", "management")]
    for control in controls:  # the first request waits until the app is built
        control.ask()
        control.figures = Figures()
    process = psutil.Process(tls_server.process.pid)
    descriptors = process.num_fds()
    with contextlib.ExitStack() as stack:
        for _ in range(2 * MAX_CONNECTIONS):
            for address in (tls_server.rest["inference"], tls_server.grpc["inference"]):
                stack.enter_context(connected(address)).sendall(b"\x16\x03\x01\x02\0")
        for _ in range(CONTROLS):
            for control in controls:
                control.ask()
        held = process.num_fds() - descriptors
    for control, port in zip(controls, ("inference", "management"), strict=True):
        control.check(f"TLS handshakes, {port} port", capsys)
    assert held <= 2 * MAX_CONNECTIONS + 16
    assert refusals(tls_server, "connections") >= 2 * MAX_CONNECTIONS


def test_watches_cost_nothing_while_nothing_changes(server, capsys):
    control = Control(server)
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            client = stack.enter_context(connected(server.grpc["inference"]))
            client.sendall(PREFACE + b"".join(map(watch, range(1, 2000, 2))))
        control.ask_for(ATTACK_S)
        # A busy machine has not read all of them by then.
        due_s = time.monotonic() + PATIENCE_S
        while (refused := refusals(server, "watches")) < 60 * 1000 - 4096 and time.monotonic() < due_s:
            time.sleep(0.1)
    control.check("60,000 watches", capsys)
    assert refused >= 60 * 1000 - 4096


def drain(client: socket.socket) -> None:
    """Read until the server closes the connection."""
    with contextlib.suppress(OSError):
        while client.recv(2**16):
            continue


def updates_of_the_table(stream_id: int, method: str) -> bytes:
    """A block of headers that changes the size of the dynamic table again and again (RFC 7541, 4.2)."""
    parts = [b"\x20" * FRAME_BYTES] * 2
    return frame(1, 0, stream_id, parts[0]) + frame(9, END_HEADERS, stream_id, parts[1])


def compressed(packed: bytes, stream_id: int, method: str) -> bytes:
    message = b"\1" + struct.pack(">I", len(packed)) + packed
    return head(stream_id, method, gzipped=True) + data(stream_id, message)


def short_fields(stream_id: int, method: str) -> bytes:
    """A message of a field that no message has, many times."""
    return head(stream_id, method) + data(stream_id, b"\0" + struct.pack(">I", 64_000) + SHORT_FIELD * 32_000)


def unfinished(stream_id: int, method: str) -> bytes:
    message = b"\0" + struct.pack(">I", 6_500_000) + bytes(FRAME_BYTES)
    return head(stream_id, method) + data(stream_id, message, ends=False)


def many_fields(stream_id: int, method: str) -> bytes:
    """A call that is not ended, with a field of HPACK's table again and again."""
    enters = b"\x40\x02aa\x02bb" if stream_id == 1 else b"\xbe"
    return with_block(head(stream_id, method), enters + b"\xbe" * 420)


def long_fields(stream_id: int, method: str) -> bytes:
    """The same with one of 4 KB, whose text takes four bytes a character in Python."""
    value = "\U0001f600".encode() + b"v" * 3900
    enters = b"\x40\1a\x7f" + bytes((len(value) - 127 & 127 | 128, len(value) - 127 >> 7)) + value
    differs = b"\0\1n\4%04d" % (stream_id // 2 % 10_000)
    first = enters if stream_id == 1 else b"\xbe"
    return with_block(head(stream_id, method), differs + first + b"\xbe" * 3)


def with_block(headers: bytes, block: bytes) -> bytes:
    """The frame of headers with a block behind its own."""
    return frame(1, headers[4], int.from_bytes(headers[5:9], "big"), headers[9:] + block)


# The frames of one call of a method on a stream.
CALLS: dict[str, Callable[[int, str], bytes]] = {
    "cancelled calls": lambda stream_id, method: watch(stream_id) + reset(stream_id),
    "updates of the header table": updates_of_the_table,
    "compressed messages": partial(compressed, gzip.compress(SHORT_FIELD * 3_250_000)),
    "short compressed messages": partial(compressed, gzip.compress(SHORT_FIELD * 8_000)),
    "compressed messages of 64 KB": partial(compressed, gzip.compress(SHORT_FIELD * 32_000)),
    "messages of short fields": short_fields,
    "unfinished messages": unfinished,
    "calls with many fields": many_fields,
    "calls with long fields": long_fields,
}


# A request for a model that is not there: its inputs are read all the same.
ASKED = ModelInferRequest(model_name="m")
ASKED.inputs.add(name="x", datatype="FP32", shape=[1]).contents.fp32_contents.append(1)
MANY_INPUTS = ASKED.SerializeToString() + 599 * ModelInferRequest(inputs=ASKED.inputs).SerializeToString()


def many_requests(stream_id: int, method: str) -> bytes:
    message = ASKED.SerializeToString()
    return head(stream_id, method) + data(
        stream_id, (b"\0" + struct.pack(">I", len(message)) + message) * 300
    )


TENSOR_CALLS: dict[str, tuple[str, Callable[[int, str], bytes]]] = {
    "compressed messages of many inputs": (INFER, partial(compressed, gzip.compress(MANY_INPUTS))),
    "compressed requests of many inputs": (STREAM, partial(compressed, gzip.compress(MANY_INPUTS))),
    "streams of many requests": (STREAM, many_requests),
}


class Attack:
    """Calls without end from `ATTACKERS` connections, which are made again when the server closes them."""

    def __init__(self, address: str, call: Callable[[int], bytes]) -> None:
        self._address = address
        self._call = call
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._attack) for _ in range(ATTACKERS)]
        self.sent_bytes = 0

    def __enter__(self) -> Attack:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for each in self._threads:
            each.join(PATIENCE_S)

    def _attack(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(OSError), connected(self._address) as client:
                reader = threading.Thread(target=drain, args=(client,))
                reader.start()
                client.sendall(PREFACE)
                self._send_calls(client, reader)
                with contextlib.suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)
                reader.join(PATIENCE_S)

    def _send_calls(self, client: socket.socket, reader: threading.Thread) -> None:
        number = 1
        while reader.is_alive():
            calls = b""
            while len(calls) < FRAME_BYTES:
                calls += self._call(number)
                number += 2
            if self._over.wait(len(calls) * ATTACKERS / RATE_BYTES):
                break
            with contextlib.suppress(OSError):
                client.sendall(calls)
            self.sent_bytes += len(calls)


@pytest.fixture
def withstands(capsys):
    """`withstands(server, call, name, limit_bytes)`: others are answered while attackers make such calls."""

    def withstands(server, call, name, limit_bytes=0):
        control = Control(server)
        with Attack(server.grpc["inference"], call) as attack:
            control.ask_for(ATTACK_S)
        control.check(name, capsys, limit_bytes)
        assert attack.sent_bytes > ATTACKERS * FRAME_BYTES

    return withstands


@pytest.mark.parametrize("name", CALLS)
def test_calls_without_a_key_delay_no_others(server, withstands, name):
    withstands(server, lambda stream_id: CALLS[name](stream_id, CHECK), f"{name} for the health service")


@pytest.mark.parametrize("method", [INFER, STREAM])
@pytest.mark.parametrize("name", [name for name in CALLS if "messages" in name])
def test_predictions_of_anybody_delay_no_others(open_server, withstands, name, method):
    asked = f"{name} for {method.rpartition('/')[2]}"
    withstands(open_server, lambda stream_id: CALLS[name](stream_id, method), asked, HELD_BYTES)


@pytest.mark.parametrize("name", TENSOR_CALLS)
def test_requests_of_tensors_delay_no_others(open_server, withstands, name):
    method, call = TENSOR_CALLS[name]
    withstands(open_server, lambda stream_id: call(stream_id, method), name, HELD_BYTES)


def test_a_connection_with_too_many_cancelled_calls_is_closed(server):
    with connected(server.grpc["inference"]) as client:
        client.sendall(PREFACE)
        reader = threading.Thread(target=drain, args=(client,))
        reader.start()
        with contextlib.suppress(OSError):
            for first in range(1, 2**20, 200):
                client.sendall(
                    b"".join(watch(number) + reset(number) for number in range(first, first + 200, 2))
                )
        reader.join(PATIENCE_S)
        assert not reader.is_alive()
    assert refusals(server, "flood") >= 1
