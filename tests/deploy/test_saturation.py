"""`torchere_saturation` from idle to refusal, and the alerts that look at it."""

from __future__ import annotations

import heapq
import random
import subprocess
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import pytest
import yaml

from torchere.serving.errors import QueueFull
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.telemetry.saturation import TICK_S, LoadSample
from torchere.serving.telemetry.scrape import VersionLoad

SERVICE_S = 0.2  # of a request in an executor
SCRAPE_S = 15


class Kind(NamedTuple):
    """A pool as the batcher sees it."""

    name: str
    workers: int
    lanes: int = 1  # batches that a worker runs at a time
    ahead: int = 0  # batches that may wait in a worker besides
    batch: int = 1
    queue: int = 20

    @property
    def executors(self) -> int:
        return self.workers * self.lanes


KINDS = (
    Kind("thread", workers=1, lanes=2),
    Kind("thread_ahead", workers=1, lanes=2, ahead=2),
    Kind("process", workers=2),
    Kind("process_ahead", workers=2, ahead=1),
    Kind("shared", workers=1),
    Kind("batches", workers=1, lanes=2, ahead=1, batch=8, queue=40),
    Kind("tickets", workers=2, queue=0),
)


class Simulation:
    """A version under load on a clock of its own; everything it counts is real, its workers are not."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.now_s = 0.0
        self.gauge: list[float] = []  # scraped every `SCRAPE_S`
        self._random = random.Random(7)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._queue = 0
        self._running = [0] * kind.workers
        # Sizes of the batches that wait in each worker.
        self._waiting: list[deque[int]] = [deque() for _ in range(kind.workers)]
        self._clients = 0  # each sends its next request when it has an answer
        self.metrics = Metrics("vm", now=lambda: self.now_s)
        self.version = self.metrics.meter(kind.name, "1.0")
        self.version.load = self._load
        self.metrics.show(self.version, VersionLoad)
        self._at(TICK_S, self._tick)
        self._at(SCRAPE_S, self._scrape)

    def open_loop(self, load: float, seconds: float) -> list[float]:
        """Offer `load` times what the executors can do; returns what was scraped."""
        begun_s, seen = self.now_s, len(self.gauge)
        rate = load * self.kind.executors / SERVICE_S

        def arrive() -> None:
            if self.now_s < begun_s + seconds:
                self._submit()
                self._at(self._random.expovariate(rate), arrive)

        if rate:
            self._at(0.0, arrive)
        self._until(begun_s + seconds)
        return self.gauge[seen:]

    def closed_loop(self, clients: int, seconds: float) -> list[float]:
        """Have so many clients, each with one request at a time; returns what was scraped. Begin idle."""
        seen = len(self.gauge)
        self._clients = clients
        for _ in range(clients):
            self._submit()
        self._until(self.now_s + seconds)
        self._clients = 0
        return self.gauge[seen:]

    def _load(self) -> LoadSample:
        ahead = sum(map(sum, self._waiting))
        queued = self._queue + ahead
        executors = self.kind.executors
        return LoadSample(queued, max(0, self.kind.queue - queued), executors, executors)

    def _submit(self) -> None:
        self.version.accepted(named=False)
        free = self._room() - self._queue
        if (self._load().queue_room if self.kind.queue else free) <= 0:
            self.version.refused(QueueFull("full"))
            return
        self._queue += 1
        self._dispatch()

    def _room(self) -> int:
        most = self.kind.lanes + self.kind.ahead
        return sum(most - self._inside(worker) for worker in range(self.kind.workers))

    def _inside(self, worker: int) -> int:
        return self._running[worker] + len(self._waiting[worker])

    def _dispatch(self) -> None:
        while self._queue and self._room():
            size = min(self.kind.batch, self._queue)
            self._queue -= size
            worker = min(range(self.kind.workers), key=self._inside)
            self._waiting[worker].append(size)
            self._begin(worker)
            self._tell()

    def _begin(self, worker: int) -> None:
        while self._waiting[worker] and self._running[worker] < self.kind.lanes:
            size = self._waiting[worker].popleft()
            self._running[worker] += 1
            self._at(size * SERVICE_S, lambda size=size: self._finish(worker, size))  # type: ignore[misc]

    def _finish(self, worker: int, size: int) -> None:
        self._running[worker] -= 1
        self._begin(worker)
        self._tell()
        took_s = size * SERVICE_S
        self.version.batch_finished(
            size=size,
            succeeded=size,
            failed=0,
            succeeded_wait_s=0.0,
            failed_wait_s=0.0,
            executor_s=took_s,
            handler_s=took_s,
        )
        self._dispatch()
        for _ in range(size if self._clients else 0):
            self._submit()

    def _tell(self) -> None:
        inside = sum(self._inside(worker) for worker in range(self.kind.workers))
        self.version.batches_running(inside, self.now_s)

    def _tick(self) -> None:
        self.metrics.sample_load()
        self._at(TICK_S, self._tick)

    def _scrape(self) -> None:
        self.gauge.append(float(self.metrics.exposition(["torchere_saturation"]).split()[-1]))
        self._at(SCRAPE_S, self._scrape)

    def _at(self, in_s: float, event: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now_s + in_s, self._count, event))

    def _until(self, end_s: float) -> None:
        while self._events[0][0] <= end_s:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        self.now_s = end_s


class Found(NamedTuple):
    """What was scraped of one kind: phase by phase, and all of it."""

    idle: list[float]
    part: list[float]
    pause: list[float]
    busy: list[float]
    refusing: list[float]
    idle_again: list[float]
    all: list[float]


@pytest.fixture(scope="module")
def found() -> dict[str, Found]:
    """Each kind, driven from idle to refusal and back."""

    def drive(kind: Kind) -> Found:
        simulation = Simulation(kind)
        return Found(
            simulation.open_loop(0.0, 60),
            simulation.open_loop(0.65, 300),
            simulation.open_loop(0.0, 30),
            simulation.closed_loop(kind.executors, 60),
            simulation.open_loop(3.0 if kind.queue else 10.0, 720),
            simulation.open_loop(0.0, 60),
            simulation.gauge,
        )

    return {kind.name: drive(kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_kind_of_executor_shows_the_whole_range(kind: Kind, found: dict[str, Found]) -> None:
    seen = found[kind.name]
    assert set(seen.idle) == {0.0}
    refused = 0.65 if not kind.queue else 0.0  # without a queue a part is refused long before all are busy
    assert 0.5 < fmean(seen.part) < 0.8 + refused
    assert max(seen.part) < 1.3 + refused
    assert seen.busy[1:] == pytest.approx([1.0] * len(seen.busy[1:]), abs=0.05)
    assert min(seen.refusing[1:]) > 1.8
    assert max(seen.refusing) <= 2.0
    assert set(seen.idle_again[1:]) == {0.0}


def test_both_alerts_fire_for_every_kind_that_refuses_and_for_none_that_is_busy(
    found: dict[str, Found], tool: Callable[[str], str], root: Path, tmp_path: Path
) -> None:
    labels = 'job="torchere", instance="a:8082", version="1.0"'
    series = [
        {
            "series": f'torchere_saturation{{{labels}, model="{name}"}}',
            "values": " ".join(f"{value:.3f}" for value in seen.all),
        }
        for name, seen in found.items()
    ]

    def firing(alert: str, at_s: int, models: list[str]) -> dict[str, object]:
        query = f'count by (model) (ALERTS{{alertname="{alert}", alertstate="firing"}})'
        samples = [{"labels": f'{{model="{model}"}}', "value": 1} for model in models]
        return {"expr": query, "eval_time": f"{at_s}s", "exp_samples": samples}

    busy = 60 + 300 + 30 + 60
    refusing = busy + 720
    over = refusing + 60
    cases = [
        firing(alert, at_s, models)
        for alert in ("TorchereSaturated", "TorchereQueueNearlyFull")
        for at_s, models in ((busy - SCRAPE_S, []), (refusing - SCRAPE_S, [*found]), (over - SCRAPE_S, []))
    ]
    test = {"interval": f"{SCRAPE_S}s", "input_series": series, "promql_expr_test": cases}
    rules = str(root / "k8s/chart/rules/torchere.yaml")
    file = {"rule_files": [rules], "evaluation_interval": f"{SCRAPE_S}s", "tests": [test]}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(file))

    tested = subprocess.run(
        [tool("promtool"), "test", "rules", tmp_path / "tests.yaml"],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    assert tested.returncode == 0, tested.stdout + tested.stderr
