"""What `worker_sandbox` costs, level by level in turns: the start of a worker, the latency of a tiny model.

    python benchmarks/sandbox.py

A server of each level is up all the time, and they have their turns one after the other: the worker of the
model is stopped and started again, then requests go over one connection. A worker is forked, or a fresh
interpreter for a model with an environment of its own. Run it as another user than root, or with
`--worker-user`, which `strict` then needs.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from harness.processes import sigterm_exits

LEVELS = ("off", "basic", "strict")
HANDLER = """
import torch

class Handler:
    def initialize(self, context):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))

    def handle(self, data, context):
        rows = torch.tensor([row["body"] for row in data])
        with torch.no_grad():
            return self.model(rows).tolist()
"""
PROPERTIES = """
inference_address=http://127.0.0.1:0
management_address=http://127.0.0.1:0
enable_metrics_api=false
grpc_inference_port=0
grpc_management_port=0
enable_model_api=true
disable_token_authorization=true
"""
BODY = json.dumps([0.5] * 64).encode()


@dataclass
class Subject:
    """A server at one level, and its samples in milliseconds."""

    level: str
    inference: str
    management: str
    forked_ms: list[float] = field(default_factory=list)
    executed_ms: list[float] = field(default_factory=list)
    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)

    def manage(self, method: str, path: str) -> None:
        """Call the management API."""
        request = urllib.request.Request(f"http://{self.management}{path}", method=method)
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()

    def start_worker(self, model: str) -> float:
        """Stop the only worker of a model; return the milliseconds until the next one serves."""
        self.manage("PUT", f"/models/{model}?min_worker=0&max_worker=0&synchronous=true")
        begun = time.perf_counter()
        self.manage("PUT", f"/models/{model}?min_worker=1&max_worker=1&synchronous=true")
        return (time.perf_counter() - begun) * 1000

    def call(self, requests: int) -> None:
        """Send requests over one connection, and keep their median and 99th percentile."""
        connection = http.client.HTTPConnection(self.inference)
        taken = []
        for _ in range(requests):
            begun = time.perf_counter()
            connection.request("POST", "/predictions/tiny", BODY, {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            taken.append((time.perf_counter() - begun) * 1000)
            if answer.status != 200:
                sys.exit(f"{self.level}: status {answer.status}")
        connection.close()
        self.p50_ms.append(statistics.median(taken))
        self.p99_ms.append(statistics.quantiles(taken, n=100)[98])


def pack(store: Path, name: str, config: str = "") -> None:
    """Write the archive of the tiny model."""
    model = {"modelName": name, "modelVersion": "1.0", "handler": "handler.py"}
    with zipfile.ZipFile(store / f"{name}.mar", "w") as archive:
        archive.writestr("handler.py", HANDLER)
        if config:
            archive.writestr("model-config.yaml", config)
            model["configFile"] = "model-config.yaml"
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}))


@contextmanager
def served(folder: Path, level: str, user: str | None) -> Iterator[Subject]:
    """Run a server of one level with both models."""
    own_user = f"worker_user={user}\n" if user and level != "off" else ""
    properties = folder / f"{level}.properties"
    properties.write_text(f"{PROPERTIES}worker_sandbox={level}\n{own_user}")
    command = [sys.executable, "-m", "torchere.serving", "serve", "--ncs", "--log-format", "text"]
    command += ["--model-store", str(folder / "store"), "--ts-config", str(properties)]
    log = folder / f"{level}.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
    try:
        while "Model server started." not in log.read_text():
            if process.poll() is not None:
                sys.exit(f"{level}: the server ended:\n{log.read_text()}")
            time.sleep(0.05)
        found = dict(re.findall(r"(\w+) API: http://([\d.:]+)", log.read_text()))
        subject = Subject(level, found["Inference"], found["Management"])
        for name in ("tiny", "fresh"):
            subject.manage("POST", f"/models?url={name}.mar&initial_workers=1&synchronous=true")
        yield subject
    finally:
        process.terminate()
        process.wait()


def in_turns(subjects: Sequence[Subject], rounds: int, requests: int) -> None:
    """Measure each subject once a round; every round begins with another one."""
    for number in range(rounds):
        first = number % len(subjects)
        for subject in (*subjects[first:], *subjects[:first]):
            subject.forked_ms.append(subject.start_worker("tiny"))
            if number % 4 == 0:
                subject.executed_ms.append(subject.start_worker("fresh"))
            subject.call(requests // 10)  # warms the new worker up
            del subject.p50_ms[-1], subject.p99_ms[-1]
            subject.call(requests)
        print(f"round {number + 1} of {rounds}", file=sys.stderr)


def table(subjects: Sequence[Subject]) -> str:
    """Return the medians over the rounds, and the median ratio to `off` of the same round."""
    base = subjects[0]
    lines = ["| | " + " | ".join(subject.level for subject in subjects) + " |"]
    lines.append("| --- |" + " --- |" * len(subjects))
    figures = {
        "start of a forked worker, ms": "forked_ms",
        "start of a worker with its own environment, ms": "executed_ms",
        "latency, p50, ms": "p50_ms",
        "latency, p99, ms": "p99_ms",
    }
    for title, name in figures.items():
        cells = []
        for subject in subjects:
            own, others = getattr(subject, name), getattr(base, name)
            ratio = statistics.median(a / b for a, b in zip(own, others, strict=True))
            cells.append(f"{statistics.median(own):.3g}" + ("" if subject is base else f" ({ratio:.2f})"))
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--requests", type=int, default=1000, help="of a round, one after the other")
    parser.add_argument("--worker-user", help="for a server that is root's")
    options = parser.parse_args()
    with sigterm_exits(), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "store").mkdir()
        pack(folder / "store", "tiny")
        pack(folder / "store", "fresh", "useVenv: true\n")
        with (
            served(folder, "off", options.worker_user) as off,
            served(folder, "basic", options.worker_user) as basic,
            served(folder, "strict", options.worker_user) as strict,
        ):
            subjects = (off, basic, strict)
            in_turns(subjects, options.rounds, options.requests)
            print(table(subjects))


if __name__ == "__main__":
    main()
