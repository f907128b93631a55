"""Replaces servers one after the other under load, and counts the requests that are lost. The goal is none.

    python benchmarks/rolling_restart.py [--rest 20000] [--grpc 5000] [--json FILE]

Two servers run behind nginx (REST) and HAProxy (gRPC over HTTP/2, and as mere bytes), and beside them a gRPC
client that balances by itself and asks the health service. As Kubernetes does it, the one that goes gets
SIGTERM first, and only `PROPAGATION_S` later do the proxies hear that it is no endpoint any more; when it has
ended, a new one starts, and becomes an endpoint once `/readyz` says so. That goes on until every way in has
had its number of requests. Nobody tries a request twice: not the clients, not the proxies. Exit code 1 when a
request failed, or a server did not answer everything that it had accepted.

Mere bytes are passed on as a Service of Kubernetes does it, so that a gRPC client has one connection to one
server, and hears from that server alone that it has to go.

Needs nginx and HAProxy (Debian: `apt-get install nginx-light haproxy`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from harness.errors import Failed
from harness.processes import sigterm_exits
from rolling import clients
from rolling.clients import Tally
from rolling.proxies import Haproxy, Nginx, missing
from rolling.replica import Replica, write_store

PROPAGATION_S = 1.0  # from the end of an endpoint until the last proxy has heard of it
REPLICAS = 2
LEAST_RESTARTS = 2 * REPLICAS  # each one at least twice: also while the other one is young


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, and say by the exit code whether anything was lost."""
    parser = argparse.ArgumentParser(description="Count what a rolling restart loses.")
    parser.add_argument("--rest", type=int, default=20_000, metavar="N", help="requests over REST")
    parser.add_argument("--grpc", type=int, default=5_000, metavar="N", help="calls on each way of gRPC")
    parser.add_argument("--restarts", type=int, default=LEAST_RESTARTS, metavar="N", help="at the least")
    parser.add_argument("--json", type=Path, help="also write the result there")
    options = parser.parse_args(argv)
    if missing():
        print(f"{' and '.join(missing())} not installed; on Debian: apt-get install nginx-light haproxy")
        return 2
    with sigterm_exits(), tempfile.TemporaryDirectory(prefix="rolling-") as folder:
        rolling = Rolling(Path(folder), options.rest, options.grpc, options.restarts)
        try:
            asyncio.run(rolling.run())
        except Failed as err:
            print(err)
            return 1
    report(rolling)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(tally) for tally in rolling.tallies], indent=2))
    return 1 if any(tally.failed for tally in rolling.tallies) else 0


class Rolling:
    """Replicas, proxies and clients of one run; `tallies` and `ends_s` are its result."""

    def __init__(self, folder: Path, rest: int, calls: int, restarts: int) -> None:
        store = write_store(folder / "store")
        self.replicas = [Replica(f"r{number}", folder / f"r{number}", store) for number in range(REPLICAS)]
        self.nginx = Nginx(folder / "nginx", self.replicas)
        self.haproxy = Haproxy(folder / "haproxy", self.replicas)
        names = ("gRPC, HAProxy as HTTP/2", "gRPC, HAProxy as TCP", "gRPC, round robin with health")
        self.tallies = [Tally("REST, nginx", rest), *(Tally(name, calls) for name in names)]
        self.ends_s: list[float] = []  # SIGTERM to exit
        self._restarts = restarts

    async def run(self) -> None:
        """Load and replace until everything wanted has happened; takes all down.

        Raises:
            Failed: a server did not start, or did not end as it should.
        """
        with contextlib.ExitStack() as stack:
            for replica in self.replicas:
                stack.callback(replica.kill)
                replica.start()
            await asyncio.gather(*(replica.until_ready() for replica in self.replicas))
            for proxy in (self.nginx, self.haproxy):
                stack.callback(proxy.stop)
                proxy.start()
            await self._load_and_replace()

    async def _load_and_replace(self) -> None:
        channels = [
            clients.plain_channel(self.haproxy.port),
            clients.plain_channel(self.haproxy.tcp_port),
            clients.balanced_channel([replica.grpc_port for replica in self.replicas]),
        ]
        ways = [clients.rest(self.nginx.port), *map(clients.grpc_calls, channels)]
        replacing = asyncio.create_task(self._replace_all())
        await asyncio.gather(
            replacing,
            *(
                clients.load(tally, ask, lambda: not replacing.done())
                for tally, ask in zip(self.tallies, ways, strict=True)
            ),
        )
        for channel in channels:
            await channel.close()

    async def _replace_all(self) -> None:
        """Replace one after the other; a round ends when both are ready."""
        while len(self.ends_s) < self._restarts or not self._is_enough():
            for replica in self.replicas:
                await self._replace(replica)

    def _is_enough(self) -> bool:
        return all(tally.answered + tally.failed >= tally.wanted for tally in self.tallies)

    async def _replace(self, replica: Replica) -> None:
        began_s = time.monotonic()
        replica.terminate()
        await asyncio.sleep(PROPAGATION_S)
        self._route_to([other for other in self.replicas if other is not replica])
        await replica.until_gone()
        self.ends_s.append(time.monotonic() - began_s)
        replica.start()
        await replica.until_ready()
        self._route_to(self.replicas)
        await asyncio.sleep(PROPAGATION_S)

    def _route_to(self, replicas: Sequence[Replica]) -> None:
        for proxy in (self.nginx, self.haproxy):
            proxy.route_to({replica.name for replica in replicas})


def report(rolling: Rolling) -> None:
    """Print what came of it."""
    print(f"{'way in':34}{'answered':>9}{'failed':>8}{'slowest':>10}")
    for tally in rolling.tallies:
        print(f"{tally.name:34}{tally.answered:9}{tally.failed:8}{tally.slowest_s:8.2f} s")
        for failure in tally.failures:
            print(f"    {failure}")
    print(f"restarts: {len(rolling.ends_s)}; SIGTERM to exit: {max(rolling.ends_s):.1f} s at most")


if __name__ == "__main__":
    sys.exit(main())
