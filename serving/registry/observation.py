"""Reports the versions of a registry, and the load of each, to `telemetry`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torchere.serving.registry.version import CONDITIONS, Version, VersionMetrics, condition
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.telemetry.saturation import LoadSample
from torchere.serving.telemetry.scrape import ExecutorLoad, States, VersionLoad
from torchere.serving.types import ModelKey
from torchere.serving.workers.executor import ExecutorState, ExecutorStatus
from torchere.serving.workers.loss import LossKind


class RegistryMetrics:
    """The observer of a registry. Called on the event loop."""

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
        """Expose the series of a version from now on, with its load at each scrape.

        `weight` returns its share of the requests that name no version.
        """
        meter = version.observer.meter
        meter.load = lambda: load_sample_of(version)
        weights_bytes = _weights_bytes(version)  # read once, as scrapes run on the event loop
        self._metrics.show(meter, lambda: load_of(version, weight(), weights_bytes))

    def gone(self, version: Version, *, was_last: bool) -> None:
        """Drop the series of a version; `was_last` when the model has no other."""
        self._metrics.forget(version.observer.meter, was_last=was_last)


def load_sample_of(version: Version) -> LoadSample:
    """Return the inputs of a version's saturation; cheap. Call it on the event loop."""
    batcher, pool = version.batcher, version.pool
    return LoadSample(batcher.queue_length, batcher.queue_capacity, pool.in_service, pool.size)


def load_of(version: Version, weight: float, weights_bytes: int) -> VersionLoad:
    """Return the current load of a version. Call it on the event loop.

    Args:
        version: the version.
        weight: its share of the requests that name no version.
        weights_bytes: the size of its model file; 0: it has none.
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
        weights_bytes=weights_bytes,
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
    except OSError:  # its manifest names a file that it lacks
        return 0
