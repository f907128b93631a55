"""Compares gRPC transports in front of a worker process: calls a second, and the front's processor time.

    python benchmarks/grpc_transport.py [--rounds 5] [--seconds 5] [--transports ours,grpc.aio] [--json FILE]

A front process with the transport sends requests of `ModelInfer` over a Unix socket to a worker process that
runs TorchScript in batches of up to 32. Transports take turns in each round, so that a machine that gets
slower does so for all. Needs h2load (Debian: `apt-get install nghttp2-client`) and torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
from harness.environments import need_tool
from harness.grpc_probe import until_called
from harness.load import h2load_result
from harness.processes import Endpoint, free_ports, serving
from transport.fronts import FRONTS, METHOD

from torchere.serving.frontend.grpc.protos.open_inference_pb2 import ModelInferRequest

ROOT = Path(__file__).parent
SKIPPED = {
    "grpclib": "not in the environment; a prototype of it was measured once",
    "Envoy through pyvoy": "not in the environment; a prototype of it was measured once",
    "Triton": "a server of its own, with its own model: see benchmarks/run.py",
}
WARM_UP_S = 2


class Row(NamedTuple):
    """A load."""

    name: str
    model: str
    shape: tuple[int, int]
    connections: int
    streams: int

    def message(self) -> bytes:
        """The request of all its calls."""
        request = ModelInferRequest(
            model_name=self.model, inputs=[{"name": "x", "datatype": "FP32", "shape": self.shape}]
        )
        request.raw_input_contents.append(bytes(4 * self.shape[0] * self.shape[1]))
        return request.SerializeToString()


ROWS = (
    Row("tiny MLP, 8 connections of 4 streams", "mlp", (4, 64), 8, 4),
    Row("1 MiB each way, 4 connections of 1 stream", "identity", (1, 262_144), 4, 1),
)


class Figures(NamedTuple):
    """Of one transport under one load."""

    per_second: float
    front_us: float  # processor time of the front process for a call


@contextlib.contextmanager
def _front(transport: str) -> Iterator[Endpoint]:
    """Run a front and its worker."""
    environment = {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (port,) = free_ports(1)
        path = str(folder / "worker.sock")
        (folder / "worker").mkdir()
        worker = [sys.executable, "-m", "transport.worker", path]
        front = [sys.executable, "-m", "transport.fronts", transport, str(port), path]
        with (
            serving(worker, folder / "worker", 0, environment=environment),
            serving(front, folder, port, grpc_port=port, environment=environment) as endpoint,
        ):
            yield endpoint


def _load(address: str, message: bytes, row: Row, seconds: int) -> float:
    """Return calls a second, by a client whose windows take whole messages, as grpcio's grow to do."""
    with tempfile.NamedTemporaryFile(suffix=".grpc") as file:
        file.write(b"\0" + len(message).to_bytes(4, "big") + message)
        file.flush()
        command = [need_tool("h2load", "nghttp2-client"), f"-c{row.connections}", f"-m{row.streams}"]
        command += [f"-D{seconds}", "-w24", "-W24", "-d", file.name, "-H", "te: trailers"]
        command += ["-H", "content-type: application/grpc", f"http://{address}{METHOD}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    return h2load_result(done.stdout).per_second


def _measure(transport: str, row: Row, seconds: int) -> Figures:
    message = row.message()
    with _front(transport) as endpoint:
        until_called(endpoint, METHOD, message, b"y")
        process = psutil.Process(endpoint.process.pid)

        _load(endpoint.grpc, message, row, WARM_UP_S)
        before = process.cpu_times()
        per_second = _load(endpoint.grpc, message, row, seconds)
        after = process.cpu_times()
    used_s = after.user + after.system - before.user - before.system
    return Figures(per_second, used_s / (per_second * seconds) * 1e6)


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--transports", default=",".join(FRONTS), help="separated by commas")
    parser.add_argument("--json", type=Path, help="write all figures there, too")
    asked = parser.parse_args()
    transports = asked.transports.split(",")
    found: dict[str, dict[str, list[Figures]]] = {
        row.name: {transport: [] for transport in transports} for row in ROWS
    }
    for _ in range(asked.rounds):
        for row in ROWS:
            for transport in transports:
                found[row.name][transport].append(_measure(transport, row, asked.seconds))
    for name, figures in found.items():
        print(f"\n{name}, median of {asked.rounds} rounds")
        print(f"{'transport':14}{'calls/s':>10}{'to the first':>14}{'front, us a call':>18}")
        first = figures[transports[0]]
        for transport, one in figures.items():
            ratio = statistics.median(a.per_second / b.per_second for a, b in zip(one, first, strict=True))
            per_second = statistics.median(figure.per_second for figure in one)
            front_us = statistics.median(figure.front_us for figure in one)
            print(f"{transport:14}{per_second:10,.0f}{ratio:14.2f}{front_us:18.0f}")
    for name, reason in SKIPPED.items():
        print(f"{name}: skipped, {reason}")
    if asked.json is not None:
        asked.json.write_text(json.dumps({"loads": found}, indent=2), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
