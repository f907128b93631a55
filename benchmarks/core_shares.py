"""Ten busy models in a control group with a limit of CPU time: the server's defaults beside a grid.

    python benchmarks/core_shares.py [--cpus 2] [--models 10] [--rounds 3] [--seconds 5]

Each model computes a network for some milliseconds and has two clients that send without a pause. Each
point of the grid is a number of executors of each model, and of intra-op threads that the handler sets; the
defaults choose both, and run once more with `pin_cores=true`, where the machine has more cores than the
limit is worth. The points have their turns in an order that changes with each round. Printed are medians
over the rounds: answers a second of wall time, which depends on what else runs on the machine, answers a
second of processor time of the server with its workers, and the share of the group's periods in which the
limit stopped a process. The group is made by root, and the server sees it as its own, as in a container; it
has the weight of as many processes as there are models. Exit status 1: the defaults reach less than `GOAL`
of the best point, or are stopped in more than `MOST_THROTTLED` of the periods; 2: no group can be made.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from harness.cgroup import CpuGroup, cpu_group
from harness.cpu_time import tree_cpu_s
from harness.errors import Failed, Unavailable
from harness.processes import end, free_ports, sigterm_exits

from torchere.serving.commands.load_client import Client, Target, request_bytes

GOAL = 0.95
MOST_THROTTLED = 0.01
CLIENTS = 2  # of each model
_START_S = 180.0
_WARM_S = 2.0
# `THREADS` is 0 for the server's own choice.
_HANDLER = """
import torch

THREADS = {threads}
torch.manual_seed(0)
NET = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(12))).eval()

def handle(data, context):
    if data is None:
        return None
    if THREADS and torch.get_num_threads() != THREADS:
        torch.set_num_threads(THREADS)
    with torch.inference_mode():
        NET(torch.ones(32, 512))
    return ["ok"] * len(data)
"""


class Point(NamedTuple):
    """What is set; 0: the server's default."""

    executors: int = 0
    threads: int = 0
    is_pinned: bool = False

    @property
    def name(self) -> str:
        """The name in the table."""
        if not self.executors:
            return "defaults and `pin_cores=true`" if self.is_pinned else "defaults"
        return f"executors of a model: {self.executors}, threads of each: {self.threads}"


class Figures(NamedTuple):
    """The measurements of one point of the grid."""

    per_s: float
    per_cpu_s: float
    throttled: float
    cpus: float  # used, on average


@contextmanager
def served(point: Point, models: int, group: CpuGroup, folder: Path) -> Iterator[tuple[int, int]]:
    """Run a server in the group; yield its process id and its port once all models are ready.

    Raises:
        Failed: the server ended, or it takes too long.
    """
    (folder / "store").mkdir()
    for number in range(models):
        with zipfile.ZipFile(folder / "store" / f"net{number}.mar", "w") as archive:
            archive.writestr("handler.py", _HANDLER.format(threads=point.threads))
            model = {"modelName": f"net{number}", "modelVersion": "1.0", "handler": "handler.py:handle"}
            archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}))
    (port,) = free_ports(1)
    executors = f"default_workers_per_model={point.executors}\n" if point.executors else ""
    (folder / "config.properties").write_text(
        f"inference_address=http://127.0.0.1:{port}\nmanagement_address=http://127.0.0.1:0\n"
        f"metrics_address=http://127.0.0.1:0\ngrpc_inference_port=0\ngrpc_management_port=0\n"
        f"model_store=store\nload_models=all\ndisable_token_authorization=true\n{executors}"
        f"pin_cores={str(point.is_pinned).lower()}\n"
    )
    command = [sys.executable, "-m", "torchere.serving", "serve", "--ncs", "--log-level", "WARNING"]
    command = group.command([*command, "--ts-config", "config.properties"])
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
    try:
        with sigterm_exits():
            _until_ready(port, process, folder / "log")
            yield process.pid, port
    finally:
        end(process)


def _until_ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    give_up_s = time.monotonic() + _START_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=30):
                return
        except OSError as err:
            if process.poll() is not None or time.monotonic() > give_up_s:
                words = log.read_text(errors="replace")[-1500:]
                raise Failed(f"the server does not get ready: {err}: {words}") from err
            time.sleep(0.2)


