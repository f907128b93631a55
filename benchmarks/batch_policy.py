"""What a server answers by the scheduling policy of its workers: why ranks do not preempt, and others may.

    python benchmarks/batch_policy.py [--pairs 7] [--seconds 2] [--rows "tiny MLP,two ranks"] [--busy]

Each model is served once. In turns all threads of its workers get SCHED_OTHER, the kernel's default, and
SCHED_BATCH, with which a thread that wakes does not preempt the one that runs. Printed are the medians of
both, and of the ratios of each pair with their 90 % interval. `--busy` keeps one core busy by a process with
the default policy meanwhile, as another container does. Needs wrk.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import psutil
from harness import servers
from harness.load import Load, http_load
from harness.machine import facts
from harness.models import ENVELOPE, Workshop, instances_body, plain_body
from harness.pairs import interval, ratios
from harness.processes import Endpoint, Probe, until_answered
from harness.report import aligned
from ranks import served, words
from waiting_threads import busy_core

POLICIES = {"other": os.SCHED_OTHER, "batch": os.SCHED_BATCH}
_TYPE = "application/json"


@dataclass(frozen=True, slots=True)
class Case:
    """A served model, a request to it, and how many clients ask."""

    serve: Callable[[Workshop], AbstractContextManager[Endpoint]]
    path: str
    body: bytes
    clients: tuple[int, ...]


def _of(archive: str, body: bytes, executors: int, *clients: int, properties: str = "") -> Case:
    path = f"/predictions/{archive}"
    return Case(lambda shop: servers.torchere(shop, archive, executors, properties), path, body, clients)


CASES = {
    "tiny MLP": _of("tiny", instances_body(), 2, 1, 32, 128, properties=ENVELOPE),
    "custom handler": _of("custom", plain_body(), 2, 1, 32),
    "two lanes": _of("forward", b"{}", 2, 1, 4),
    "two ranks": Case(lambda shop: served(shop, "tensor", "big"), "/predictions/big", words(0), (1, 2)),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rows", default=",".join(CASES))
    parser.add_argument("--busy", action="store_true", help="beside a process that computes all the time")
    asked = parser.parse_args(argv)
    machine = facts()
    beside = ", one of them busy" if asked.busy else ""
    print(f"{machine.cpu}, {machine.cores} cores{beside}; {asked.pairs} pairs of {asked.seconds:g} s")
    head = ["", "clients", "other /s", "batch /s", "ratio (90 %)", "p50 ms, other, batch", "p99 ms"]
    table = [head]
    with tempfile.TemporaryDirectory(prefix="torchere-policy-") as folder:
        shop = Workshop(Path(folder))
        for name in asked.rows.split(","):
            with CASES[name].serve(shop) as endpoint:
                until_answered(endpoint, Probe(CASES[name].path, CASES[name].body, b""))
                with busy_core() if asked.busy else nullcontext():
                    for clients in CASES[name].clients:
                        table.append([name, str(clients), *_cells(CASES[name], endpoint, clients, asked)])
                        print("  ".join(table[-1]), flush=True)
    print(f"\n{aligned(table)}")
    return 0


def _cells(case: Case, endpoint: Endpoint, clients: int, asked: argparse.Namespace) -> list[str]:
    loads: dict[str, list[Load]] = {name: [] for name in POLICIES}
    url = f"{endpoint.url}{case.path}"
    http_load(url, case.body, clients, asked.seconds, _TYPE)
    for number in range(asked.pairs):
        for name in POLICIES if number % 2 else reversed(POLICIES):
            _schedule(endpoint, POLICIES[name])
            loads[name].append(http_load(url, case.body, clients, asked.seconds, _TYPE))
    rates = {name: [load.per_second for load in each] for name, each in loads.items()}
    found = interval(ratios(rates["batch"], rates["other"]))
    shown = [
        ", ".join(
            f"{statistics.median(load.latency_ms[at] for load in loads[name]):.3g}" for name in POLICIES
        )
        for at in ("50", "99")
    ]
    return [
        *(f"{statistics.median(rates[name]):,.4g}" for name in POLICIES),
        f"{found.median:.3f} ({found.low:.3f}-{found.high:.3f})",
        *shown,
    ]


def _schedule(endpoint: Endpoint, policy: int) -> None:
    """Give a policy to all threads of the server's child processes."""
    for process in psutil.Process(endpoint.process.pid).children(recursive=True):
        for thread in process.threads():
            os.sched_setscheduler(thread.id, policy, os.sched_param(0))


if __name__ == "__main__":
    sys.exit(main())
