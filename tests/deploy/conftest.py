"""What the server's metrics are called, and a server that runs."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from servers import PROPERTIES as ANY_PORTS

from torchere.serving.telemetry.metrics import Metrics

# What is there on some machines only (a GPU, limits of a container), or for streams only.
OF_SOME_MACHINES = re.compile(r"GPU|torchere_cgroup_|torchere_first_part_")
# What Prometheus itself adds to every scrape.
OF_PROMETHEUS = frozenset({"up", "scrape_duration_seconds", "scrape_samples_scraped"})
PROPERTIES = f"""{ANY_PORTS}certificate_file=cert.pem
private_key_file=key.pem
fair_queueing=true
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
        if "fail" in data[0]:  # the client sends a form
            raise ValueError("as asked")
        return data
    def postprocess(self, data):
        return ["ok"] * len(data)
"""


@pytest.fixture(scope="session")
def of_some_machines() -> re.Pattern[str]:
    """Finds queries whose data is there on some machines only."""
    return OF_SOME_MACHINES


@pytest.fixture(scope="session")
def rules(root: Path) -> list[dict[str, Any]]:
    """All recording and alert rules."""
    groups = yaml.safe_load((root / "k8s/chart/rules/torchere.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


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
    pid: int

    def predict(self, body: bytes = b"hello", model: str = "echo") -> bytes:
        request = urllib.request.Request(f"http://{self.inference}/predictions/{model}", body)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return bytes(answer.read())

    def fail(self) -> None:
        with contextlib.suppress(urllib.error.HTTPError):
            self.predict(b"fail")

    def scrape(self) -> str:
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=30) as answer:
            return str(answer.read().decode())


def write_certificate(folder: Path, days: int = 30) -> None:
    """A self-signed certificate and its key, in two PEM files."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + timedelta(days=days))
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / "key.pem").write_bytes(key.private_bytes(pem, form, serialization.NoEncryption()))
    (folder / "key.pem").chmod(0o600)


@pytest.fixture(scope="session")
def certificate() -> Callable[..., None]:
    """Writes cert.pem and key.pem, good for `days`, into a folder."""
    return write_certificate


def _follow(process: subprocess.Popen[str], log: Path, wanted: str) -> str:
    """The log, once `wanted` is in it; fails when the server ends before, or a minute is over."""
    limit_s = time.monotonic() + 60
    while wanted not in (text := log.read_text()):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
        if process.returncode is not None or time.monotonic() > limit_s:
            pytest.fail(f"{wanted!r} is not in the log (exit status {process.returncode}):\n{text}")
    return text


@contextlib.contextmanager
def running_server(
    folder: Path, models: Sequence[str], inside: Callable[[list[str]], list[str]] = list
) -> Iterator[LiveServer]:
    """A server of `folder`'s store and config.properties, once these models (`name:version`) are ready.

    `inside` makes a command into one that runs it elsewhere, under its own process id.
    """
    command = [
        *(sys.executable, "-m", "torchere.serving", "serve", "--ncs", "--disable-token-auth"),
        *("--model-store", "store", "--models", "all", "--ts-config", "config.properties"),
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            inside(command), cwd=folder, stdout=log, stderr=subprocess.STDOUT, text=True
        )
    try:
        for model in models:
            _follow(process, folder / "log", f"{model} is ready")
        text = _follow(process, folder / "log", "Model server started.")
        address = dict(re.findall(r"(\w+) API: http://([\d.:]+)", text))
        yield LiveServer(address["Inference"], address["Metrics"], process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


class Prometheus:
    """A Prometheus that scrapes a server every second, as the job `torchere`."""

    def __init__(self, port: int, targets: Path) -> None:
        self._port = port
        self._targets = targets

    def scrape_only(self, *targets: str) -> None:
        """Scrape these addresses from now on."""
        part = self._targets.with_suffix(".part")
        part.write_text(json.dumps([{"targets": targets}]))
        part.replace(self._targets)

    def query(self, expression: str) -> list[Any]:
        """The result of an instant query, empty while it is starting."""
        encoded = urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self._port}/api/v1/query?{encoded}", timeout=10
            ) as answer:
                return list(json.loads(answer.read())["data"]["result"])
        except urllib.error.URLError:
            return []


@contextlib.contextmanager
def running_prometheus(
    program: str, folder: Path, server: LiveServer, rules: str = ""
) -> Iterator[Prometheus]:
    """A Prometheus with its data in `folder`; `rules` are those of a rules file, evaluated every second."""
    targets = folder / "targets.json"
    job = {"job_name": "torchere", "file_sd_configs": [{"files": [targets.name], "refresh_interval": "1s"}]}
    config = {"global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "scrape_configs": [job]}
    (folder / "p.yml").write_text(yaml.safe_dump(config | {"rule_files": ["rules.yml"] if rules else []}))
    (folder / "rules.yml").write_text(rules)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    prometheus = Prometheus(port, targets)
    prometheus.scrape_only(server.metrics)
    listen = f"--web.listen-address=127.0.0.1:{port}"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [program, "--config.file=p.yml", "--storage.tsdb.path=data", listen],
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield prometheus
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="session")
def start_server() -> Callable[..., AbstractContextManager[LiveServer]]:
    """Starts a server: see `running_server`."""
    return running_server


@pytest.fixture(scope="session")
def start_prometheus() -> Callable[..., AbstractContextManager[Prometheus]]:
    """Starts a Prometheus: see `running_prometheus`."""
    return running_prometheus


@pytest.fixture(scope="session")
def live_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server that runs as long as the tests, and answered three predictions."""
    folder = tmp_path_factory.mktemp("live")
    (folder / "store").mkdir()
    with zipfile.ZipFile(folder / "store/echo.mar", "w") as archive:
        archive.writestr("h.py", HANDLER)
        archive.writestr("weights.bin", b"none")
        model = {
            "modelName": "echo",
            "modelVersion": "1.0",
            "handler": "h.py",
            "serializedFile": "weights.bin",
        }
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}))
    (folder / "config.properties").write_text(PROPERTIES)
    write_certificate(folder)
    with running_server(folder, ["echo:1.0"]) as server:
        for _ in range(3):
            server.predict()
        yield server
