"""What every batcher has in common: the door, the deadlines, and the end.

Everything here runs on the event loop, so there is no lock; nothing blocks.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from torchere.serving.batching.pending import Pending, Reply, alone
from torchere.serving.batching.prediction import ServiceTime, rounds_until
from torchere.serving.batching.quarantine import Quarantine, Verdict
from torchere.serving.batching.running import RunningBatch
from torchere.serving.batching.unread_parts import LEAST_LIMIT_BYTES, UnreadParts
from torchere.serving.errors import (
    Cancelled,
    DeadlineExceeded,
    HandlerFailed,
    LeftUnread,
    Quarantined,
    ServingError,
    Unavailable,
)
from torchere.serving.execution.executor import BatchReport, ExecutorPool, ExecutorState
from torchere.serving.types import NO_DEADLINE, InferRequest

LATE = "The deadline of the request passed before there was an answer."

logger = logging.getLogger(__name__)


class BatchObserver(Protocol):
    """Who wants to know what ran; called on the event loop after a batch is answered."""

    def batches_running(self, batches: int, now_s: float) -> None:
        """The number of batches that executors have, or were sent, has changed to `batches`."""

    def batch_finished(self, batch: RunningBatch, report: BatchReport, executor_s: float) -> None:
        """`executor_s` is from dispatch to report; the executor ran `batch.rounds` batches in it."""

    def left_unread(self) -> None:
        """A streamed answer was given up, because its client read it too slowly."""


class Admission(ABC):
    """Admits requests of one version, and knows when the last of them is answered.

    A request that was admitted holds the version: `drain` returns when the last one is finished. `refusal`
    is the error text for a request that can't be admitted (the contract words it with the model's name).
    """

    isolates_suspects = True  # whether a request may be made to run alone
    unread_limit_bytes = LEAST_LIMIT_BYTES  # of one streamed answer; see `unread_parts.py`

    def __init__(
        self, pool: ExecutorPool, *, observer: BatchObserver, now: Callable[[], float], refusal: str
    ) -> None:
        self.quarantine = Quarantine(now=now)
        self._pool = pool
        self._observer = observer
        self._now = now
        self.refusal = refusal
        self._loop = asyncio.get_running_loop()
        self._service_time = ServiceTime()
        self._pumping_soon = False
        self._was_alone = False  # the last batch was a single request, and none was left behind
        self._batches: set[RunningBatch] = set()  # that executors have
        self._closed = self._closed_for_good = False
        self._idle: asyncio.Event | None = None  # somebody waits until nothing is in

    @property
    @abstractmethod
    def queue_length(self) -> int:
        """How many requests wait."""

    @property
    @abstractmethod
    def queue_capacity(self) -> int:
        """How many more may wait."""

    @abstractmethod
    def pump(self) -> None:
        """Dispatch all that can be dispatched now; call it whenever an executor came free."""

    @abstractmethod
    def _enqueue(self, pending: Pending) -> None:
        """Take a request that passed the door; raises `QueueFull` or `Unavailable` to refuse it after all."""

    @abstractmethod
    def _remove(self, pending: Pending) -> None:
        """Take a request out that waits; without effect when it doesn't."""

    @abstractmethod
    def _waiting(self) -> list[Pending]:
        """All requests that wait."""

    @abstractmethod
    def _requeue(self, pending: Pending) -> None:
        """Make a request that was taken to be run, and was not begun, the first in line again."""

    def submit(self, request: InferRequest, reply: Reply, group: str = "") -> Pending:
        """Admit a request; unless this raises, `reply` gets its answer or an error in any case.

        Raises:
            QueueFull: too many wait already.
            Unavailable: the batcher is closed.
            DeadlineExceeded: the request came too late to be worth an answer.
            Quarantined: it crashed executors before.
        """
        now_s = self._now()
        if self._closed:
            raise Unavailable(self.refusal)
        if request.deadline_s <= now_s:
            raise DeadlineExceeded(LATE)
        pending = Pending(request, group, now_s, reply)
        if self.quarantine.active:
            self._screen(pending)
        self._enqueue(pending)
        if request.deadline_s != NO_DEADLINE:
            pending.deadline_timer = self._loop.call_later(
                request.deadline_s - now_s, self.withdraw, pending, DeadlineExceeded(LATE)
            )
        if self._pumping_soon:
            return pending
        if self._takes_company:
            self._pump_soon()
        else:
            self.pump()
        return pending

    def hurry(self) -> None:
        """Run what waits at once, on the loop, when the last batch was a single request, as this one will be.

        If the turn brings more after all, they share the next batch. Call it after `submit` returned: the
        request may be answered in here.
        """
        if self._pumping_soon and self._was_alone and self._pool.on_loop:
            self.pump()

    @property
    def _takes_company(self) -> bool:
        """Whether what else comes in this turn of the loop may share the batch, and is worth the turn."""
        return self._pool.on_loop

    def _pump_soon(self) -> None:
        """Pump when all has come in that this turn of the loop brings."""
        if not self._pumping_soon:
            self._pumping_soon = True
            self._loop.call_soon(self._pump_now)

    def _pump_now(self) -> None:
        self._pumping_soon = False
        self.pump()

    def withdraw(self, pending: Pending, reason: ServingError | None = None) -> None:
        """Answer a request with `reason` (None: its client went away); it runs only if it runs already."""
        self._remove(pending)
        pending.finish(reason or Cancelled())
        self._settle()

    def unread_parts(self, pending: Pending) -> UnreadParts:
        """Where the parts of a streamed answer wait for its client."""
        return UnreadParts(self.unread_limit_bytes, partial(self._given_up, pending))

    def _given_up(self, pending: Pending, reason: ServingError) -> None:
        """Nobody takes the rest of a streamed answer."""
        if isinstance(reason, LeftUnread):
            self._observer.left_unread()
            logger.warning("request %s: %s %s", pending.request.request_id, reason, reason.detail)
        self.withdraw(pending, reason)

    def _screen(self, pending: Pending) -> None:
        """Raise `Quarantined` for a request that is convicted; see that one that is suspect runs alone."""
        verdict = self.quarantine.verdict(pending.request)
        if verdict is Verdict.CONVICTED:
            raise Quarantined
        if verdict is Verdict.SUSPECT and self.isolates_suspects:
            pending.group = alone(pending.request)

    def _judged(self, batch: RunningBatch, report: BatchReport) -> BatchReport:
        """The report after the quarantine learnt from it; what waits is looked at again."""
        requests = [pending.request for pending in batch.pendings]
        judged = self.quarantine.judge(requests, report, batch.dispatched_s)
        for pending in self._waiting() if self.quarantine.active else ():
            try:
                self._screen(pending)
            except Quarantined as reason:
                self.withdraw(pending, reason)
        return judged

    def _is_live(self, pending: Pending, now_s: float) -> bool:
        """Whether a request is still worth running; the caller answers one that is late."""
        # Where nobody else wants an executor nothing is lost by trying, and the estimate learns from it.
        needed_s = 0.0 if self._is_idle else self._service_time.mean_s
        if pending.request.deadline_s <= now_s + needed_s:
            if pending.request.deadline_s > now_s:  # it would expire in the executor
                self._service_time.dropped()
            return False
        pending.dequeued_s = pending.dequeued_s or now_s
        return True

    def _run_live(self, taken: Sequence[Pending], executor_id: int | None = None) -> list[Pending]:
        """Run those of the requests taken that are live; answers the others, which it returns."""
        now_s = self._now()
        live: list[Pending] = []
        late: list[Pending] = []
        for pending in taken:
            (live if self._is_live(pending, now_s) else late).append(pending)
        ahead = executor_id is None and len(live) > 1 and not self._pool.free
        rounds = 1 if executor_id is not None else rounds_until(len(self._batches), self._pool.in_service)
        batch = RunningBatch(self, live, now_s, executor_id, rounds, ahead=ahead)
        if live:
            self._batches.add(batch)  # whoever is answered may end another request, which asks what is in
            self._observer.batches_running(len(self._batches), now_s)
        for pending in late:
            pending.finish(DeadlineExceeded(LATE))
        if live:
            self._pool.submit([one.request for one in live], batch, executor_id, behind=self.queue_length)
        self._settle()
        return late

    def batch_done(self, batch: RunningBatch, report: BatchReport) -> None:
        """Answer the requests of a batch; `RunningBatch` calls it."""
        self._batches.discard(batch)
        self._observer.batches_running(len(self._batches), self._now())
        if self.quarantine.concerns(report):
            report = self._judged(batch, report)
        if self._answer(batch, report):
            executor_s = self._now() - batch.dispatched_s
            self._service_time.observe(executor_s / batch.rounds)
            self._settle()
            self.pump()
            self._observer.batch_finished(batch, report, executor_s)

    @abstractmethod
    def _answer(self, batch: RunningBatch, report: BatchReport) -> bool:
        """Give each request its outcome; False when they are to run once more instead."""

    def batch_returned(self, batch: RunningBatch) -> None:
        """No executor began with the batch: it was lost before, or nobody waits any more."""
        self._batches.discard(batch)
        self._observer.batches_running(len(self._batches), self._now())
        self._put_back(batch.pendings)

    def _put_back(self, pendings: Sequence[Pending]) -> None:
        """Have requests wait again; who has part of an answer, or waits no more, does not."""
        for pending in reversed(pendings):
            if pending.stream is not None:
                pending.finish(HandlerFailed())
            elif pending.open:
                pending.dequeued_s = 0.0
                self._requeue(pending)
        self._settle()
        self.pump()

    @property
    def _is_idle(self) -> bool:
        return not (self._batches or self.queue_length)

    def _settle(self) -> None:
        if self._idle is not None and self._is_idle:
            self._idle.set()
            self._idle = None

    def oldest_age_s(self, now_s: float) -> float:
        """How long the oldest waiting request has waited at `now_s`; 0 when none does."""
        return max((now_s - pending.enqueued_s for pending in self._waiting()), default=0.0)

    @property
    def predicted_s(self) -> float:
        """How long a batch is expected to be in an executor; 0 before the first."""
        return self._service_time.mean_s

    def close_admission(self, *, for_good: bool = False) -> None:
        """Refuse what comes from now on; what is in goes on."""
        self._closed, self._closed_for_good = True, self._closed_for_good or for_good

    def open_admission(self) -> None:
        """Admit again, unless it is closed for good."""
        self._closed = self._closed_for_good

    async def drain(self, timeout_s: float) -> bool:
        """Wait until everything that is in is answered; False when the time was not enough."""
        if self._is_idle:
            return True
        self._idle = idle = self._idle or asyncio.Event()
        try:
            await asyncio.wait_for(idle.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True

    def _end_if_given_up(self) -> None:
        """Answer all that wait once every executor has given up: none comes back by itself."""
        if {status.state for status in self._pool.statuses()} == {ExecutorState.FAILED}:
            self.fail_queued(Unavailable(self.refusal))

    def fail_queued(self, reason: ServingError) -> None:
        """Answer all that wait with `reason`: nobody is left to run them."""
        for pending in self._waiting():
            self.withdraw(pending, reason)
