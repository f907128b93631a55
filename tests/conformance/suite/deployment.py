"""A deployment of TorchServe, real or torchere's, that is started, asked and stopped as its tests do it.

Both have the command `torchserve`; which one it is depends on the first folder of PATH.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from conformity.rpc import RpcAnswer, call
from conformity.servers import free_ports

STARTED = "Model server started."
OPEN = ("--disable-token-auth", "--enable-model-api")
APIS = ("inference", "management", "metrics", "grpc_inference", "grpc_management")
START_S = 90.0


@dataclass(frozen=True, slots=True)
class Reply:
    """One HTTP response; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Deployment:
    """A folder with a model store, a configuration and logs; `bin` is where its `torchserve` lies."""

    folder: Path
    bin: Path
    downloads: str  # URL of the folder `downloads`, which other folders can't be reached from
    ports: dict[str, int] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)  # of the environment

    def __post_init__(self) -> None:
        for name in ("store", "tmp"):
            (self.folder / name).mkdir(exist_ok=True)

    @property
    def log(self) -> str:
        path = self.folder / "console.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def files(self, pattern: str) -> list[Path]:
        return sorted(self.folder.glob(pattern))

    def start(
        self, *flags: str, properties: str = "", ncs: bool = True, file: str | None = "config.properties"
    ) -> None:
        """Start it in the background, on free ports, and wait until it is up."""
        self.ports = dict(zip(APIS, free_ports(len(APIS)), strict=True))
        lines = [f"{api}_address=http://127.0.0.1:{self.ports[api]}" for api in APIS[:3]]
        lines += [f"{api}_port={self.ports[api]}" for api in APIS[3:]]
        if file == "config.properties":
            (self.folder / file).write_text("\n".join(lines) + f"\n{properties}")
        command = ["torchserve", "--start", "--model-store", str(self.folder / "store"), *flags]
        command += ["--ncs"] if ncs else []
        command += ["--ts-config", file] if file else []
        self.launch(command)

    def launch(self, command: Sequence[str]) -> None:
        """Run a start command, and wait for the line that says it is up."""
        with (self.folder / "console.log").open("wb") as log:
            self.run(command, stdout=log, stderr=subprocess.STDOUT)
        self.wait_for(lambda: STARTED in self.log)

    def stop(self) -> None:
        self.run(["torchserve", "--stop", "--foreground"], stdout=subprocess.DEVNULL)

    def run(
        self, command: Sequence[str], check: bool = True, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the folder, with this `torchserve` first on PATH."""
        names = {"PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}", "TMPDIR": str(self.folder / "tmp")}
        options = {"stdin": subprocess.DEVNULL, "text": True, "timeout": 120, **options}
        return subprocess.run(
            command, cwd=self.folder, env={**os.environ, **names, **self.variables}, check=check, **options
        )

    def wait_for(self, is_so: Callable[[], bool], within_s: float = START_S) -> None:
        deadline_s = time.monotonic() + within_s
        while not is_so():
            assert time.monotonic() < deadline_s, f"waited {within_s} s; the log ends:\n{self.log[-3000:]}"
            time.sleep(0.05)

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        api: str = "inference",
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Send one REST request; an error status is a reply, too."""
        given = {**({} if body is None else {"Content-Type": "application/json"}), **(headers or {})}
        # Not urllib, which writes names of headers in its own way: TorchServe distinguishes capitals.
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[api], timeout=120)
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # refused before the body was out
                connection.request(method, path, body, given)
            answer = connection.getresponse()
            names = {name.lower(): value for name, value in answer.getheaders()}
            return Reply(answer.status, names, answer.read())
        finally:
            connection.close()

    def manage(self, method: str, path: str, **headers: str) -> Reply:
        return self.ask(method, path, api="management", headers=headers)

    def register(self, url: str, name: str, workers: int = 1, **more: object) -> Reply:
        query = "".join(f"&{key}={value}" for key, value in more.items())
        path = f"/models?url={url}&model_name={name}&initial_workers={workers}&synchronous=true{query}"
        return self.manage("POST", path)

    def call(self, service: str, method: str, request: Any) -> RpcAnswer:
        """Make one gRPC call."""
        addresses = {api: f"127.0.0.1:{self.ports[f'grpc_{api}']}" for api in APIS[:2]}
        return call({"service": service, "method": method, "request": request}, addresses)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@contextmanager
def deployment(folder: Path, bin: Path) -> Iterator[Deployment]:
    """Give a deployment that is not started; it is stopped at the end. Archives in `downloads` have a URL."""
    (folder / "downloads").mkdir(parents=True, exist_ok=True)
    handler = partial(_Quiet, directory=str(folder / "downloads"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        made = Deployment(folder, bin, f"http://127.0.0.1:{server.server_address[1]}")
        try:
            yield made
        finally:
            made.stop()
            server.shutdown()
