"""Turns what the rooms tell into metrics: the one place where batches and Prometheus families meet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torchere.serving.batching.admission import Admission
from torchere.serving.batching.pending import Pending
from torchere.serving.errors import ServingError
from torchere.serving.execution.executor import BatchReport, ExecutorPool, Unfinished
from torchere.serving.telemetry.load_metrics import VersionLoad
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.types import ModelKey


class VersionMetrics:
    """`VersionObserver` of one version."""

    def __init__(self, key: ModelKey, metrics: Metrics) -> None:
        self._key = key
        self._metrics = metrics

    def batch_finished(self, pendings: Sequence[Pending], report: BatchReport, executor_s: float) -> None:
        """Count the batch and take over what its handler reported."""
        failed = all(isinstance(outcome, ServingError) for outcome in report.outcomes)
        self._metrics.batch_finished(
            *self._key,
            size=len(pendings),
            queue_s=_waited_s(pendings, report),
            executor_s=executor_s,
            handler_s=report.handler_s,
            succeeded_ids=() if failed else [pending.request.request_id for pending in pendings],
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
        self.declared_metrics = metrics.declared

    def watch(self, key: ModelKey) -> VersionMetrics:
        """The observer of a new version."""
        return VersionMetrics(key, self._metrics)

    def registered(self, key: ModelKey, batcher: Admission, pool: ExecutorPool) -> None:
        """Show the load of a version at each exposition."""
        self._metrics.watch_load(*key, lambda: load_of(batcher, pool))

    def gone(self, key: ModelKey, *, was_last: bool) -> None:
        """Drop the series of a version."""
        self._metrics.forget(*key, was_last=was_last)


def load_of(batcher: Admission, pool: ExecutorPool) -> VersionLoad:
    """How loaded a version is now. Call it on the event loop."""
    return VersionLoad(
        queued=batcher.queue_length,
        queue_room=batcher.queue_capacity,
        in_service=pool.in_service,
        busy=pool.in_service - len(pool.idle_ids()),
        executors=Counter(status.state.value for status in pool.statuses()),
    )


def _waited_s(pendings: Sequence[Pending], report: BatchReport) -> float:
    """How long the requests waited before they were first run, added up; each counts when it is finished."""
    return sum(
        pending.dequeued_s - pending.enqueued_s
        for pending, outcome in zip(pendings, report.outcomes, strict=True)
        if not isinstance(outcome, Unfinished)
    )
