"""Report plain values of batches and versions to `telemetry`, the only link between the packages."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torchere.handlers.ts_compat.alias import __version__ as TORCHSERVE_VERSION
from torchere.serving.errors import ServingError
from torchere.serving.registry.version import CONDITIONS, Version, condition
from torchere.serving.telemetry.load_metrics import ExecutorLoad, VersionLoad
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.telemetry.numbers import UNREAD, VersionNumbers
from torchere.serving.telemetry.saturation import LoadSample
from torchere.serving.telemetry.scrape import States
from torchere.serving.types import ModelKey
from torchere.serving.workers.executor import BatchReport, ExecutorState, ExecutorStatus, Unfinished
from torchere.serving.workers.loss import LossKind
from torchere.serving.workers.run import Run

_telemetry = logging.getLogger("TELEMETRY_METRICS")


class VersionMetrics:
    """`VersionObserver` of one version."""

    def __init__(self, meter: VersionNumbers, metrics: Metrics) -> None:
        self.meter = meter
        self._metrics = metrics

    def batches_running(self, batches: int, now_s: float) -> None:
        """Record the number of batches that executors hold."""
        self.meter.batches_running(batches, now_s)

    def batch_finished(self, run: Run, report: BatchReport, executor_s: float) -> None:
        """Count the batch and record the metrics that its handler reported."""
        succeeded = failed = 0
        succeeded_wait_s = failed_wait_s = 0.0
        for request, outcome in zip(run.requests, report.outcomes, strict=True):
            if isinstance(outcome, Unfinished):  # counted when it finishes
                continue
            wait_s = request.dequeued_s - request.enqueued_s
            if isinstance(outcome, ServingError):
                failed += 1
                failed_wait_s += wait_s
            else:
                succeeded += 1
                succeeded_wait_s += wait_s
        meter = self.meter
        ids: Sequence[str] = ()
        if meter.wants_ids:
            ids = [request.request_id for request in run.requests]
        meter.batch_finished(
            size=len(run.requests),
            succeeded=succeeded,
            failed=failed,
            succeeded_wait_s=succeeded_wait_s,
            failed_wait_s=failed_wait_s,
            executor_s=executor_s,
            handler_s=report.handler_s,
            request_ids=ids,
        )
        if report.metrics:
            self._metrics.handler_metrics(report.metrics)

    def left_unread(self) -> None:
        """Count a streamed response that was aborted because its client read too slowly."""
        self.meter.cancelled[UNREAD] += 1

    def executor_loaded(self, executor_id: int, load_s: float) -> None:
        """Record how long an executor took to load."""
        self._metrics.executor_loaded(self.meter, executor_id, load_s)

    def executor_lost(self, reason: str) -> None:
        """Count a lost executor; `reason` is a value of `LossKind`."""
        self.meter.restarts[reason] += 1
        if "SM_TELEMETRY_LOG" in os.environ:  # TorchServe's line of a worker that died, for SageMaker
            _telemetry.info("ModelServerError.Count:1|#TorchServe:%s,%s:-1", TORCHSERVE_VERSION, reason)


class RegistryMetrics:
    """`RegistryObserver` of a server."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.declared_metrics = metrics.declared
        metrics.know_states(States(tuple(state.value for state in ExecutorState), CONDITIONS))

    def watch(self, key: ModelKey) -> VersionMetrics:
        """Return the observer of a new version; its series are not exposed before it is registered."""
        meter = self._metrics.meter(*key)
        # Counters start at 0, so that the first loss shows up as an increase.
        meter.restarts.update({kind.value: 0 for kind in LossKind if kind is not LossKind.STOPPED})
        return VersionMetrics(meter, self._metrics)

    def registered(self, version: Version, weight: Callable[[], float]) -> None:
        """Expose the series of a version from now on, with its load at each scrape."""
        meter = version.observer.meter
        meter.load = lambda: load_sample_of(version)
        self._metrics.show(meter, lambda: load_of(version, weight()))

    def gone(self, version: Version, *, was_last: bool) -> None:
        """Drop the series of a version."""
        self._metrics.forget(version.observer.meter, was_last=was_last)


def load_sample_of(version: Version) -> LoadSample:
    """Return the inputs of a version's saturation; cheap. Call it on the event loop."""
    batcher, pool = version.batcher, version.pool
    return LoadSample(batcher.queue_length, batcher.queue_capacity, pool.in_service, pool.size)


def load_of(version: Version, weight: float) -> VersionLoad:
    """Return the current load of a version; `weight` is its share of the requests that name no version.

    Call it on the event loop.
    """
    batcher, pool = version.batcher, version.pool
    return VersionLoad(
        queued=batcher.queue_length,
        queue_room=batcher.queue_capacity,
        oldest_age_s=batcher.oldest_age_s(time.monotonic()),
        predicted_s=batcher.predicted_s,
        executors=tuple(_executor_loads(pool.statuses())),
        state=condition(version),
        response_timeout_s=version.settings.response_timeout_s,
        weights_bytes=_weights_bytes(version),
        weight=weight,
    )


def _executor_loads(statuses: Sequence[ExecutorStatus]) -> Iterator[ExecutorLoad]:
    """Yield the load of each executor, with the pid only on the first lane of a process.

    Lanes of one process share its memory, which must be counted once.
    """
    seen: set[int] = set()
    for status in statuses:
        yield ExecutorLoad(status.executor_id, status.state.value, 0 if status.pid in seen else status.pid)
        seen.add(status.pid)


def _weights_bytes(version: Version) -> int:
    """Return the size in bytes of the model file in the unpacked archive; 0 when it has none."""
    serialized = (version.origin.archive.manifest.get("model") or {}).get("serializedFile")
    if not isinstance(serialized, str):
        return 0
    try:
        return Path(version.origin.archive.directory, Path(serialized).name).stat().st_size
    except OSError:  # the archive is being removed
        return 0
