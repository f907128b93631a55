"""The life of a version: its states, the legal steps between them, and what is known of one version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from torchere.handlers.metric_types import MetricDeclaration
from torchere.serving.batching.admission import Admission
from torchere.serving.config.server_settings import ModelSettings
from torchere.serving.errors import LoadFailed
from torchere.serving.store.package import StoredArchive
from torchere.serving.telemetry.numbers import VersionNumbers
from torchere.serving.types import ModelKey
from torchere.serving.workers.executor import BatchReport, ExecutorState
from torchere.serving.workers.pool import WorkerPool
from torchere.serving.workers.run import Run


class VersionState(Enum):
    """States of one version, in the order of an ordinary life."""

    NEW = "new"  # registered; nothing is loaded, because nobody asked for an executor yet
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"  # admits nothing, finishes what is in
    UNLOADING = "unloading"
    GONE = "gone"
    FAILED = "failed"  # could not be loaded; the cause is kept


TRANSITIONS: dict[VersionState, frozenset[VersionState]] = {
    VersionState.NEW: frozenset({VersionState.LOADING, VersionState.GONE}),
    VersionState.LOADING: frozenset({VersionState.WARMING, VersionState.FAILED, VersionState.DRAINING}),
    VersionState.WARMING: frozenset({VersionState.READY, VersionState.FAILED, VersionState.DRAINING}),
    VersionState.READY: frozenset({VersionState.DRAINING}),
    VersionState.DRAINING: frozenset({VersionState.UNLOADING}),
    VersionState.UNLOADING: frozenset({VersionState.NEW, VersionState.GONE}),
    VersionState.FAILED: frozenset({VersionState.LOADING, VersionState.GONE}),
    VersionState.GONE: frozenset(),
}


class IllegalTransition(RuntimeError):
    """A step that the life of a version does not have: a bug in the reconciler."""


def check_transition(old: VersionState, new: VersionState) -> VersionState:
    """Return `new` if a version may go there from `old`.

    Raises:
        IllegalTransition: when it may not.
    """
    if new not in TRANSITIONS[old]:
        raise IllegalTransition(f"a version cannot go from {old.value} to {new.value}")
    return new


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a version came from and what it runs; fixed at registration."""

    archive: StoredArchive
    handler: str
    runtime: str
    isolation: str  # "thread" | "process" | "shared"
    loaded_at_startup: bool


class Version:
    """One registered version: what is wanted of it, and what it is. Lives on the event loop.

    The registry changes what is wanted (`wanted`, `settings`, `target`, `retry`), the reconciler alone what
    is (`state`, `failure`). A request holds the version by being in its batcher: draining waits for that.
    """

    def __init__(
        self,
        key: ModelKey,
        origin: Origin,
        settings: ModelSettings,
        pool: WorkerPool,
        batcher: Admission,
        *,
        observer: VersionObserver,
    ) -> None:
        self.key = key
        self.origin = origin
        self.settings = settings
        self.pool = pool
        self.batcher = batcher
        self.observer = observer
        self.wanted = True
        self.target = settings.min_executors
        self.retry = False  # somebody asked to try a FAILED version again
        self.state = VersionState.NEW
        self.failure: LoadFailed | None = None  # why the last load or resize went wrong
        self.settled = asyncio.Event()  # what is equals what is wanted, as far as it can

    def enter(self, state: VersionState) -> None:
        """Step to the next state of the life."""
        self.state = check_transition(self.state, state)

    @property
    def living_executors(self) -> int:
        """Executors that have not given up: those still loading or restarting count."""
        return sum(status.state is not ExecutorState.FAILED for status in self.pool.statuses())

    @property
    def has_living_executor(self) -> bool:
        """Whether there are any of those; every request asks."""
        if self.pool.in_service:  # the rule, and cheaper than a look at each
            return True
        return any(status.state is not ExecutorState.FAILED for status in self.pool.statuses())

    @property
    def ready(self) -> bool:
        """Whether a request would be run without waiting for a load."""
        return self.state is VersionState.READY and self.pool.in_service > 0

    @property
    def failure_text(self) -> str:
        """Why it is not what it should be, in words; "" when all is well."""
        if self.failure is not None:
            return self.failure.detail
        return next((s.last_failure for s in self.pool.statuses() if s.last_failure), "")


class Step(Enum):
    """What the reconciler can do."""

    LOAD = "load"
    RESIZE = "resize"
    UNLOAD = "unload"  # drain, free everything; back to NEW, or on to GONE when it is not wanted
    REMOVE = "remove"  # nothing is loaded: just forget it


class VersionView(NamedTuple):
    """What the policy may look at."""

    state: VersionState
    wanted: bool
    target: int  # executors wanted
    size: int  # executors there are
    retry: bool  # a FAILED version, or an executor that gave up, is to be tried again


def next_step(view: VersionView) -> Step | None:
    """The single next step towards what is wanted; None: nothing can or need be done."""
    if not view.wanted:
        return _towards_gone(view.state)
    if view.state is VersionState.NEW and view.target > 0:
        return Step.LOAD
    if view.state is VersionState.FAILED and view.retry:
        return Step.LOAD if view.target > 0 else None
    if view.state is VersionState.READY and (view.target != view.size or view.retry):
        return Step.RESIZE if view.target > 0 else Step.UNLOAD
    return None


def _towards_gone(state: VersionState) -> Step | None:
    if state in (VersionState.NEW, VersionState.FAILED):
        return Step.REMOVE
    return Step.UNLOAD if state is VersionState.READY else None


def scaled_target(size: int, min_executors: int, max_executors: int) -> int:
    """How many executors a version gets: it is moved no further than into the range."""
    return min(max(size, min_executors), max_executors)


class VersionObserver(Protocol):
    """Watches one version. Called on the event loop."""

    @property
    def meter(self) -> VersionNumbers:
        """What counts its requests."""

    def batches_running(self, batches: int, now_s: float) -> None:
        """The number of batches that executors have, or were sent, has changed to `batches`."""

    def batch_finished(self, run: Run, report: BatchReport, executor_s: float) -> None:
        """A run was answered, `executor_s` after a lane began with it."""

    def left_unread(self) -> None:
        """A streamed answer was given up, because its client read it too slowly."""

    def executor_loaded(self, executor_id: int, load_s: float) -> None:
        """An executor is ready, `load_s` after it was started."""

    def executor_lost(self, reason: str) -> None:
        """An executor was lost, and comes back if it can; `reason` is one of a fixed set of words."""


class RegistryObserver(Protocol):
    """Watches a registry. Called on the event loop."""

    @property
    def declared_metrics(self) -> tuple[MetricDeclaration, ...]:
        """The metrics that handlers find in `context.metrics`."""

    def watch(self, key: ModelKey) -> VersionObserver:
        """A version is being built."""

    def registered(self, version: Version, weight: Callable[[], float]) -> None:
        """It is in the serving map now.

        It tells at any time how loaded it is, and `weight` its share of the requests that name no version.
        """

    def gone(self, version: Version, *, was_last: bool) -> None:
        """A version is gone; `was_last` when the model has no other."""
