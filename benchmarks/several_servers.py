"""What several servers on one machine bring beside one with as many executors: the tiny MLP.

    python benchmarks/several_servers.py [--servers 2] [--pairs 12] [--seconds 2] [--clients 32]

One server has an executor for each of the others. All are up together and have the same number of clients in
turns; those of the several servers are spread over them. That bounds what accepting processes inside one
server (SO_REUSEPORT) could bring, which would have to share a queue besides. For each figure the median ratio
of a pair, several servers to one, is printed with its interval (order statistics).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from harness import servers
from harness.arguments import whole_seconds
from harness.cpu_time import tree_cpu_s
from harness.load import Load, http_load
from harness.models import ENVELOPE, Workshop, instances_body
from harness.pairs import interval, ratios
from harness.processes import Endpoint, Probe, until_answered
from harness.rows_http import WARM_UP_S

PROBE = Probe("/predictions/tiny", instances_body(), b'"predictions"')


class Contender:
    """Servers that are loaded together, and their figures, one of each kind a pair."""

    def __init__(self, endpoints: Sequence[Endpoint], clients: int) -> None:
        self._endpoints = endpoints
        self._clients = clients // len(endpoints)
        self.per_second: list[float] = []
        self.cpu_us: list[float] = []

    def load(self, seconds: float) -> None:
        """Load all of them, and keep the sum of their requests a second, and processor time a request."""
        before_s = self._cpu_s()
        with ThreadPoolExecutor(len(self._endpoints)) as pool:
            loads = list(pool.map(lambda one: self._load(one, seconds), self._endpoints))
        self.per_second.append(sum(load.per_second for load in loads))
        self.cpu_us.append((self._cpu_s() - before_s) / sum(load.requests for load in loads) * 1e6)

    def _load(self, endpoint: Endpoint, seconds: float) -> Load:
        return http_load(f"{endpoint.url}{PROBE.path}", PROBE.body, self._clients, seconds)

    def _cpu_s(self) -> float:
        return sum(tree_cpu_s(endpoint.process.pid) for endpoint in self._endpoints)


def measured(count: int, clients: int, pairs: int, seconds: float) -> tuple[Contender, Contender]:
    """Load one server with `count` executors, and `count` servers with one each, in turns."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as up:
        shop = Workshop(Path(folder))

        def server(executors: int) -> Endpoint:
            endpoint = up.enter_context(servers.torchere(shop, "tiny", executors, ENVELOPE))
            until_answered(endpoint, PROBE)
            return endpoint

        one = Contender([server(count)], clients)
        several = Contender([server(1) for _ in range(count)], clients)
        for contender in (one, several):
            contender.load(WARM_UP_S)
            contender.per_second.clear()
            contender.cpu_us.clear()
        for number in range(pairs):
            for contender in (one, several) if number % 2 else (several, one):
                contender.load(seconds)
            print(
                f"pair {number + 1}: {one.per_second[-1]:,.0f} and {several.per_second[-1]:,.0f}/s",
                flush=True,
            )
    return one, several


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Several servers beside one.")
    parser.add_argument("--servers", type=int, default=2, help="how many (default: 2)")
    parser.add_argument("--clients", type=int, default=32, help="connections in all (default: 32)")
    parser.add_argument("--pairs", type=int, default=12, help="turns of each (default: 12)")
    parser.add_argument("--seconds", type=whole_seconds, default=2, help="of each turn (default: 2)")
    asked = parser.parse_args(argv)
    one, several = measured(asked.servers, asked.clients, asked.pairs, asked.seconds)
    print(f"{asked.servers} servers to one, {asked.clients} clients, {os.cpu_count()} cores:")
    for name, mine, theirs in (
        ("requests a second", several.per_second, one.per_second),
        ("processor time a request", several.cpu_us, one.cpu_us),
    ):
        found = interval(ratios(mine, theirs))
        print(f"  {name}: {found.median:.3f} ({found.low:.3f}-{found.high:.3f}, {found.coverage:.0%})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
