"""Runs the servers that are compared, each in its own folder: torchere, and the real TorchServe 0.12.0."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

APIS = ("inference", "management", "metrics")
GRPC_APIS = ("inference", "management")
START_S = 120.0
STOP_S = 60.0
FLAGS = ("--ncs", "--disable-token-auth", "--enable-model-api")


@dataclass(frozen=True, slots=True)
class Server:
    """A running server; `rest` and `grpc` hold host:port by API."""

    process: subprocess.Popen[bytes]
    log: Path
    rest: Mapping[str, str]
    grpc: Mapping[str, str]

    def pace(self) -> None:
        """Let a moment pass between two looks at the server; RuntimeError when it is gone."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(0.05)
        if self.process.poll() is not None:
            raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.last_words()}")

    def last_words(self) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])


@contextmanager
def torchere(
    folder: Path,
    store: Path,
    properties: str,
    flags: tuple[str, ...] = FLAGS,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Run torchere on ports that the system chooses; `environment` holds further variables."""
    command = [sys.executable, "-m", "torchere.serving", "serve", "--log-format", "json", *flags]
    ports = dict.fromkeys((*APIS, *(f"grpc_{api}" for api in GRPC_APIS)), 0)
    variables = {**os.environ, **(environment or {})}
    with _process(folder, command, store, with_ports(properties, ports), variables) as (process, log):
        text = log.read_text()
        rest = {api.lower(): place for api, place in re.findall(r"(\w+) API: http://([\d.:]+)", text)}
        grpc = {api.lower(): place for api, place in re.findall(r"(\w+) gRPC: ([\d.:]+)", text)}
        yield Server(process, log, rest, grpc)


@contextmanager
def torchserve(
    peer: Path, folder: Path, store: Path, properties: str, flags: tuple[str, ...] = FLAGS
) -> Iterator[Server]:
    """Run the real TorchServe from the environment `peer`, on ports that were free a moment ago."""
    # It starts Python by name, and writes logs and snapshots where it stands.
    environment = {**os.environ, "PATH": f"{peer / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    command = [str(peer / "bin" / "torchserve"), "--start", "--foreground", *flags]
    names = (*APIS, *(f"grpc_{api}" for api in GRPC_APIS))
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    with _process(folder, command, store, with_ports(properties, ports), environment) as (process, log):
        rest = {api: f"127.0.0.1:{ports[api]}" for api in APIS}
        grpc = {api: f"127.0.0.1:{ports[f'grpc_{api}']}" for api in GRPC_APIS}
        yield Server(process, log, rest, grpc)


def with_ports(properties: str, ports: Mapping[str, int]) -> str:
    """The properties with other addresses; lines that name any are dropped."""
    kept = [line for line in properties.splitlines() if "_address=" not in line and "_port=" not in line]
    kept += [f"{api}_address=http://127.0.0.1:{ports[api]}" for api in APIS]
    kept += [f"grpc_{api}_port={ports[f'grpc_{api}']}" for api in GRPC_APIS]
    return "\n".join(kept) + "\n"


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


@contextmanager
def _process(
    folder: Path, command: list[str], store: Path, properties: str, environment: dict[str, str]
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.properties").write_text(properties)
    log = folder / "output.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--model-store", str(store), "--ts-config", str(folder / "config.properties")],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its workers share the group, so that none of them outlives it
        )
    try:
        _wait_until_started(Server(process, log, {}, {}))
        yield process, log
    finally:
        _stop(process)


def _wait_until_started(server: Server) -> None:
    deadline_s = time.monotonic() + START_S
    while "Model server started." not in server.log.read_text(errors="replace"):
        server.pace()
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"the server does not start; its last words:\n{server.last_words()}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with suppress(ProcessLookupError):  # nobody was left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
