"""The server under a soak: its models, a temporary folder of its own, and what is wrong with its end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import requests
import torch
from harness.processes import free_ports

from torchere.archiver.signature import ANY, SIGNATURE_NAME, Signature, TensorSpec

START_S = 120.0
STOP_S = 90.0
WORKERS = 2
FEATURES = 64
# Answers, streams, fails and works on some memory, as the body says.
HANDLER = """
import torch
from ts.handler_utils.utils import send_intermediate_predict_response


class Handler:
    def initialize(self, context):
        self.model = torch.jit.load(context.system_properties["model_dir"] + "/linear.pt")

    def handle(self, data, context):
        bodies = [bytes(row["body"]).decode() for row in data]
        with torch.inference_mode():
            self.model(torch.rand(64, 64))
        if bodies[0].startswith("stream"):
            for part in ["..."] * 3:
                send_intermediate_predict_response([part] * len(data), context.request_ids, "", 200, context)
        if bodies[0].startswith("fail"):
            raise ValueError(bodies[0])
        return bodies
"""


@dataclass(frozen=True, slots=True)
class Plant:
    """A running server."""

    process: subprocess.Popen[bytes]
    inference: str
    management: str
    metrics: str
    temp: Path
    log: Path

    def workers(self) -> list[int]:
        """The process ids of the workers of the model with processes."""
        answer = requests.get(f"{self.management}/models/processes", timeout=60)
        return [worker["pid"] for worker in answer.json()[0]["workers"]]

    def ledger(self) -> tuple[int, int]:
        """After the end: how many predictions it accepted, and how many it answered."""
        found = re.findall(r"(\d+) predictions accepted, (\d+) answered", self.log.read_text())
        return (int(found[-1][0]), int(found[-1][1])) if found else (-1, -1)


@contextmanager
def served(folder: Path) -> Iterator[Plant]:
    """A server over fresh archives on free loopback ports; stopped in good order at the end."""
    for name in ("store", "temp"):
        (folder / name).mkdir()
    _pack_all(folder / "store")
    ports = free_ports(5)
    (folder / "config.properties").write_text(
        f"inference_address=http://127.0.0.1:{ports[0]}\nmanagement_address=http://127.0.0.1:{ports[1]}\n"
        f"metrics_address=http://127.0.0.1:{ports[2]}\ngrpc_inference_port={ports[3]}\n"
        f"grpc_management_port={ports[4]}\ndefault_workers_per_model={WORKERS}\n"
    )
    command = [sys.executable, "-m", "torchere.serving", "serve", "--ncs", "--disable-token-auth"]
    command += ["--enable-model-api", "--ts-config", "config.properties", "--model-store", "store"]
    command += ["--models", "processes.mar", "threads.mar", "tiny.mar"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TS_")}
    environment["TMPDIR"] = str(folder / "temp")
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT)
    urls = [f"http://127.0.0.1:{port}" for port in ports[:3]]
    plant = Plant(process, urls[0], urls[1], urls[2], folder / "temp", log)
    try:
        _wait_until_ready(plant)
        yield plant
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(plant: Plant) -> None:
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            if requests.get(f"{plant.inference}/readyz", timeout=10).ok:
                return
        except requests.ConnectionError:
            pass  # not listening yet
        if plant.process.poll() is not None or time.monotonic() > deadline_s:
            words = "\n".join(plant.log.read_text(errors="replace").splitlines()[-15:])
            raise RuntimeError(f"torchere serve was not ready within {START_S:g} s; its log:\n{words}")
        time.sleep(0.1)


def _pack_all(store: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated; archives in the field hold it
        linear, example = torch.nn.Linear(FEATURES, FEATURES).eval(), torch.zeros(1, FEATURES)
        model = torch.jit.trace(linear, example)
        model.save(str(store / "linear.pt"))
    weights = (store / "linear.pt").read_bytes()
    (store / "linear.pt").unlink()
    files = {"handler.py": HANDLER.encode(), "linear.pt": weights}
    for name, isolation in (("processes", "process"), ("threads", "thread"), ("comes_and_goes", "process")):
        _pack(store, name, "handler.py", {**files, "config.yaml": f"isolation: {isolation}\n".encode()})
    rows = (ANY, FEATURES)
    signature = Signature((TensorSpec("x", "FP32", rows),), (TensorSpec("y", "FP32", rows),))
    files = {"linear.pt": weights, SIGNATURE_NAME: signature.to_json().encode(), "config.yaml": b"{}\n"}
    _pack(store, "tiny", "tensor", files)


def _pack(store: Path, name: str, handler: str, files: dict[str, bytes]) -> None:
    described = {"modelName": name, "modelVersion": "1.0", "handler": handler}
    described |= {"serializedFile": "linear.pt", "configFile": "config.yaml"}
    with zipfile.ZipFile(store / f"{name}.mar", "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": described}))
