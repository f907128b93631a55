"""Floods: one client spends 1 MB/s on making the server work, and another one is answered all the same.

Each test file starts one server and has a table of attacks. An attack is the bytes of one request. `flood`
sends it again and again on CONNECTIONS connections, at RATE_BYTES a second in all, and makes control requests
on a connection of its own meanwhile. The test prints the figures and asserts generous bounds: control
requests in well under a second, and memory within the sum of the limits and 256 MiB.

A new attack is a row in the table. It must exceed a bound on the code before its hole was closed.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

_spec = importlib.util.spec_from_file_location(
    "torchere_e2e_conftest", Path(__file__).parents[1] / "e2e" / "conftest.py"
)
assert _spec is not None and _spec.loader is not None
_e2e = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_e2e)

store = _e2e.store
pack = _e2e.pack
start_server = _e2e.start_server

CONNECTIONS = 8
RATE_BYTES = 1_000_000  # a second, of all connections
FLOOD_S = 4.0
PATIENCE_S = 20.0


@dataclass
class Figures:
    """Figures of one flood: latencies of the control requests, growth of memory, answers by status."""

    control_s: list[float] = field(default_factory=list)
    grown_bytes: int = 0
    answers: Counter[int] = field(default_factory=Counter)  # 0: the connection was lost

    def quantile(self, share: float) -> float:
        return sorted(self.control_s)[min(len(self.control_s) - 1, int(share * len(self.control_s)))]

    def __str__(self) -> str:
        p50, p99, most = (1000 * self.quantile(share) for share in (0.5, 0.99, 1))
        return (
            f"control p50 {p50:.0f} ms, p99 {p99:.0f} ms, max {most:.0f} ms of {len(self.control_s)}; "
            f"RSS +{self.grown_bytes / 2**20:.0f} MiB; answers {dict(self.answers)}"
        )


class Flood:
    """One attack on one server, from `begin` to `end`."""

    def __init__(self, address: str, request: bytes) -> None:
        host, port = address.split(":")
        self._address = host, int(port)
        self._request = request
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._sent_bytes = 0
        self._began_s = time.monotonic()
        self._threads = [threading.Thread(target=self._attack, daemon=True) for _ in range(CONNECTIONS)]
        self.answers: Counter[int] = Counter()

    def begin(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._over.set()
        end_s = time.monotonic() + PATIENCE_S
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))

    def _attack(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(self._address, PATIENCE_S) as client:
                while self._may_send():
                    status = self._ask(client)
                    with self._lock:
                        self.answers[status] += 1
                    if status != 200:  # the server closes the connection
                        break

    def _may_send(self) -> bool:
        """Wait until the rate allows another request."""
        with self._lock:
            self._sent_bytes += len(self._request)
            # The first request of each connection goes at once: a burst is a part of the attack.
            due_s = (
                self._began_s + self._sent_bytes / RATE_BYTES - CONNECTIONS * len(self._request) / RATE_BYTES
            )
        return not self._over.wait(max(0.0, due_s - time.monotonic()))

    def _ask(self, client: socket.socket) -> int:
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before it was all sent
                client.sendall(self._request)
            answer = http.client.HTTPResponse(client)
            answer.begin()
            answer.read()
            return answer.status
        except (OSError, http.client.HTTPException):
            return 0


def _rss_bytes(process: psutil.Process) -> int:
    found = 0
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += one.memory_info().rss
    return found


@pytest.fixture
def flood(capsys: pytest.CaptureFixture[str]) -> Callable[[Any, str, bytes, str], Figures]:
    """`flood(server, name, request, control)`: figures of one attack; control requests POST to `control`."""

    def run(server: Any, name: str, request: bytes, control: str) -> Figures:
        figures = Figures()
        process = psutil.Process(server.process.pid)
        client = http.client.HTTPConnection(server.rest["inference"], timeout=PATIENCE_S)
        before = _rss_bytes(process)
        attack = Flood(server.rest["inference"], request)
        attack.begin()
        end_s = time.monotonic() + FLOOD_S
        try:
            while time.monotonic() < end_s:
                began_s = time.perf_counter()
                client.request("POST", control, b"x")
                answer = client.getresponse()
                answer.read()
                figures.control_s.append(time.perf_counter() - began_s)
                assert answer.status == 200
                figures.grown_bytes = max(figures.grown_bytes, _rss_bytes(process) - before)
        finally:
            attack.end()
            client.close()
        figures.answers = attack.answers
        with capsys.disabled():
            print(f"\n{name}: {figures}")
        return figures

    return run
