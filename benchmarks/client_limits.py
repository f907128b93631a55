"""What limits for each client cost a request: the tiny MLP with all of them on, and with none.

    python benchmarks/client_limits.py [--starts 11] [--pairs 6] [--seconds 2] [--old FOLDER_OR_COMMIT]

Servers with and without limits are up together and have 32 clients in turns, in an order that changes with
each pair; `--old` adds the server of another tree, which need not know the limits. The limits are too high to
refuse a request. All are started again after some pairs: two servers of the same tree differ by several per
cent for as long as they run. For each figure the median of the starts' ratios is printed with its interval
(order statistics), each the median of its pairs: requests a second, and the server's processor time for a
request. Then the same without sockets and workers, in this process: the door and the admission of a request,
and the queue. Exit status 1: the goal is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvloop
from doors import ANSWER, FLOATS, Transport, fed, message
from harness import servers
from harness.arguments import whole_seconds
from harness.cpu_time import tree_cpu_s
from harness.load import http_load
from harness.models import ENVELOPE, Workshop, instances_body
from harness.pairs import Interval, interval, ratios
from harness.processes import Endpoint, Probe, until_answered
from harness.rows_http import WORKERS
from harness.trees import CHECKOUT, Tree, tree

from torchere.serving.access.client_limits import Account, ClientLimits, Quota, Tally
from torchere.serving.batching.fair_queue import FairQueue
from torchere.serving.batching.request import Request
from torchere.serving.config.server_settings import ServerSettings
from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.rest.connection import Connection
from torchere.serving.frontend.rest.server import listener_of
from torchere.serving.frontend.services import Services
from torchere.serving.telemetry.metrics import Metrics

GOAL = 0.97  # requests a second with all limits, to those without
CLIENTS = 32
WARM_UP_S = 3.0
LIMITS = "client_rate=1000000\nclient_burst=1000000\nclient_concurrency=1000000\nfair_queueing=true\n"
PROBE = Probe("/predictions/tiny", instances_body(), b'"predictions"')
WITH, WITHOUT, OLD = "all limits", "no limits", "old tree"


def steps_of(connection: Connection, data: bytes) -> int:
    """How many bytecodes a request takes."""
    steps = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal steps
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        steps += event == "opcode"
        return trace

    sys.settrace(trace)
    fed(connection, data)
    sys.settrace(None)
    return steps


@dataclass
class Figures:
    """Requests a second, and processor time of a request in microseconds, of each load or each start."""

    per_second: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)

    def add(self, endpoint: Endpoint, seconds: float) -> None:
        """Load a server and keep the figures."""
        before_s = tree_cpu_s(endpoint.process.pid)
        load = http_load(f"{endpoint.url}{PROBE.path}", PROBE.body, CLIENTS, seconds)
        self.per_second.append(load.per_second)
        self.cpu_us.append((tree_cpu_s(endpoint.process.pid) - before_s) / load.requests * 1e6)


def served(starts: int, pairs: int, seconds: float, old: Tree | None) -> dict[str, Figures]:
    """Start all servers so often, and load them in turns; return the medians of each start."""
    wanted: dict[str, tuple[Tree, str]] = {WITH: (CHECKOUT, LIMITS), WITHOUT: (CHECKOUT, "")}
    if old is not None:
        wanted[OLD] = (old, "")
    found = {name: Figures() for name in wanted}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(starts):
            turned = dict(
                sorted(wanted.items(), reverse=number % 2 == 1)
            )  # none is always the first to start
            rates = []
            for name, figures in _one_start(turned, Path(folder), pairs, seconds).items():
                found[name].per_second.append(statistics.median(figures.per_second))
                found[name].cpu_us.append(statistics.median(figures.cpu_us))
                rates.append(f"{name} {found[name].per_second[-1]:,.0f}/s")
            print(f"start {number + 1}: {', '.join(sorted(rates))}", flush=True)
    return found


def _one_start(
    wanted: dict[str, tuple[Tree, str]], folder: Path, pairs: int, seconds: float
) -> dict[str, Figures]:
    with ExitStack() as up:
        endpoints = {}
        for name, (served_tree, properties) in wanted.items():
            server = servers.torchere(Workshop(folder, served_tree), "tiny", WORKERS, ENVELOPE + properties)
            endpoints[name] = up.enter_context(server)
            until_answered(endpoints[name], PROBE)
        for endpoint in endpoints.values():
            Figures().add(endpoint, WARM_UP_S)
        found, names = {name: Figures() for name in endpoints}, list(endpoints)
        for number in range(pairs):
            first = number // 2 % len(names)
            order = names[first:] + names[:first]  # of six pairs, each name has each place as often
            for name in order if number % 2 == 0 else reversed(order):
                found[name].add(endpoints[name], seconds)
    return found


def shown(found: Interval) -> str:
    """A median with its interval."""
    return f"{found.median:.3f} ({found.low:.3f}-{found.high:.3f}, {found.coverage:.0%})"


class Plane(DataPlane):
    """A data plane that answers each request at once."""

    def _find(self, model: str, version: str | None) -> Any:
        return None

    def _submit(self, request: Request, target: Any, model: str, version: str | None) -> None:
        request.finish(ANSWER)


async def door(rounds: int = 15, requests: int = 5000) -> None:
    """Print what the way through the door and the admission costs, with limits and without."""
    body = message(FLOATS)
    connections = {}
    for name, limits in ((WITHOUT, None), (WITH, ClientLimits(Quota(1e6, 10**6, 10**6), Counter()))):
        services = Services(ServerSettings(), Metrics("host"), client_limits=limits)
        plane = Plane(None, services.metrics, client_limits=limits)  # type: ignore[arg-type]
        unasked: Any = SimpleNamespace(workflows=None)  # the plane of routes that are not called
        listener = listener_of(frozenset({"inference"}), plane, unasked, services)
        connections[name] = Connection(listener)
        connections[name].connection_made(Transport({"peername": ("127.0.0.1", 1234)}))
    best = dict.fromkeys(connections, float("inf"))
    for _ in range(rounds):
        for name, connection in connections.items():
            began_s = time.thread_time()
            for _ in range(requests):
                fed(connection, body)
            best[name] = min(best[name], (time.thread_time() - began_s) / requests * 1e6)
    for name, connection in connections.items():
        print(f"door and admission, {name}: {best[name]:.2f} us, {steps_of(connection, body)} bytecodes")


def queue_us(
    clients: int, *, waiting: int, batch_size: int, rounds: int = 5, requests: int = 20_000
) -> float:
    """Processor time of one request in a queue of `waiting` requests of so many clients, in microseconds.

    0 clients: requests without accounts, as without limits.
    """
    accounts = [Account(str(number), Quota(), Tally(), Counter()) for number in range(clients)]
    best = float("inf")
    for _ in range(rounds):
        queue = FairQueue(batch_size)
        made = [Request("", 0.0) for _ in range(requests + waiting)]
        for number, request in enumerate(made):
            request.account = accounts[number % clients] if clients else None
        for request in made[:waiting]:
            queue.add(request)
        began_s = time.process_time()
        for start in range(waiting, len(made), batch_size):
            for request in made[start : start + batch_size]:
                queue.add(request)
            first = queue.first(batch_size)
            for _ in range(batch_size):
                first.popleft()
        best = min(best, time.process_time() - began_s)
    return best / requests * 1e6


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and compare with the goal."""
    parser = argparse.ArgumentParser(description="The cost of limits for each client.")
    parser.add_argument("--starts", type=int, default=11, help="of all servers (default: 11)")
    parser.add_argument("--pairs", type=int, default=6, help="turns of each server a start (default: 6)")
    parser.add_argument("--seconds", type=whole_seconds, default=2, help="of each turn (default: 2)")
    parser.add_argument("--old", help="another tree to compare with: a commit, or a folder with a .venv")
    asked = parser.parse_args(argv)
    found = served(asked.starts, asked.pairs, asked.seconds, tree(asked.old) if asked.old else None)
    result = 0
    for mine, theirs in ((WITH, WITHOUT), (WITH, OLD), (WITHOUT, OLD)):
        if theirs not in found:
            continue
        rate = interval(ratios(found[mine].per_second, found[theirs].per_second))
        cpu = interval(ratios(found[mine].cpu_us, found[theirs].cpu_us))
        print(f"{mine} to {theirs}: requests a second {shown(rate)}, processor time {shown(cpu)}")
        if (mine, theirs) == (WITH, WITHOUT) and rate.median < GOAL:
            result = 1
    uvloop.run(door())
    for batch_size in (1, 32):
        for clients in (0, 1, 4, 32):
            cost_us = queue_us(clients, waiting=64, batch_size=batch_size)
            print(f"queue, {clients:2} clients, batches of {batch_size:2}: {cost_us:.2f} us a request")
    print(f"goal: {WITH} to {WITHOUT}, requests a second, at least {GOAL:g}")
    return result


if __name__ == "__main__":
    sys.exit(main())
