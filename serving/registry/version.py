"""The life of a version: its states, the legal steps between them, and what is known of one version."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import Enum

from torchere.serving.batching.admission import Admission
from torchere.serving.errors import LoadFailed
from torchere.serving.execution.executor import ExecutorState
from torchere.serving.execution.pool import WorkerPool
from torchere.serving.registry.observer import VersionObserver
from torchere.serving.registry.store import StoredArchive
from torchere.serving.settings import ModelSettings
from torchere.serving.types import ModelKey


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
