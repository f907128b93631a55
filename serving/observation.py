"""Turns what the rooms tell into metrics and spans: the one place where batches and telemetry meet."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torchere.serving.batching.running import RunningBatch
from torchere.serving.errors import ServingError
from torchere.serving.execution.executor import BatchReport, ExecutorState, Unfinished
from torchere.serving.execution.loss import LossKind
from torchere.serving.registry.version import Version, VersionState
from torchere.serving.telemetry.exposure import States
from torchere.serving.telemetry.load_metrics import ExecutorLoad, VersionLoad
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.telemetry.version_meter import UNREAD, VersionMeter
from torchere.serving.types import ModelKey


class VersionMetrics:
    """`VersionObserver` of one version."""

    def __init__(self, meter: VersionMeter, metrics: Metrics) -> None:
        self.meter = meter
        self._metrics = metrics
        self._statistics = metrics.statistics.of(meter.model, meter.version)
        self.queue_length: Callable[[], int] = lambda: 0

    def batch_finished(self, batch: RunningBatch, report: BatchReport, executor_s: float) -> None:
        """Count the batch and take over what its handler reported."""
        metrics, pendings = self._metrics, batch.pendings

        def ids() -> Sequence[str]:
            return [pending.request.request_id for pending in pendings]

        succeeded_s: list[float] = []  # how long each waited
        failed_s: list[float] = []
        for pending, outcome in zip(pendings, report.outcomes, strict=True):
            if not isinstance(outcome, Unfinished):  # what goes on in the next batch counts when it is over
                waits_s = failed_s if isinstance(outcome, ServingError) else succeeded_s
                waits_s.append(pending.dequeued_s - pending.enqueued_s)
        metrics.batch_finished(
            self.meter,
            size=len(pendings),
            executor_s=executor_s / batch.rounds,  # those in front of it count for themselves
            handler_s=report.handler_s,
            succeeded_ids=None if len(failed_s) == len(pendings) else ids,
        )
        self._statistics.batch_finished(succeeded_s, failed_s, executor_s, report.handler_s)
        if report.metrics:
            metrics.handler_metrics(report.metrics)
        if metrics.tracing is not None:
            meter = self.meter
            metrics.tracing.batch(meter.model, meter.version, ids(), self.queue_length(), executor_s)

    def left_unread(self) -> None:
        """Count a streamed answer that was given up because its client read too slowly."""
        self.meter.cancelled[UNREAD] += 1

    def executor_loaded(self, executor_id: int, load_s: float) -> None:
        """Record how long an executor took to load."""
        self._metrics.executor_loaded(self.meter, executor_id, load_s)

    def executor_lost(self, reason: str) -> None:
        """Count a lost executor; `reason` is a value of `LossKind`."""
        self.meter.restarts[reason] += 1


class RegistryMetrics:
    """`RegistryObserver` of a server."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.declared_metrics = metrics.declared
        metrics.know_states(
            States(
                tuple(state.value for state in ExecutorState),
                tuple(state.value for state in VersionState),
            )
        )

    def watch(self, key: ModelKey) -> VersionMetrics:
        """The observer of a new version; its series are not shown before it is registered."""
        meter = self._metrics.meter(*key)
        # From 0 on, so that the first loss is an increase.
        meter.restarts.update({kind.value: 0 for kind in LossKind if kind is not LossKind.STOPPED})
        return VersionMetrics(meter, self._metrics)

    def registered(self, version: Version, weight: Callable[[], float]) -> None:
        """Show a version from now on, and its load at each exposition."""
        self._metrics.show(version.observer.meter, lambda: load_of(version, weight()))
        if isinstance(version.observer, VersionMetrics):
            version.observer.queue_length = lambda: version.batcher.queue_length

    def gone(self, version: Version, *, was_last: bool) -> None:
        """Drop the series of a version."""
        self._metrics.forget(version.observer.meter, was_last=was_last)


def load_of(version: Version, weight: float) -> VersionLoad:
    """How loaded a version is now; `weight` is its share of the requests that name no version.

    Call it on the event loop.
    """
    batcher, pool = version.batcher, version.pool
    own_process = version.origin.isolation == "process"
    return VersionLoad(
        queued=batcher.queue_length,
        queue_room=batcher.queue_capacity,
        oldest_age_s=batcher.oldest_age_s(time.monotonic()),
        predicted_s=batcher.predicted_s,
        in_service=pool.in_service,
        busy=pool.in_service - len(pool.idle_ids()),
        executors=tuple(
            ExecutorLoad(status.executor_id, status.state.value, status.pid if own_process else 0)
            for status in pool.statuses()
        ),
        state=version.state.value,
        response_timeout_s=version.settings.response_timeout_s,
        weights_bytes=_weights_bytes(version),
        weight=weight,
    )


def _weights_bytes(version: Version) -> int:
    """Size of the model file in the unpacked archive; 0 when it has none."""
    serialized = (version.origin.archive.manifest.get("model") or {}).get("serializedFile")
    if not isinstance(serialized, str):
        return 0
    try:
        return Path(version.origin.archive.directory, Path(serialized).name).stat().st_size
    except OSError:  # the archive is being removed
        return 0
