"""Memory of `torchere serve` for one large model: with one executor, with eight, and in two versions.

    python benchmarks/memory.py [--size-mb 400] [--executors 8] [--isolation thread] [--json FILE]

A TorchScript model of linear layers is made and packed for `base_handler`, once with threads as executors and
once with processes. For each number of executors a server is started, every executor is kept busy with
predictions, and the PSS of the whole process tree is summed from /proc/PID/smaps_rollup: PSS counts a page
that several processes share once. A third server has the archive twice, under two names, with one executor
each. Exit status 1 when one of the larger servers takes more than `GOALS` times the smallest one's memory.
Linux only; needs about four times the model's size on disk and three times in memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import requests
import torch

GOALS = {"thread": 1.15, "process": 1.5}  # memory over that of one version with one executor, by isolation
MODEL = "wide"
TWIN = "twin"  # the same archive under another name
START_TIMEOUT_S = 180.0
_WIDTH = 2048  # one square float32 layer of this width has 16 MiB
_LAYER_MB = _WIDTH * _WIDTH * 4 / 1e6
_PREDICTIONS_PER_EXECUTOR = 12
_BIN = Path(sys.executable).parent


@dataclass(frozen=True, slots=True)
class Result:
    """One run. PSS in bytes, over the server's process tree."""

    isolation: str
    model_bytes: int
    executors: int
    pss_one: int
    pss_many: int
    pss_twins: int  # two versions with the same weights, one executor each

    @property
    def ratio(self) -> float:
        """Memory with many executors over memory with one."""
        return self.pss_many / self.pss_one

    @property
    def twins_ratio(self) -> float:
        """Memory of two versions over memory of one."""
        return self.pss_twins / self.pss_one

    @property
    def reached(self) -> bool:
        """Whether both are within the goal."""
        return max(self.ratio, self.twins_ratio) <= GOALS[self.isolation]


