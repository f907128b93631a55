"""Where the tools are, what the server's metrics are called, and a server that runs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from torchere.serving.telemetry.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
TOOLS = (ROOT / ".tools/bin", ROOT / ".tools/venv/bin")
# What Prometheus itself adds to every scrape.
OF_PROMETHEUS = frozenset({"up", "scrape_duration_seconds", "scrape_samples_scraped"})
PROPERTIES = """
inference_address=http://127.0.0.1:0
management_address=http://127.0.0.1:0
metrics_address=http://127.0.0.1:0
grpc_inference_port=0
grpc_management_port=0
default_workers_per_model=1
"""
HANDLER = """
from ts.torch_handler.base_handler import BaseHandler

class Echo(BaseHandler):
    def initialize(self, context):
        self.context = context
        self.initialized = True
    def preprocess(self, data):
        return data
    def inference(self, data):
        return data
    def postprocess(self, data):
        return ["ok"] * len(data)
"""


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def tool() -> Callable[[str], str]:
    """Finds a tool in .tools or on PATH; skips the test when there is none."""

    def find(name: str) -> str:
        found = shutil.which(name, path=os.pathsep.join([*map(str, TOOLS), os.environ["PATH"]]))
        if found is None:
            pytest.skip(f"{name} is not installed: deploy/tools.sh fetches it")
        return found

    return find


@pytest.fixture(scope="session")
def sample_names() -> frozenset[str]:
    """Every sample name that a query may use: the server's own, and Prometheus's about the scrape."""
    names = set(OF_PROMETHEUS)
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", Metrics(hostname="h").exposition(), re.MULTILINE):
        suffixes = ("_bucket", "_count", "_sum") if kind == "histogram" else ("",)
        names |= {f"{name}{suffix}" for suffix in suffixes}
    return frozenset(names)


@dataclass(frozen=True)
class LiveServer:
    """A server with one model, `echo`; addresses are host:port."""

    inference: str
    metrics: str

    def predict(self) -> bytes:
        body = urllib.request.Request(f"http://{self.inference}/predictions/echo", b"hello")
        with urllib.request.urlopen(body, timeout=30) as answer:
            return bytes(answer.read())

    def scrape(self) -> str:
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=30) as answer:
            return str(answer.read().decode())


def _follow(process: subprocess.Popen[str], log: Path, wanted: str) -> str:
    """The log, once `wanted` is in it; fails when the server ends before, or a minute is over."""
    limit_s = time.monotonic() + 60
    while wanted not in (text := log.read_text()):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
        if process.returncode is not None or time.monotonic() > limit_s:
            pytest.fail(f"{wanted!r} is not in the log (exit status {process.returncode}):\n{text}")
    return text


@pytest.fixture(scope="session")
def live_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server that runs as long as the tests, and answered three predictions."""
    folder = tmp_path_factory.mktemp("live")
    (folder / "store").mkdir()
    with zipfile.ZipFile(folder / "store/echo.mar", "w") as archive:
        archive.writestr("h.py", HANDLER)
        model = {"modelName": "echo", "modelVersion": "1.0", "handler": "h.py"}
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}))
    (folder / "config.properties").write_text(PROPERTIES)
    command = [
        *(sys.executable, "-m", "torchere.serving", "serve", "--ncs", "--disable-token-auth"),
        *("--model-store", "store", "--models", "all", "--ts-config", "config.properties"),
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, text=True)
    try:
        text = _follow(process, folder / "log", "echo:1.0 is ready")
        text = _follow(process, folder / "log", "Model server started.")
        address = dict(re.findall(r"(\w+) API: http://([\d.:]+)", text))
        server = LiveServer(address["Inference"], address["Metrics"])
        for _ in range(3):
            server.predict()
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
