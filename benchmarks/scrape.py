"""What scrapes cost other requests: latencies of predictions while a scraper asks again at once.

    python benchmarks/scrape.py [--models 200] [--rounds 5] [--seconds 4] [--old FOLDER_OR_COMMIT]

A server of this tree (and one of another, with `--old`) has the numbers of many used models, without their
workers: its predictions are answered at once, so all that is measured is the event loop. The servers have
their turns in an order that changes with each round: first quiet, then under back-to-back scrapes, as
Prometheus asks for them (it prefers OpenMetrics, and accepts gzip). Printed are medians over the rounds: p50
and p99 of predictions of one client, the scrape's time, bytes on the wire, and the server's processor time
for it.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.synchronize import Event
from types import SimpleNamespace
from typing import Any, NamedTuple

from harness.arguments import whole_seconds
from harness.cpu_time import tree_cpu_s
from harness.trees import CHECKOUT, Tree, tree

from torchere.serving.batching.request import Request
from torchere.serving.config.server_settings import Address, ServerSettings
from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.rest.server import RestServer, listener_of
from torchere.serving.frontend.services import Services
from torchere.serving.server import SWITCH_INTERVAL_S
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.telemetry.numbers import VersionNumbers
from torchere.serving.telemetry.scrape import ExecutorLoad, States, VersionLoad
from torchere.serving.types import InferResponse

ACCEPT = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
PAUSE_S = 0.002  # between two predictions of the client
LOAD = VersionLoad(0, 100, 0.0, 0.01, (ExecutorLoad(1, "ready"),), "READY", 120.0, 10**6)
STATES = States(
    ("starting", "ready", "suspect", "restarting", "failed", "stopped"),
    ("NEW", "LOADING", "WARMING", "READY", "DRAINING", "UNLOADING", "FAILED"),
)


class Plane(DataPlane):
    """A data plane that answers each request at once."""

    def _find(self, model: str, version: str | None) -> Any:
        return None

    def _submit(self, request: Request, target: Any, model: str, version: str | None) -> None:
        request.finish(InferResponse(b"{}"))


class Figures(NamedTuple):
    """The figures of one turn."""

    p50_ms: float
    p99_ms: float
    scrape_ms: float = 0.0
    scrape_bytes: float = 0.0
    cpu_ms: float = 0.0  # of the server, for each scrape; that of predictions is in it


def use(metrics: Metrics, models: int) -> list[VersionNumbers]:
    """Register versions and count a few requests of each."""
    metrics.know_states(STATES)
    meters = []
    for number in range(models):
        meter = metrics.meter(f"model_{number}", "1.0")
        metrics.show(meter, lambda: LOAD)
        meters.append(meter)
        answer(metrics, meter)
    return meters


def answer(metrics: Metrics, meter: VersionNumbers) -> None:
    """Count one request with all its stages, and its batch."""
    request = Request("id", time.monotonic() - 0.01)
    request.read_s = request.started_s + 0.001
    request.enqueued_s, request.dequeued_s = request.started_s + 0.002, request.started_s + 0.004
    request.company_s, request.stages_s = 0.001, (0.001, 0.002, 0.001, 0.0005)
    request.answered_s, request.sending_s = request.started_s + 0.009, request.started_s + 0.0095
    meter.accepted(named=False)
    request.meter = meter
    metrics.prediction_ends(request, 200)
    meter.batch_finished(
        size=1,
        succeeded=1,
        failed=0,
        succeeded_wait_s=0.002,
        failed_wait_s=0.0,
        executor_s=0.005,
        handler_s=0.0045,
    )


async def serve(models: int) -> None:
    """Serve until the standard input ends; print the port."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    services = Services(ServerSettings(), Metrics("host"))
    meters = use(services.metrics, models)
    plane = Plane(None, services.metrics)  # type: ignore[arg-type]
    control: Any = SimpleNamespace(workflows=None)
    listener = listener_of(frozenset({"inference", "metrics"}), plane, control, services)
    server = RestServer(listener, Address(port=0), drain_timeout_s=1)
    await server.start()
    print(server.address.port, flush=True)
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    while not ended.done():
        for meter in meters:  # so that a scrape finds new requests in each version
            answer(services.metrics, meter)
        await asyncio.wait([ended], timeout=0.5)
    await server.stop()


