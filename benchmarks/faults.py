"""What a model that breaks its worker again and again costs everybody else.

    python benchmarks/faults.py [--seconds 5] [--faults spin,segfault] [--isolation process]

One server has a tiny MLP with 8 clients, and a model whose requests break its worker in one way after the
other (`handlers/faults.py`), from two clients. All the time a control request (the list of models) is asked
every 10 ms. For each fault and each kind of isolation: how often it happened, the MLP's requests a second and
p99 as ratios to those of the phases without a fault before and after, and the latency of control requests.
Every request of the MLP must be answered with 200. Exit status 1: one was not, or the p99 of the control
requests is above its goal. A fault that spins takes a core of the machine, with any server.
"""

from __future__ import annotations

import argparse
import http.client
import json
import resource
import runpy
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType

from harness import servers
from harness.arguments import whole_seconds
from harness.errors import Failed
from harness.load import Load, http_load
from harness.models import ENVELOPE, Workshop, instances_body
from harness.processes import Endpoint, Probe, ask, until_answered
from harness.report import aligned

GOAL_MS = 50.0  # p99 of the control requests
CLIENTS = 8
BREAKERS = 2
EVERY_S = 0.01
KINDS = ("process", "thread")
HANDLER = Path(__file__).parent / "handlers" / "faults.py"
FAULTS = tuple(
    name
    for name, found in runpy.run_path(str(HANDLER)).items()
    if isinstance(found, FunctionType) and not name.startswith("_")
)
NONE = ""
READY = "ready"  # a request that breaks nothing
CONFIG = "batchSize: 1\nresponseTimeout: 1\nisolation: {kind}\nminWorkers: 2\nmaxWorkers: 2\n"
PROBE = Probe("/predictions/tiny", instances_body(), b'"predictions"')
HEAD = ("isolation", "fault", "times", "MLP a second", "MLP p99", "control p50", "p99", "most, ms", "")


def told(model: str, fault: str) -> Probe:
    """The request that makes the model break in this way."""
    return Probe(f"/predictions/{model}", json.dumps({"instances": [fault]}).encode(), fault.encode())


@dataclass(frozen=True, slots=True)
class Phase:
    """The figures of one phase; latencies in milliseconds, in order."""

    load: Load
    control_ms: list[float]
    faults: int

    def quantile(self, share: float) -> float:
        """A quantile of the control requests."""
        return self.control_ms[min(len(self.control_ms) - 1, int(share * len(self.control_ms)))]


def control(endpoint: Endpoint, over: threading.Event, found_ms: list[float]) -> None:
    """Ask for the list of models until `over`, in a connection that stays."""
    connection = http.client.HTTPConnection(endpoint.management.removeprefix("http://"), timeout=60)
    while not over.wait(EVERY_S):
        began_s = time.perf_counter()
        connection.request("GET", "/models")
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise Failed(f"the list of models was answered with {answer.status}")
        found_ms.append((time.perf_counter() - began_s) * 1000)
    connection.close()


def breaking(endpoint: Endpoint, model: str, fault: str, over: threading.Event, times: list[int]) -> None:
    """Send the request that breaks, again and again, until `over`; note the status of each that did."""
    probe = told(model, fault)
    while not over.is_set():
        status, _ = ask(endpoint.url, probe)
        if status in (500, 504, 507):
            times.append(status)
        else:  # its worker has not come back yet
            over.wait(EVERY_S)


def phase(endpoint: Endpoint, model: str, fault: str, seconds: float) -> Phase:
    """Load the MLP beside a fault; `NONE`: beside none."""
    over = threading.Event()
    found_ms: list[float] = []
    times: list[int] = []
    threads = [threading.Thread(target=control, args=(endpoint, over, found_ms))]
    if fault != NONE:
        arguments = (endpoint, model, fault, over, times)
        threads += [threading.Thread(target=breaking, args=arguments) for _ in range(BREAKERS)]
    for thread in threads:
        thread.start()
    try:
        load = http_load(f"{endpoint.url}{PROBE.path}", PROBE.body, CLIENTS, seconds)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    if not found_ms:
        raise Failed("no control request was answered")
    return Phase(load, sorted(found_ms), len(times))


def row(kind: str, fault: str, found: Phase, without: Sequence[Phase]) -> tuple[str, ...]:
    """A row of the table, with the verdict at its end."""
    rate = sum(each.load.per_second for each in without) / len(without)
    p99_ms = sum(each.load.latency_ms["99"] for each in without) / len(without)
    return (
        kind,
        fault or "none",
        str(found.faults),
        f"{found.load.per_second / rate:.2f}",
        f"{found.load.latency_ms['99'] / p99_ms:.2f}",
        *(f"{found.quantile(share):.1f}" for share in (0.5, 0.99, 1.0)),
        "" if found.quantile(0.99) <= GOAL_MS else "MISSED",
    )


def measured(kinds: Sequence[str], faults: Sequence[str], seconds: float) -> list[tuple[str, ...]]:
    """All rows; a new server for each kind of isolation."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        shop = Workshop(Path(folder))
        for kind in kinds:
            broken = f"broken_{kind}"
            files = {"tiny": shop.archive("tiny")}
            files[broken] = shop.pack(broken, None, CONFIG.format(kind=kind), handler=str(HANDLER))
            with servers.torchere_with(shop, files, 1, ENVELOPE) as endpoint:
                until_answered(endpoint, PROBE)
                healthy = told(broken, READY)
                phase(endpoint, broken, NONE, seconds)  # warm-up
                before = phase(endpoint, broken, NONE, seconds)
                for fault in faults:
                    until_answered(endpoint, healthy)
                    found = phase(endpoint, broken, fault, seconds)
                    until_answered(endpoint, healthy)
                    after = phase(endpoint, broken, NONE, seconds)
                    rows.append(row(kind, fault, found, (before, after)))
                    print(aligned([rows[-1]]), flush=True)
                    before = after
                rows.append(row(kind, NONE, before, (before,)))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and compare with the goal."""
    parser = argparse.ArgumentParser(description="Faults of one model beside the requests of another.")
    parser.add_argument("--seconds", type=whole_seconds, default=5, help="of each phase (default: 5)")
    parser.add_argument("--faults", default=",".join(FAULTS), help="some of them, with commas")
    parser.add_argument("--isolation", choices=KINDS, help="one kind (default: both)")
    asked = parser.parse_args(argv)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file takes the disk for seconds
    kinds = (asked.isolation,) if asked.isolation else KINDS
    rows = measured(kinds, asked.faults.split(","), asked.seconds)
    print(aligned([HEAD, *rows]))
    print(f"goal: p99 of the control requests at most {GOAL_MS:g} ms")
    return any(row[-1] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