async def load(port: int, models: int, seconds: float) -> int:
    """Send for so long; return the number of answers."""
    stop_s = time.monotonic() + seconds

    async def one_client(number: int) -> int:
        target = Target.parse(f"http://127.0.0.1:{port}/predictions/net{number}")
        request = request_bytes(target, b"x", {"Content-Type": "application/octet-stream"})
        client, count = Client(target), 0
        while time.monotonic() < stop_s:
            reply = await client.send(request)
            if reply.status != 200:
                raise Failed(f"status {reply.status}: {reply.body[:200]!r}")
            count += 1
        return count

    return sum(await asyncio.gather(*(one_client(each % models) for each in range(CLIENTS * models))))


def measure(point: Point, options: argparse.Namespace, group: CpuGroup) -> Figures:
    """One turn of a point, on a server of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="torchere-shares-") as folder,
        served(point, options.models, group, Path(folder)) as (pid, port),
    ):
        asyncio.run(load(port, options.models, _WARM_S))
        before, cpu_s, began_s = group.cpu_time(), tree_cpu_s(pid), time.monotonic()
        answers = asyncio.run(load(port, options.models, options.seconds))
        after, used_s, took_s = group.cpu_time(), tree_cpu_s(pid) - cpu_s, time.monotonic() - began_s
    periods = after.periods - before.periods
    throttled = (after.throttled - before.throttled) / periods if periods else 0.0
    return Figures(answers / took_s, answers / used_s, throttled, used_s / took_s)


def median(found: Sequence[Figures]) -> Figures:
    """The median of each figure."""
    return Figures(*(statistics.median(values) for values in zip(*found, strict=True)))


def verdict(medians: dict[Point, Figures]) -> tuple[float, float, bool]:
    """Return the defaults' answers over the best point's, a second and a processor second; if they are good.

    Where other programs share the cores, the second figure is the one that can be compared.
    """
    ours = medians[Point()]
    grid = [figures for point, figures in medians.items() if point.executors]
    by_wall = ours.per_s / max(each.per_s for each in grid)
    by_cpu = ours.per_cpu_s / max(each.per_cpu_s for each in grid)
    return by_wall, by_cpu, max(by_wall, by_cpu) >= GOAL and ours.throttled <= MOST_THROTTLED


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and compare with the goals."""
    parser = argparse.ArgumentParser(description="Busy models in a control group: defaults beside a grid.")
    parser.add_argument("--cpus", type=float, default=2.0, help="limit of the group (default: 2)")
    parser.add_argument("--models", type=int, default=10, help="(default: 10)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each point (default: 3)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each turn (default: 5)")
    options = parser.parse_args(argv)
    points = [Point(), *(Point(executors, threads) for executors in (1, 2) for threads in (1, 2))]
    if math.ceil(options.cpus) < len(os.sched_getaffinity(0)):
        points.append(Point(is_pinned=True))
    found: dict[Point, list[Figures]] = {point: [] for point in points}
    try:
        for number in range(options.rounds):
            first = number % len(points)
            for point in points[first:] + points[:first]:
                with cpu_group(options.cpus) as group:
                    group.weigh(options.models)
                    found[point].append(measure(point, options, group))
    except Unavailable as reason:
        print(f"not measured: {reason}")
        return 2
    medians = {point: median(figures) for point, figures in found.items()}
    print(f"{options.models} models, {CLIENTS} clients each, limit of {options.cpus:g} CPUs")
    print("| set | answers a second | answers a processor second | CPUs used | throttled periods |")
    print("| --- | --- | --- | --- | --- |")
    for point, each in medians.items():
        figures = f"{each.per_s:.0f} | {each.per_cpu_s:.0f} | {each.cpus:.2f} | {each.throttled:.1%}"
        print(f"| {point.name} | {figures} |")
    by_wall, by_cpu, good = verdict(medians)
    print(f"defaults over the best point: {by_wall:.2f} by wall time, {by_cpu:.2f} by processor time")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