@contextmanager
def served(by: Tree, models: int) -> Iterator[tuple[int, int]]:
    """Run a server of a tree; yield its pid and its port."""
    command = [str(by.python), __file__, "--serve", "--models", str(models)]
    environment = os.environ | {"PYTHONPATH": os.path.dirname(__file__)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        yield process.pid, int(process.stdout.readline())
        process.stdin.close()


def scrape_again(port: int, end: Event, told: Any) -> None:
    """Scrape until told to end; send the time and the bytes of each scrape."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    found = []
    while not end.is_set():
        began_s = time.perf_counter()
        connection.request("GET", "/metrics", headers={"accept": ACCEPT, "accept-encoding": "gzip"})
        got = connection.getresponse()
        body = got.read()
        assert got.status == 200, body
        found.append((time.perf_counter() - began_s, len(body)))
    told.send(found)


def latencies_ms(port: int, seconds: float) -> list[float]:
    """Return the latencies of predictions of one client, one after the other."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    found, until_s = [], time.perf_counter() + seconds
    while (began_s := time.perf_counter()) < until_s:
        connection.request("POST", "/predictions/tiny", b"{}")
        connection.getresponse().read()
        found.append((time.perf_counter() - began_s) * 1000)
        time.sleep(PAUSE_S)
    return found


def turn(pid: int, port: int, seconds: float, *, scraped: bool) -> Figures:
    """Measure predictions for so many seconds, with a scraper beside them or without."""
    if not scraped:
        return Figures(*_percentiles(latencies_ms(port, seconds)))
    end, (told, tells) = multiprocessing.Event(), multiprocessing.Pipe(duplex=False)
    scraper = multiprocessing.Process(target=scrape_again, args=(port, end, tells))
    before_s = tree_cpu_s(pid)
    scraper.start()
    percentiles = _percentiles(latencies_ms(port, seconds))
    end.set()
    scrapes = told.recv()
    scraper.join()
    cpu_ms = (tree_cpu_s(pid) - before_s) / len(scrapes) * 1000
    times_s, sizes = zip(*scrapes, strict=True)
    return Figures(*percentiles, statistics.median(times_s) * 1000, statistics.median(sizes), cpu_ms)


def _percentiles(values: list[float]) -> tuple[float, float]:
    cuts = statistics.quantiles(values, n=100)
    return cuts[49], cuts[98]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What scrapes cost other requests.")
    parser.add_argument("--models", type=int, default=200, help="used models (default: 200)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each server (default: 5)")
    parser.add_argument("--seconds", type=whole_seconds, default=4, help="of each turn (default: 4)")
    parser.add_argument("--old", help="another tree to compare with: a commit, or a folder with a .venv")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.serve:
        asyncio.run(serve(asked.models))
        return 0
    trees = {"this tree": CHECKOUT} | ({"old tree": tree(asked.old)} if asked.old else {})
    found: dict[tuple[str, bool], list[Figures]] = {}
    with ExitStack() as up:
        servers = {name: up.enter_context(served(each, asked.models)) for name, each in trees.items()}
        for number in range(asked.rounds):
            for name in sorted(servers, reverse=number % 2 == 0):
                for scraped in (False, True):
                    figures = turn(*servers[name], asked.seconds, scraped=scraped)
                    found.setdefault((name, scraped), []).append(figures)
    print(f"{asked.models} models, {asked.rounds} rounds of {asked.seconds} s, medians")
    for (name, scraped), rounds in sorted(found.items()):
        p50_ms, p99_ms, scrape_ms, size, cpu_ms = map(statistics.median, zip(*rounds, strict=True))
        line = f"{name:9} {'scraped' if scraped else 'quiet':8} p50 {p50_ms:6.2f} ms  p99 {p99_ms:6.2f} ms"
        more = f"  scrape {scrape_ms:4.0f} ms, {size / 1e6:5.2f} MB, {cpu_ms:4.0f} ms of a core"
        print(line + (more if scraped else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
