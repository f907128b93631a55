"""A real server process on free ports, started as users start it; `pythonpath` of pytest leads here."""

import json
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

PROPERTIES = """
inference_address=http://127.0.0.1:0
management_address=http://127.0.0.1:0
metrics_address=http://127.0.0.1:0
grpc_inference_port=0
grpc_management_port=0
default_workers_per_model=1
"""


@dataclass
class Reply:
    """One HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def free_ports(count: int) -> list[int]:
    """Return ports that were free just now, for tests that must name a port before a server listens on it.

    They are below those that the kernel gives for 0, so no other test takes them meanwhile.
    """
    ports: set[int] = set()
    while len(ports) < count:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.add(port)
    return list(ports)


@dataclass
class RunningServer:
    """A server process; `rest` and `grpc` hold host:port by API."""

    process: subprocess.Popen[str]
    folder: Path
    rest: dict[str, str] = field(default_factory=dict)
    grpc: dict[str, str] = field(default_factory=dict)

    def call(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        api: str = "inference",
        headers: dict[str, str] | None = None,
        **more_headers: str,
    ) -> Reply:
        """Send one request; `more_headers` are named with `_` for `-`."""
        names = {"content-type": "application/octet-stream"}
        names |= {name.replace("_", "-"): value for name, value in more_headers.items()}
        names |= headers or {}
        request = urllib.request.Request(f"http://{self.rest[api]}{path}", body, names, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return Reply(answer.status, dict(answer.headers), answer.read())
        except urllib.error.HTTPError as err:
            with err:
                return Reply(err.code, dict(err.headers), err.read())

    def register(self, archive: str, **options: object) -> Reply:
        query = "&".join([f"url={archive}", *(f"{key}={value}" for key, value in options.items())])
        return self.call("POST", f"/models?{query}", api="management")

    def follow(self, wanted: str) -> None:
        """Wait until a text is in the log."""
        follow(self, wanted)

    def until_ready(self) -> None:
        """Wait until all models of the start serve, and leave the processor to them meanwhile."""
        while self.call("GET", "/readyz").status != 200:
            time.sleep(0.02)

    def log(self) -> str:
        return (self.folder / "server.log").read_text()

    def logs(self, text: str) -> bool:
        """Whether the log holds a text, by now or soon: a worker's lines come behind its answers."""
        for _ in range(200):
            if text in self.log():
                return True
            time.sleep(0.05)
        return False

    def stop(self) -> int:
        """SIGTERM, and wait for the end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def start(
    folder: Path,
    *arguments: str,
    properties: str = "",
    python: str = sys.executable,
    user: int | None = None,
    store: str | None = "../store",
) -> RunningServer:
    """Start `torchere serve` in `folder`, with the model store beside it, and wait until it is up.

    `store` None: the arguments say what is served.
    `user`: what root changes to before; None: the server's user is that of the tests.
    """
    (folder / "config.properties").write_text(PROPERTIES + properties)
    command = [
        *(python, "-m", "torchere.serving", "serve", "--ncs", "--log-format", "json"),
        *(("--model-store", store) if store else ()),
        *("--ts-config", "config.properties", *arguments),
    ]
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )
    server = RunningServer(process, folder)
    follow(server, "Model server started.")
    for api, address in re.findall(r"(\w+) API: https?://([\d.:]+)", server.log()):
        server.rest[api.lower()] = address
    for api, address in re.findall(r"(\w+) gRPC: ([\d.:]+)", server.log()):
        server.grpc[api.lower()] = address
    return server


def follow(server: RunningServer, wanted: str) -> None:
    """Wait until a text is in the log; fails when the process ends before."""
    with (server.folder / "server.log").open() as log:
        seen = ""
        while wanted not in seen:
            seen += log.read()
            try:
                server.process.wait(0.02)
            except subprocess.TimeoutExpired:
                continue
            seen += log.read()
            assert wanted in seen, f"the server ended with {server.process.returncode}:\n{seen}"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model store that all servers of a test module use."""
    folder = tmp_path_factory.mktemp("deployment") / "store"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def start_server(store: Path) -> Iterator[Callable[..., RunningServer]]:
    """Starts servers, each in a folder of its own; stops them at the end of the module."""
    servers: list[RunningServer] = []

    def starter(*arguments: str, properties: str = "") -> RunningServer:
        folder = Path(tempfile.mkdtemp(dir=store.parent))
        servers.append(start(folder, *arguments, properties=properties))
        return servers[-1]

    yield starter
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def open_server(start_server: Callable[..., RunningServer]) -> RunningServer:
    """A server without tokens, with the model API, shared by the tests of a module."""
    return start_server("--disable-token-auth", "--enable-model-api")


@pytest.fixture(scope="module")
def pack(store: Path) -> Callable[..., str]:
    """Writes an archive into the store: files by name, and manifest members."""

    def packer(name: str, files: dict[str, str | bytes], *, runtime: str = "python", **model: str) -> str:
        described = {"modelName": name, "modelVersion": "1.0", **model}
        with zipfile.ZipFile(store / f"{name}.mar", "w") as archive:
            for file, content in files.items():
                archive.writestr(file, content)
            archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": runtime, "model": described}))
        return f"{name}.mar"

    return packer
