"""An attack on a server over several connections, and the figures of those that it disturbs."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

CONNECTIONS = 8
RATE_BYTES = 1_000_000  # a second, of all connections
FLOOD_S = float(os.environ.get("TORCHERE_FLOOD_S", "2"))  # most of an attack is in its first second
CONTROL_EVERY_S = 0.005  # without a pause, the control requests would take a core
# Bound of the slowest control request in a hundred. The goal is 250 ms: set it on an idle machine, as for the
# figures in docs/operations.md. Other work makes more slow than the waits that `timed` leaves out.
CONTROL_S = float(os.environ.get("TORCHERE_CONTROL_MS", "2000")) / 1000
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


@contextlib.contextmanager
def timed(figures: Figures, server: psutil.Process) -> Iterator[None]:
    """Note the latency of a control request, less the waits for a core that other programs had.

    Those of the server's event loop and of this thread count in proportion: the server's own threads, and the
    attackers in this process, have cores, too.
    """
    before = _clocks(server)
    yield
    took_s, waited_s, own_s, busy_s = (now - then for now, then in zip(_clocks(server), before, strict=True))
    others = max(0.0, 1 - own_s / busy_s) if busy_s else 0.0
    figures.control_s.append(took_s - others * min(waited_s, took_s))


def _clocks(server: psutil.Process) -> tuple[float, float, float, float]:
    """Return seconds: now, waits for a core, cores' work for the server and this process, and all of it."""
    waited_ns = 0
    for task in (f"/proc/{server.pid}/schedstat", "/proc/thread-self/schedstat"):
        with contextlib.suppress(OSError):  # kernels without it
            waited_ns += int(Path(task).read_text().split()[1])
    own_s = sum(sum(process.cpu_times()[:2]) for process in (server, psutil.Process()))
    cores = psutil.cpu_times()
    return time.perf_counter(), waited_ns / 1e9, own_s, cores.user + cores.nice + cores.system


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


def rss_bytes(process: psutil.Process) -> int:
    """Return the resident memory of a process and its descendants."""
    found = 0
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += one.memory_info().rss
    return found
