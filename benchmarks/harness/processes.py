"""Server processes: start one in a folder of its own, wait until it answers, end it with all its children."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import Failed

START_S = 120.0
STOP_S = 20.0
POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A running server: where it answers, and who it is."""

    url: str  # http://host:port, no slash at the end
    grpc: str  # host:port, "" for none
    process: subprocess.Popen[bytes]
    log: Path
    started_s: float  # monotonic, just before the process was started
    management: str = ""  # as `url`, "" for none


@dataclass(frozen=True, slots=True)
class Probe:
    """A request, and what its answer must contain for it to count."""

    path: str
    body: bytes
    wanted: bytes
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


def free_ports(count: int) -> list[int]:
    """TCP ports of the loopback interface that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


@contextmanager
def sigterm_exits() -> Iterator[None]:
    """On SIGTERM, raise SystemExit in the block, so that each `finally` stops its servers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def serving(
    command: Sequence[str],
    folder: Path,
    port: int,
    *,
    grpc_port: int = 0,
    management_port: int = 0,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Endpoint]:
    """Run a server until the block ends; its output goes to `server.log` in `folder`."""
    log = folder / "server.log"
    started_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its children share the group, so that none of them outlives the block
        )
    grpc = f"127.0.0.1:{grpc_port}" if grpc_port else ""
    management = f"http://127.0.0.1:{management_port}" if management_port else ""
    try:
        with sigterm_exits():
            yield Endpoint(f"http://127.0.0.1:{port}", grpc, process, log, started_s, management)
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all of its group, by force when it takes too long."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    _wait_for_group(process.pid, 2.0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    _wait_for_group(process.pid, 2.0)


def _wait_for_group(group: int, timeout_s: float) -> None:
    give_up_s = time.monotonic() + timeout_s
    while time.monotonic() < give_up_s:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)


def until_answered(endpoint: Endpoint, probe: Probe) -> float:
    """Ask until the probe is answered as wanted; returns the seconds since the server was started.

    Raises:
        Failed: the server ended, or took longer than `START_S`.
    """
    while True:
        elapsed_s = time.monotonic() - endpoint.started_s
        if endpoint.process.poll() is not None:
            raise Failed(f"the server ended with {endpoint.process.returncode}: {last_words(endpoint)}")
        status, body = ask(endpoint.url, probe)
        if status == 200 and probe.wanted in body:
            return time.monotonic() - endpoint.started_s
        if elapsed_s > START_S:
            raise Failed(
                f"no answer within {START_S:g} s (last: {status} {body[:200]!r}): {last_words(endpoint)}"
            )
        time.sleep(POLL_S)


def ask(url: str, probe: Probe, timeout_s: float = 60.0) -> tuple[int, bytes]:
    """Send one request; status 0 when there is no whole answer."""
    request = urllib.request.Request(
        f"{url}{probe.path}", probe.body, {**probe.headers, "Content-Type": probe.content_type}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return int(answer.status), bytes(answer.read())
    except urllib.error.HTTPError as err:
        with err:
            return err.code, err.read()
    except (OSError, http.client.HTTPException):
        return 0, b""


def last_words(endpoint: Endpoint) -> str:
    """The end of the server's log."""
    return endpoint.log.read_text(encoding="utf-8", errors="replace")[-1500:]
