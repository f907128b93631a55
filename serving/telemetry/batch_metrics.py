"""Sizes of batches, and where the time of their requests went: plain numbers until somebody asks."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable

from prometheus_client import Metric
from prometheus_client.registry import Collector

from torchere.serving.telemetry.families import help_text

SIZE = "torchere_batch_size"
STAGE_SECONDS = "torchere_stage_seconds_total"
SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
STAGES = ("queue", "transfer", "handler")


class _Series:
    """The numbers of one version."""

    __slots__ = ("counts", "requests", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(SIZE_BUCKETS) + 1)  # by bucket, the last for what is larger than all
        self.requests = 0
        self.seconds = [0.0] * len(STAGES)


class BatchMetrics(Collector):
    """The batch families of one server. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the map and all numbers in it
        self._series: dict[tuple[str, str], _Series] = {}

    def finished(
        self, model: str, version: str, *, size: int, queue_s: float, transfer_s: float, handler_s: float
    ) -> None:
        """A batch came back; the seconds are those of all its requests together, none negative."""
        with self._lock:
            series = self._series.get((model, version))
            if series is None:
                series = self._series[model, version] = _Series()
            series.counts[bisect_left(SIZE_BUCKETS, size)] += 1
            series.requests += size
            seconds = series.seconds
            seconds[0] += queue_s
            seconds[1] += transfer_s
            seconds[2] += handler_s

    def forget(self, model: str, version: str) -> None:
        """Drop the numbers of a version; without an error when there are none."""
        with self._lock:
            self._series.pop((model, version), None)

    def describe(self) -> Iterable[Metric]:
        """The families without samples: how the registry learns that their names are taken."""
        return _families()

    def collect(self) -> Iterable[Metric]:
        """Make the families, for the registry."""
        sizes, stages = families = _families()
        with self._lock:
            for (model, version), series in self._series.items():
                labels = {"model": model, "version": version}
                _add_sizes(sizes, labels, series)
                for stage, seconds in zip(STAGES, series.seconds, strict=True):
                    stages.add_sample(STAGE_SECONDS, {**labels, "stage": stage}, seconds)
        return families


def _families() -> tuple[Metric, Metric]:
    return (
        Metric(SIZE, help_text("histogram", "Count"), "histogram"),
        Metric(STAGE_SECONDS, help_text("counter", "Seconds"), "counter"),
    )


def _add_sizes(family: Metric, labels: dict[str, str], series: _Series) -> None:
    total = 0
    bounds = [*(str(float(bound)) for bound in SIZE_BUCKETS), "+Inf"]
    for bound, count in zip(bounds, series.counts, strict=True):
        total += count
        family.add_sample(f"{SIZE}_bucket", {**labels, "le": bound}, total)
    family.add_sample(f"{SIZE}_count", labels, total)
    family.add_sample(f"{SIZE}_sum", labels, series.requests)
