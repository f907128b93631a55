"""`torchere serve` as a child process: started on free loopback ports, waited for, stopped by SIGTERM."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from examples.harness.errors import ExampleFailed
from torchere.client import Client
from torchere.serving.commands.predict_grpc import Connection

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 40.0  # the server itself gives what is running 30 s
CALL_TIMEOUT_S = 60.0
_POLL_S = 0.1


class ServerFailed(ExampleFailed):
    """The server did not start, did not become ready, or did not end with exit status 0."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Five free TCP ports on 127.0.0.1."""

    inference: int
    management: int
    metrics: int
    grpc_inference: int
    grpc_management: int

    @classmethod
    def free(cls) -> Ports:
        """Ports that were free a moment ago. The properties file has no way to ask for any free port."""
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(5)]
            return cls(*(one.getsockname()[1] for one in sockets))


class Server:
    """A running server. Its directory holds config.properties, server.log and key_file.json."""

    def __init__(self, directory: Path, ports: Ports, process: subprocess.Popen[bytes]) -> None:
        self.directory = directory
        self.ports = ports
        self.process = process

    @property
    def log(self) -> Path:
        """What the server printed."""
        return self.directory / "server.log"

    def bearer(self, key: str) -> dict[str, str]:
        """The header (or gRPC metadata) that shows the "inference" or "management" key to the server."""
        keys = json.loads((self.directory / "key_file.json").read_text())
        return {"authorization": f"Bearer {keys[key]['key']}"}

    def url(self, port: int, path: str) -> str:
        """The address of a path on one of the REST ports."""
        return f"http://127.0.0.1:{port}{path}"

    def client(self) -> Client:
        """A client of its REST API; to be closed."""
        token = self.bearer("inference")["authorization"].partition(" ")[2]
        return Client(self.url(self.ports.inference, ""), token=token)

    def grpc(self) -> Connection:
        """A connection to its gRPC API; to be closed."""
        token = self.bearer("inference")["authorization"].partition(" ")[2]
        return Connection(f"127.0.0.1:{self.ports.grpc_inference}", token, CALL_TIMEOUT_S)

    def wait_until_ready(self, model: str) -> None:
        """Block until every version of the model has a worker that is READY.

        Raises:
            ServerFailed: the process ended, or it took longer than `START_TIMEOUT_S`.
        """
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._ready(model):
            if self.process.poll() is not None:
                raise ServerFailed(
                    f"it ended with exit status {self.process.returncode}; {self._last_words()}"
                )
            if time.monotonic() > deadline_s:
                raise ServerFailed(f"it was not ready after {START_TIMEOUT_S:.0f} s; {self._last_words()}")
            time.sleep(_POLL_S)

    def _ready(self, model: str) -> bool:
        if not self.log.is_file() or b"Model server started." not in self.log.read_bytes():
            return False
        versions: list[dict[str, Any]] = requests.get(
            self.url(self.ports.management, f"/models/{model}/all"),
            headers=self.bearer("management"),
            timeout=10,
        ).json()
        return all(
            version["workers"] and all(worker["status"] == "READY" for worker in version["workers"])
            for version in versions
        )

    def stop(self) -> float:
        """End the server with SIGTERM and wait for it; returns the seconds it took.

        Raises:
            ServerFailed: its exit status was not 0, or it was still there after `STOP_TIMEOUT_S`.
        """
        start_s = time.monotonic()
        self.process.terminate()
        try:
            status = self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired as err:
            self.process.kill()
            raise ServerFailed(f"it was still there {STOP_TIMEOUT_S:.0f} s after SIGTERM") from err
        if status != 0:
            raise ServerFailed(f"it ended with exit status {status} after SIGTERM; {self._last_words()}")
        return time.monotonic() - start_s

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-15:]
        return "\n".join([f"the end of {self.log}:", *lines])


@contextlib.contextmanager
def started(directory: Path, store: Path, models: Sequence[str], ports: Ports) -> Iterator[Server]:
    """A server over the archives of `store`, as `name=file` each; ended at the latest when the block ends."""
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "config.properties"
    config.write_text(_properties(ports))
    command = [str(Path(sys.executable).with_name("torchere")), "serve", "--ncs", "--log-format", "text"]
    command += ["--model-store", str(store), "--ts-config", str(config), "--models", *models]
    with (directory / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=directory,
            env=_environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl+C is for this program, which then stops the server
        )
    try:
        yield Server(directory, ports, process)
    finally:
        if process.poll() is None:
            process.terminate()  # not at once by force: it deletes its temporary files
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _environment() -> dict[str, str]:
    """This process's environment without TS_..., which would win over config.properties."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TS_")}


def _properties(ports: Ports) -> str:
    return "\n".join(
        (
            "# Loopback only, and every call needs a token: both are the defaults.",
            f"inference_address=http://127.0.0.1:{ports.inference}",
            f"management_address=http://127.0.0.1:{ports.management}",
            f"metrics_address=http://127.0.0.1:{ports.metrics}",
            f"grpc_inference_port={ports.grpc_inference}",
            f"grpc_management_port={ports.grpc_management}",
            "metrics_mode=prometheus",
            "",
        )
    )
