"""One version's queue and its dispatcher: admits, waits for company, hands batches to the executors.

Everything here runs on the event loop, so there is no lock; nothing blocks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol

from torchere.serving.batching.pending import Pending
from torchere.serving.batching.policy import Dispatch, QueueView, WaitUntil, plan
from torchere.serving.errors import Cancelled, DeadlineExceeded, QueueFull, ServingError, Unavailable
from torchere.serving.execution.executor import BatchReport, ExecutorPool
from torchere.serving.settings import BatchSettings
from torchere.serving.types import NO_DEADLINE, InferRequest, InferResponse


class BatchObserver(Protocol):
    """Who wants to know what ran; called on the event loop after a batch is answered."""

    def batch_finished(self, pendings: Sequence[Pending], report: BatchReport, executor_s: float) -> None:
        """`executor_s` is from dispatch to report."""


class Batcher:
    """Admission, queue and dispatch of one version.

    A request that was admitted holds the version: `drain` returns when the last one is finished. `refusal`
    is the error text for a request that can't be admitted (the contract words it with the model's name).
    """

    def __init__(
        self,
        settings: BatchSettings,
        pool: ExecutorPool,
        *,
        observer: BatchObserver,
        now: Callable[[], float],
        refusal: str,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._observer = observer
        self._now = now
        self.refusal = refusal
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Pending] = deque()
        self._running: set[_RunningBatch] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed: ServingError | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def queue_length(self) -> int:
        """How many requests wait."""
        return len(self._queue)

    @property
    def queue_capacity(self) -> int:
        """How many more may wait."""
        return max(0, self._settings.max_queue_size - len(self._queue))

    def submit(self, request: InferRequest, group: str = "") -> Pending:
        """Admit a request; its `Pending` is finished in any case.

        Raises:
            QueueFull: too many wait already.
            Unavailable: the batcher is closed.
            DeadlineExceeded: the request came too late to be worth an answer.
        """
        now_s = self._now()
        self._refuse_if_pointless(request, now_s)
        pending = Pending(request, group, now_s, self._loop)
        if request.deadline_s != NO_DEADLINE:
            pending.deadline_timer = self._loop.call_later(
                request.deadline_s - now_s, self.withdraw, pending, DeadlineExceeded(_LATE)
            )
        self._queue.append(pending)
        self._idle.clear()
        self.pump()
        return pending

    def _refuse_if_pointless(self, request: InferRequest, now_s: float) -> None:
        if self._closed is not None:
            raise self._closed
        if request.deadline_s <= now_s:
            raise DeadlineExceeded(_LATE)
        if len(self._queue) >= self._settings.max_queue_size:
            raise QueueFull(self.refusal)

    def withdraw(self, pending: Pending, reason: ServingError | None = None) -> None:
        """Answer a request with `reason` (None: its client went away) and run it only if it runs already."""
        if not pending.dequeued_s and pending in self._queue:
            self._queue.remove(pending)
        pending.finish(reason or Cancelled("the client went away"))
        self._settle()

    def pump(self) -> None:
        """Dispatch all that can be dispatched now; call it whenever an executor came free."""
        while isinstance(action := plan(self._view(), self._settings, self._now()), Dispatch):
            self._dispatch(action.size)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if isinstance(action, WaitUntil):
            self._timer = self._loop.call_later(max(0.0, action.at_s - self._now()), self.pump)

    def _view(self) -> QueueView:
        if not self._queue:
            return QueueView(0, False, 0.0, 0)
        head = self._queue[0]
        run = 0
        for pending in islice(self._queue, self._settings.max_batch_size):
            if pending.group != head.group:
                return QueueView(run, True, head.enqueued_s, self._pool.free)
            run += 1
        return QueueView(run, False, head.enqueued_s, self._pool.free)

    def _dispatch(self, count: int) -> None:
        now_s = self._now()
        live = []
        for pending in (self._queue.popleft() for _ in range(count)):
            if pending.request.deadline_s <= now_s:  # its timer is due in this turn of the loop
                pending.finish(DeadlineExceeded(_LATE))
                continue
            pending.dequeued_s = now_s
            live.append(pending)
        if live:
            batch = _RunningBatch(self, live, now_s)
            self._running.add(batch)
            self._pool.submit([pending.request for pending in live], batch)
        self._settle()

    def _batch_done(self, batch: _RunningBatch, report: BatchReport) -> None:
        self._running.discard(batch)
        for pending, outcome in zip(batch.pendings, report.outcomes, strict=True):
            pending.finish(outcome)
        self._observer.batch_finished(batch.pendings, report, self._now() - batch.dispatched_s)
        self._settle()
        self.pump()

    def _settle(self) -> None:
        if not self._queue and not self._running:
            self._idle.set()

    def close_admission(self, reason: ServingError | None = None) -> None:
        """Refuse what comes from now on; what is in goes on."""
        self._closed = reason or Unavailable(self.refusal)

    def open_admission(self) -> None:
        """Admit again."""
        self._closed = None

    async def drain(self, timeout_s: float) -> bool:
        """Wait until everything that is in is answered; False when the time was not enough."""
        if self._idle.is_set():
            return True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True

    def fail_queued(self, reason: ServingError) -> None:
        """Answer all that wait with `reason`: nobody is left to run them."""
        while self._queue:
            self._queue.popleft().finish(reason)
        self._settle()


class _RunningBatch:
    """The sink of one dispatched batch."""

    __slots__ = ("_batcher", "dispatched_s", "pendings")

    def __init__(self, batcher: Batcher, pendings: list[Pending], dispatched_s: float) -> None:
        self._batcher = batcher
        self.pendings = pendings
        self.dispatched_s = dispatched_s

    def partial(self, index: int, part: InferResponse) -> None:
        self.pendings[index].add_part(part)

    def done(self, report: BatchReport) -> None:
        self._batcher._batch_done(self, report)


_LATE = "The deadline of the request passed before there was an answer."
