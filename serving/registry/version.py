"""Lifecycle of a model version: its states, the legal transitions, its record and its counters."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from torchere.handlers.metrics import MetricSample
from torchere.handlers.ts_compat.alias import __version__ as TORCHSERVE_VERSION
from torchere.serving.batching.admission import Admission
from torchere.serving.config.server_settings import ModelSettings, Placement
from torchere.serving.errors import LoadFailed, ServingError
from torchere.serving.registry.fetching import Claim
from torchere.serving.store.package import StoredArchive
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.telemetry.numbers import UNREAD, VersionNumbers
from torchere.serving.types import ModelKey
from torchere.serving.workers.executor import BatchReport, ExecutorState, Unfinished
from torchere.serving.workers.pool import WorkerPool
from torchere.serving.workers.run import Run

_telemetry = logging.getLogger("TELEMETRY_METRICS")


class VersionState(Enum):
    """States of one version, in the order of a normal lifecycle."""

    NEW = "new"  # registered; nothing is loaded, because no executor was requested yet
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"  # admits no new requests, finishes the admitted ones
    UNLOADING = "unloading"
    GONE = "gone"
    FAILED = "failed"  # could not be loaded, or not again after all executors gave up; the cause is kept


TRANSITIONS: dict[VersionState, frozenset[VersionState]] = {
    VersionState.NEW: frozenset({VersionState.LOADING, VersionState.GONE}),
    VersionState.LOADING: frozenset({VersionState.WARMING, VersionState.FAILED, VersionState.DRAINING}),
    VersionState.WARMING: frozenset({VersionState.READY, VersionState.FAILED, VersionState.DRAINING}),
    VersionState.READY: frozenset({VersionState.DRAINING, VersionState.FAILED}),
    VersionState.DRAINING: frozenset({VersionState.UNLOADING}),
    VersionState.UNLOADING: frozenset({VersionState.NEW, VersionState.GONE}),
    VersionState.FAILED: frozenset({VersionState.LOADING, VersionState.GONE}),
    VersionState.GONE: frozenset(),
}


class IllegalTransition(RuntimeError):
    """A transition that the lifecycle does not allow: a bug in the reconciler."""


# A version without an executor in service shows the first of these states that its executors have.
_OUT_OF_SERVICE = (
    ExecutorState.RESTARTING,
    ExecutorState.STARTING,
    ExecutorState.SUSPECT,
    ExecutorState.FAILED,
)
# All values of `condition`, without duplicates: both kinds of states have a "failed".
CONDITIONS = tuple(dict.fromkeys(state.value for state in (*VersionState, *_OUT_OF_SERVICE)))


@dataclass(frozen=True, slots=True)
class Origin:
    """The archive, handler, runtime and isolation of a version; fixed at registration."""

    archive: StoredArchive
    handler: str
    runtime: str
    isolation: Placement
    loaded_at_startup: bool
    needs_compiler: bool = False  # workers import torch's compiler: an exported program, or `torch.compile`
    workflow: str = ""  # the workflow that the model is a step of
    is_function: bool = False  # the step is a function of the workflow's handler, not a model of the store


class VersionMetrics:
    """The observer of one version and its batches. Called on the event loop."""

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
        meter.batch_finished(
            size=len(run.requests),
            succeeded=succeeded,
            failed=failed,
            succeeded_wait_s=succeeded_wait_s,
            failed_wait_s=failed_wait_s,
            executor_s=executor_s,
            handler_s=report.handler_s,
            requests=run.requests,
        )
        if report.metrics:
            self.handler_metrics(report.metrics)

    def handler_metrics(self, samples: Sequence[MetricSample]) -> None:
        """Record values that a handler reported, in a batch or outside of one."""
        self._metrics.handler_metrics(samples, self.meter.model)

    def left_unread(self) -> None:
        """Count a streamed response that was aborted because its client read too slowly."""
        self.meter.cancelled[UNREAD] += 1

    def executor_loaded(self, executor_id: int, load_s: float) -> None:
        """Record how long an executor took to load."""
        self._metrics.executor_loaded(self.meter, executor_id, load_s)

    def executor_lost(self, reason: str) -> None:
        """Count a lost executor; `reason` is a value of `LossKind`."""
        self.meter.restarts[reason] += 1
        if "SM_TELEMETRY_LOG" in os.environ:  # TorchServe's line for a worker that died, for SageMaker
            _telemetry.info("ModelServerError.Count:1|#TorchServe:%s,%s:-1", TORCHSERVE_VERSION, reason)


class Version:
    """One registered version, with its desired and its actual state. Used on the event loop.

    The registry writes the desired state (`wanted`, `settings`, `target`, `retry`); only the reconciler
    writes the actual state (`state`, `failure`). A request in the batcher keeps the version loaded: draining
    waits for it.
    """

    def __init__(
        self,
        key: ModelKey,
        origin: Origin,
        settings: ModelSettings,
        pool: WorkerPool,
        batcher: Admission,
        *,
        observer: VersionMetrics,
    ) -> None:
        self.key = key
        self.origin = origin
        self.settings = settings
        self.pool = pool
        self.batcher = batcher
        self.observer = observer
        self.claim: Claim  # on its archive; set by the registry
        self.wanted = True
        self.target = settings.min_executors
        self.retry = False  # an operator wants another attempt at a FAILED version or executor
        self.state = VersionState.NEW
        self.failure: LoadFailed | None = None  # cause of the last failed load or resize
        self.settled = asyncio.Event()  # set when no further step towards the desired state is possible

    def enter(self, state: VersionState) -> None:
        """Change to a state; raise `IllegalTransition` if the transition is not legal."""
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"a version cannot go from {self.state.value} to {state.value}")
        self.state = state

    @property
    def living_executors(self) -> int:
        """The number of executors that have not given up, including those loading or restarting."""
        return sum(status.state is not ExecutorState.FAILED for status in self.pool.statuses())

    @property
    def has_living_executor(self) -> bool:
        """Whether any executor has not given up; read on every request."""
        # The first check usually decides, and is cheaper than a look at each executor.
        return self.pool.in_service > 0 or self.living_executors > 0

    @property
    def ready(self) -> bool:
        """Whether a request would run without waiting for a load."""
        return self.state is VersionState.READY and self.pool.in_service > 0

    @property
    def failure_text(self) -> str:
        """The message of the last failure of the version or of an executor; "" without one."""
        if self.failure is not None:
            return self.failure.detail
        return next((s.last_failure for s in self.pool.statuses() if s.last_failure), "")


def load_failure(version: Version) -> LoadFailed | None:
    """Return why a version is not loaded; None if it is loaded, even if a later scaling failed."""
    return version.failure if version.state is VersionState.FAILED else None


def condition(version: Version) -> str:
    """Return the state of a version; for a READY one without an executor in service, that of its executors.

    Probes, describe and the metric of states show it, so that they agree.
    """
    if version.state is not VersionState.READY or version.ready:
        return version.state.value
    states = {status.state for status in version.pool.statuses()}
    # A lost executor may still be called ready for a moment, until it is known how it ended.
    return next((state for state in _OUT_OF_SERVICE if state in states), ExecutorState.RESTARTING).value


class Step(Enum):
    """The steps of the reconciler."""

    LOAD = "load"
    RESIZE = "resize"
    UNLOAD = "unload"  # drain and free everything; then NEW, or GONE when the version is not wanted
    REMOVE = "remove"  # nothing is loaded: only forget the version


def next_step(version: Version) -> Step | None:
    """Return the next step towards the desired state; None when no step is possible or needed."""
    state, target = version.state, version.target
    if not version.wanted:
        return _towards_gone(state)
    if state is VersionState.NEW and target > 0:
        return Step.LOAD
    if state is VersionState.FAILED and version.retry:
        return Step.LOAD if target > 0 else None
    if state is VersionState.READY and (target != version.pool.size or version.retry):
        return Step.RESIZE if target > 0 else Step.UNLOAD
    return None


def _towards_gone(state: VersionState) -> Step | None:
    if state in (VersionState.NEW, VersionState.FAILED):
        return Step.REMOVE
    return Step.UNLOAD if state is VersionState.READY else None
