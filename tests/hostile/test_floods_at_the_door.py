"""Floods of connections, watches and cancellations, by clients without a key, while others are answered.

Each test prints its figures and asserts the bounds of `floods`.
"""

from __future__ import annotations

import contextlib
import datetime
import http.client
import re
import socket
import ssl
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from floods import CONTROL_S, RATE_BYTES, Figures
from servers import start

from torchere.serving.frontend.connection_limit import MIN_FILES

MAX_CONNECTIONS = 150
ATTACKERS = 8
ATTACK_S = 3.0
CONTROLS = 120  # so many that one slow answer, of a machine that was busy, is not the 99th of a hundred
GROWTH_BYTES = 256 * 2**20
PATIENCE_S = 30.0
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
        began_s = time.perf_counter()
        client = self._client(self._server.rest[self._api], timeout=PATIENCE_S)
        client.request("GET", "/livez")
        answer = client.getresponse()
        assert answer.status == 200
        answer.read()
        client.close()
        self.figures.control_s.append(time.perf_counter() - began_s)
        grown_bytes = self._process.memory_info().rss - self._before_bytes
        self.figures.grown_bytes = max(self.figures.grown_bytes, grown_bytes)

    def ask_for(self, duration_s: float) -> None:
        end_s = time.monotonic() + duration_s
        while time.monotonic() < end_s:
            self.ask()

    def check(self, name: str, capsys: Any) -> None:
        """Print the figures and check them against the bounds."""
        with capsys.disabled():
            print(f"\n{name}: {self.figures}")
        assert self.figures.quantile(0.99) <= CONTROL_S
        assert self.figures.grown_bytes <= GROWTH_BYTES


def refusals(server: Any, budget: str) -> int:
    text = server.call("GET", "/metrics", api="metrics").body.decode()
    found = re.search(rf'torchere_budget_refusals_total{{budget="{budget}",?}} ([0-9.e+]+)', text)
    return 0 if found is None else int(float(found[1]))


def connected(address: str) -> socket.socket:
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), PATIENCE_S)


def watch(stream_id: int) -> bytes:
    """Frames of a call of `Watch`, with its whole request, for the server itself."""
    lines = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/grpc.health.v1.Health/Watch",
        ":authority": "x",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    block = b"".join(
        b"\0%c%b%c%b" % (len(name), name.encode(), len(value), value.encode())
        for name, value in lines.items()
    )
    head = len(block).to_bytes(3, "big") + b"\1\4" + stream_id.to_bytes(4, "big")
    return head + block + b"\0\0\5\0\1" + stream_id.to_bytes(4, "big") + bytes(5)


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


def test_cancelled_calls_delay_no_others(server, capsys):
    over = threading.Event()
    share = RATE_BYTES / ATTACKERS

    def attack() -> None:
        with contextlib.suppress(OSError), connected(server.grpc["inference"]) as client:
            reader = threading.Thread(target=drain, args=(client,))
            reader.start()
            client.sendall(PREFACE)
            for first in range(1, 2**20, 200):
                calls = b"".join(watch(number) + reset(number) for number in range(first, first + 200, 2))
                if over.wait(len(calls) / share):
                    break
                client.sendall(calls)
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
            reader.join(PATIENCE_S)

    control = Control(server)
    attackers = [threading.Thread(target=attack) for _ in range(ATTACKERS)]
    for each in attackers:
        each.start()
    control.ask_for(ATTACK_S)
    over.set()
    for each in attackers:
        each.join(PATIENCE_S)
    control.check("cancelled calls", capsys)


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
