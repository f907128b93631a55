"""A server under test, and how to start one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_S = 120.0


@dataclass(frozen=True, slots=True)
class Target:
    """Where a server answers: host:port each, without a scheme.

    `differs` are the deliberate differences (docs/differences.md) a test may have to know of.
    """

    name: str
    http: str
    grpc: str
    repository: str  # the port that the model repository is controlled on
    differs: frozenset[str] = frozenset()


def free_ports(count: int) -> list[int]:
    """TCP ports of the loopback interface that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


@contextmanager
def running(
    command: Sequence[str],
    folder: Path,
    *,
    said: str,
    http: str,
    environment: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """A server process until the block ends; begins when it has said `said`, and is ready at `http`."""
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **(environment or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its children share the group, so that none of them outlives the block
        )
    try:
        _until_said(process, log, said)
        _until_ready(process, log, http)
        yield
    finally:
        _end(process)


def _until_said(process: subprocess.Popen[bytes], log: Path, said: str) -> None:
    _until(lambda: said.encode() in log.read_bytes(), process, log)


def _until_ready(process: subprocess.Popen[bytes], log: Path, address: str) -> None:
    def is_ready() -> bool:
        try:
            with urllib.request.urlopen(f"http://{address}/v2/health/ready", timeout=5):
                return True
        except urllib.error.HTTPError as refusal:
            refusal.close()  # Python 3.14 warns of one that is left open
            return False
        except OSError:
            return False

    _until(is_ready, process, log)


def _until(done: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    give_up_s = time.monotonic() + START_S
    while not done():
        if process.poll() is not None or time.monotonic() > give_up_s:
            raise RuntimeError(f"the server is not up ({process.poll()}):\n{log.read_text()[-3000:]}")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