class ServerFailed(Exception):
    """The server ended, or was not ready in time."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server and where it listens."""

    process: subprocess.Popen[bytes]
    inference: str
    management: str
    log: Path


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and compare with the goal."""
    parser = argparse.ArgumentParser(
        description="Memory of one large model with one and with many executors."
    )
    parser.add_argument("--size-mb", type=float, default=400.0, help="size of the model (default: 400)")
    parser.add_argument("--executors", type=int, default=8, help="the larger number (default: 8)")
    parser.add_argument("--isolation", choices=tuple(GOALS), help="measure this one only (default: both)")
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args(argv)
    results = []
    for isolation in (options.isolation,) if options.isolation else GOALS:
        try:
            result = compare(isolation, options.size_mb, options.executors)
        except ServerFailed as error:
            print(error, file=sys.stderr)
            return 1
        show(result)
        results.append(result)
    if options.json:
        records = [{**asdict(each), "ratio": each.ratio, "twins_ratio": each.twins_ratio} for each in results]
        options.json.write_text(json.dumps(records, indent=2))
    return 0 if all(result.reached for result in results) else 1


def compare(isolation: str, size_mb: float, executors: int) -> Result:
    """Measure one executor, many, and two versions."""
    with tempfile.TemporaryDirectory(prefix="torchere-memory-") as folder:
        archive = make_archive(Path(folder), size_mb, isolation)
        one, many = (measure(Path(folder), count) for count in (1, executors))
        os.link(archive, archive.with_name(f"{TWIN}.mar"))
        twins = measure(Path(folder), 1, (MODEL, TWIN))
        return Result(isolation, archive.stat().st_size, executors, one, many, twins)


def show(result: Result) -> None:
    """Print one result."""
    goal = GOALS[result.isolation]
    print(f"executors            {result.isolation:>8}")
    print(f"model                {result.model_bytes / 1e6:8.0f} MB")
    print(f"PSS, 1 executor      {result.pss_one / 1e6:8.0f} MB")
    print(f"PSS, {result.executors} executors     {result.pss_many / 1e6:8.0f} MB")
    print(f"ratio                {result.ratio:8.2f}      goal: at most {goal}")
    print(f"PSS, 2 versions      {result.pss_twins / 1e6:8.0f} MB")
    print(f"ratio                {result.twins_ratio:8.2f}      goal: at most {goal}", flush=True)


def make_archive(folder: Path, size_mb: float, isolation: str) -> Path:
    """Pack a TorchScript model of about `size_mb` of weights into `folder`/store."""
    layers = [torch.nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(max(1, round(size_mb / _LAYER_MB)))]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch.jit is deprecated; archives in the field hold it
        module = torch.jit.trace(torch.nn.Sequential(*layers).eval(), torch.zeros(1, _WIDTH))  # type: ignore[no-untyped-call]
        torch.jit.freeze(module).save(str(folder / f"{MODEL}.pt"))
    (folder / "model-config.yaml").write_text(f"deviceType: cpu\nisolation: {isolation}\n")
    (folder / "store").mkdir()
    command = [str(_BIN / "torch-model-archiver"), "--model-name", MODEL, "--version", "1.0"]
    command += ["--handler", "base_handler", "--serialized-file", str(folder / f"{MODEL}.pt")]
    command += ["--config-file", str(folder / "model-config.yaml"), "--export-path", str(folder / "store")]
    subprocess.run(command, check=True)
    (folder / f"{MODEL}.pt").unlink()
    return folder / "store" / f"{MODEL}.mar"


def measure(folder: Path, executors: int, models: Sequence[str] = (MODEL,)) -> int:
    """PSS in bytes of a fresh server with that many executors for each model, after all have been busy."""
    with served(folder, executors, models) as server:
        for model in models:
            wait_until_ready(server, model, executors)
        body = {"instances": [[0.5] * _WIDTH]}

        def predict(number: int) -> None:
            url = f"{server.inference}/predictions/{models[number % len(models)]}"
            requests.post(url, json=body, timeout=120).raise_for_status()

        for number in range(len(models)):
            predict(number)
        wait_until_unpacked(server)  # what is moved out of an archive counts when it is read again
        # Twice as many at a time as there are executors, so that none is ever without work.
        with ThreadPoolExecutor(2 * executors) as clients:
            list(clients.map(predict, range(_PREDICTIONS_PER_EXECUTOR * executors * len(models))))
        return tree_pss(server.process.pid)


def tree_pss(pid: int) -> int:
    """PSS in bytes of a process and all its descendants."""
    root = psutil.Process(pid)
    return sum(_pss(process.pid) for process in (root, *root.children(recursive=True)))


def _pss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024  # the kernel's kB are KiB
    raise ValueError(f"/proc/{pid}/smaps_rollup has no line Pss:; expected Linux 4.14 or later")


@contextlib.contextmanager
def served(folder: Path, executors: int, models: Sequence[str]) -> Iterator[Server]:
    """A server over `folder`/store on free loopback ports; ended when the block ends."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(5)]
        ports = [one.getsockname()[1] for one in sockets]
    config, log = folder / "config.properties", folder / f"server-{executors}.log"
    config.write_text(_properties(ports, executors))
    command = [str(_BIN / "torchere"), "serve", "--ncs", "--disable-token-auth", "--ts-config", str(config)]
    command += ["--model-store", str(folder / "store"), "--models"]
    command += [f"{model}={model}.mar" for model in models]
    # TS_... would win over the file.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TS_")}
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield Server(process, f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}", log)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _properties(ports: Sequence[int], executors: int) -> str:
    return (
        f"inference_address=http://127.0.0.1:{ports[0]}\n"
        f"management_address=http://127.0.0.1:{ports[1]}\n"
        f"metrics_address=http://127.0.0.1:{ports[2]}\n"
        f"grpc_inference_port={ports[3]}\n"
        f"grpc_management_port={ports[4]}\n"
        f"default_workers_per_model={executors}\n"
        "service_envelope=json\n"
    )


def wait_until_ready(server: Server, model: str, executors: int) -> None:
    """Block until that many executors of the model are READY.

    Raises:
        ServerFailed: the server ended, or it took longer than `START_TIMEOUT_S`.
    """
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while _ready_executors(server, model) < executors:
        ended = server.process.poll()
        if ended is not None or time.monotonic() > deadline_s:
            found = "it still runs" if ended is None else f"it ended with exit status {ended}"
            words = "\n".join(server.log.read_text(errors="replace").splitlines()[-15:])
            raise ServerFailed(
                f"torchere serve has no {executors} READY executors, {found}; its log:\n{words}"
            )
        time.sleep(0.2)


def wait_until_unpacked(server: Server) -> None:
    """Block until the server has let go of its archives: large weights stay in them for a moment.

    Raises:
        ServerFailed: it took longer than `START_TIMEOUT_S`.
    """
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while ".mar" in Path(f"/proc/{server.process.pid}/maps").read_text():
        if time.monotonic() > deadline_s:
            raise ServerFailed("torchere serve still has the pages of an archive in its memory")
        time.sleep(0.2)


def _ready_executors(server: Server, model: str) -> int:
    try:
        answer = requests.get(f"{server.management}/models/{model}", timeout=10)
    except requests.ConnectionError:
        return 0  # not listening yet
    return sum(worker["status"] == "READY" for worker in answer.json()[0]["workers"]) if answer.ok else 0


if __name__ == "__main__":
    sys.exit(main())
