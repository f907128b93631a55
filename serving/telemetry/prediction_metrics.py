"""Series that every prediction changes: kept as plain numbers, and made into families only when asked for.

The library takes a lock and several calls for each number; a prediction changes seven of them.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import Metric
from prometheus_client.registry import Collector

from torchere.serving.telemetry.families import help_text
from torchere.serving.telemetry.server_metrics import ServerMetrics

DEFAULT_VERSION = "default"  # label of requests that named no version
# From a tenth of a millisecond, where small models answer, to the longest response time-out by default.
SECONDS_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
)
REQUESTS = "ts_inference_requests_total"
LATENCY = "ts_inference_latency_microseconds"
QUEUE_LATENCY = "ts_queue_latency_microseconds"
QUEUE_TIME = "QueueTime"
# The metrics of TorchServe that are kept as plain numbers here, with the type they must be declared with.
PLAIN = {REQUESTS: "counter", LATENCY: "counter", QUEUE_LATENCY: "counter", QUEUE_TIME: "gauge"}
_DURATION = "torchere_request_duration_seconds"
_QUEUE_DURATION = "torchere_queue_duration_seconds"


class _Distribution:
    """A histogram's numbers; whoever holds the lock of its series may touch it."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS_BUCKETS) + 1)
        self.total = 0.0

    def observe(self, value_s: float) -> None:
        self.counts[bisect_left(SECONDS_BUCKETS, value_s)] += 1
        self.total += value_s


class _Series:
    """All numbers of one model and version label; `lock` guards them."""

    __slots__ = ("duration", "lock", "queue", "requests")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.requests = 0
        self.duration = _Distribution()
        self.queue = _Distribution()


class PredictionMetrics(Collector):
    """The prediction families of one server. Thread-safe.

    Of TorchServe's metrics it shows those that `server` calls plain; the others get their updates one by one.
    """

    def __init__(self, hostname: str, server: ServerMetrics) -> None:
        self._hostname = hostname
        self._server = server
        self._one_by_one = frozenset(name for name in PLAIN if server.takes(name))
        self._lock = threading.Lock()  # guards the map; the series in it have their own locks
        self._series: dict[tuple[str, str | None], _Series] = {}
        self._last_queue_s = 0.0

    def accepted(self, model: str, version: str | None) -> None:
        """A prediction for a registered model came in."""
        series = self._series.get((model, version))
        if series is None:
            with self._lock:
                series = self._series.setdefault((model, version), _Series())
        with series.lock:
            series.requests += 1
        if REQUESTS in self._one_by_one:
            self._server.bind(REQUESTS, model, version or DEFAULT_VERSION)(1)

    def answered(self, model: str, version: str | None, total_s: float, queue_s: float) -> None:
        """A prediction was answered; nothing to note when its version was forgotten meanwhile."""
        self._last_queue_s = queue_s
        series = self._series.get((model, version))
        if series is None:
            return
        with series.lock:
            series.duration.observe(total_s)
            series.queue.observe(queue_s)
        if self._one_by_one:
            self._update_one_by_one(model, version or DEFAULT_VERSION, total_s, queue_s)

    def _update_one_by_one(self, model: str, version: str, total_s: float, queue_s: float) -> None:
        self._server.bind(LATENCY, model, version)(total_s * 1e6)
        self._server.bind(QUEUE_LATENCY, model, version)(queue_s * 1e6)
        self._server.bind(QUEUE_TIME, "Host")(int(queue_s * 1000))

    def forget(self, model: str, version: str | None) -> None:
        """Drop the series of a version label; without an error when there is none."""
        with self._lock:
            self._series.pop((model, version), None)
        for name in self._one_by_one - {QUEUE_TIME}:
            self._server.drop(name, model, version or DEFAULT_VERSION)

    def describe(self) -> Iterable[Metric]:
        """The families without samples: how the registry learns that their names are taken."""
        return self._families().values()

    def collect(self) -> Iterable[Metric]:
        """Make the families, for the registry."""
        families = self._families()
        with self._lock:
            series = list(self._series.items())
        for (model, version), one in series:
            shown = version or DEFAULT_VERSION
            ours = {"model": model, "version": shown}
            with one.lock:
                self._add(families, REQUESTS, (model, shown), one.requests)
                self._add(families, LATENCY, (model, shown), one.duration.total * 1e6)
                self._add(families, QUEUE_LATENCY, (model, shown), one.queue.total * 1e6)
                _add_distribution(families[_DURATION], ours, one.duration)
                _add_distribution(families[_QUEUE_DURATION], ours, one.queue)
        self._add(families, QUEUE_TIME, ("Host",), int(self._last_queue_s * 1000))
        return families.values()

    def _families(self) -> dict[str, Metric]:
        declared = self._server.plain.values()
        families = {metric.name: _family(metric.name, metric.kind, metric.unit) for metric in declared}
        for name in (_DURATION, _QUEUE_DURATION):
            families[name] = _family(name, "histogram", "Seconds")
        return families

    def _add(self, families: dict[str, Metric], name: str, values: tuple[str, ...], number: float) -> None:
        if name in self._server.plain:
            labels = dict(zip(self._server.plain[name].labels, (*values, self._hostname), strict=True))
            families[name].add_sample(families[name].name, labels, number)


def _family(name: str, kind: str, unit: str) -> Metric:
    return Metric(name, help_text(kind, unit), kind)


def _add_distribution(family: Metric, labels: dict[str, str], values: _Distribution) -> None:
    total = 0
    bounds: Sequence[str] = [*map(str, SECONDS_BUCKETS), "+Inf"]
    for bound, count in zip(bounds, values.counts, strict=True):
        total += count
        family.add_sample(f"{family.name}_bucket", {**labels, "le": bound}, total)
    family.add_sample(f"{family.name}_count", labels, total)
    family.add_sample(f"{family.name}_sum", labels, values.total)
