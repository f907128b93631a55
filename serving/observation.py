"""Turns what the rooms tell into metrics: the one place where batches and Prometheus families meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchere.serving.batching.pending import Pending
from torchere.serving.execution.executor import BatchReport
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.types import ModelKey


class VersionMetrics:
    """`VersionObserver` of one version."""

    def __init__(self, key: ModelKey, metrics: Metrics) -> None:
        self._key = key
        self._metrics = metrics

    def batch_finished(self, pendings: Sequence[Pending], report: BatchReport, executor_s: float) -> None:
        """Count the batch and take over what its handler reported."""
        self._metrics.batch_finished(
            *self._key, size=len(pendings), executor_s=executor_s, handler_s=report.handler_s
        )
        if report.metrics:
            self._metrics.handler_metrics(report.metrics)

    def executor_loaded(self, executor_id: int, load_s: float) -> None:
        """Keep the load time."""
        self._metrics.executor_loaded(*self._key, executor_id, load_s)


class RegistryMetrics:
    """`RegistryObserver` of a server."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def watch(self, key: ModelKey) -> VersionMetrics:
        """The observer of a new version."""
        return VersionMetrics(key, self._metrics)

    def registered(self, key: ModelKey, queue_length: Callable[[], int]) -> None:
        """Show the queue of a version at each exposition."""
        self._metrics.watch_queue(*key, queue_length)

    def gone(self, key: ModelKey, *, was_last: bool) -> None:
        """Drop the series of a version."""
        self._metrics.forget(*key, was_last=was_last)
