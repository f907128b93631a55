"""What every batcher has in common: admission, deadlines, reports, and the drain.

Everything here runs on the event loop, so there is no lock; nothing blocks.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from torchere.serving.batching.quarantine import Quarantine, Verdict
from torchere.serving.batching.request import Request, alone
from torchere.serving.batching.service_time import ServiceTime
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
from torchere.serving.types import NO_DEADLINE, InferResponse
from torchere.serving.workers.executor import BatchReport, ExecutorState, ExecutorStatus
from torchere.serving.workers.run import Run

LATE = "The deadline of the request passed before there was an answer."

logger = logging.getLogger(__name__)


class Pool(Protocol):
    """The executors of one version, as the batcher sees them (`execution/pool.py`)."""

    @property
    def free(self) -> int:
        """How many runs may be submitted for idle executors."""

    @property
    def ahead(self) -> int:
        """How many runs of full batches may be submitted in all."""

    @property
    def empty(self) -> int:
        """How many runs may be submitted that must be alone in their process."""

    @property
    def in_service(self) -> int:
        """How many executors are ready, busy or not."""

    def idle_ids(self) -> tuple[int, ...]:
        """The executors that are in service and have nothing to do."""

    def submit(self, run: Run) -> None:
        """Run a batch; the caller has seen room for it."""

    def statuses(self) -> tuple[ExecutorStatus, ...]:
        """A snapshot of every executor, oldest first."""


class BatchObserver(Protocol):
    """Learns of batches; called on the event loop."""

    def batches_running(self, batches: int, now_s: float) -> None:
        """The number of batches that executors have, or were sent, has changed to `batches`."""

    def batch_finished(self, run: Run, report: BatchReport, executor_s: float) -> None:
        """A run was answered; `executor_s` is from when a lane began with it to its report."""

    def left_unread(self) -> None:
        """A streamed answer was given up, because its client read it too slowly."""


class Deadlines:
    """Answers requests at their deadlines, with one timer for all of them. Lives on the event loop."""

    def __init__(self, expire: Callable[[Request], None], now: Callable[[], float]) -> None:
        self._expire = expire
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._requests: set[Request] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = NO_DEADLINE

    def add(self, request: Request) -> None:
        """Watch a request until it is discarded."""
        self._requests.add(request)
        if request.deadline_s < self._due_s:
            self._look_at(request.deadline_s)

    def discard(self, request: Request) -> None:
        """Watch a request no longer; without effect when it is not watched."""
        self._requests.discard(request)

    def _look_at(self, due_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due_s = due_s
        self._timer = self._loop.call_later(max(0.0, due_s - self._now()), self._look)

    def _look(self) -> None:
        self._timer, self._due_s = None, NO_DEADLINE
        now_s = self._now()
        for request in [one for one in self._requests if one.deadline_s <= now_s]:
            self._requests.discard(request)
            self._expire(request)
        due_s = min((one.deadline_s for one in self._requests), default=NO_DEADLINE)
        if due_s < self._due_s:
            self._look_at(due_s)


class Admission(ABC):
    """Admits requests of one version, and knows when the last of them is answered.

    A request that was admitted holds the version: `drain` returns when the last one is finished. `refusal`
    is the error text for a request that can't be admitted (the contract words it with the model's name).
    """

    isolates_suspects = True  # whether a request may be made to run alone
    unread_limit_bytes = LEAST_LIMIT_BYTES  # of one streamed answer; see `unread_parts.py`

    def __init__(
        self, pool: Pool, *, observer: BatchObserver, now: Callable[[], float], refusal: str
    ) -> None:
        self.quarantine = Quarantine(now=now)
        self._pool = pool
        self._observer = observer
        self._now = now
        self.refusal = refusal
        self._loop = asyncio.get_running_loop()
        self._service_time = ServiceTime()
        self._deadlines = Deadlines(self._expired, now)
        self._pumping_soon = False
        self._runs: dict[Run, None] = {}  # inside executors, in the order they were dispatched
        self._closed = self._closed_for_good = False
        self._idle: asyncio.Event | None = None  # set when nothing is in

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
    def _enqueue(self, request: Request) -> None:
        """Queue a request; raises `QueueFull` or `Unavailable` to refuse it after all."""

    @abstractmethod
    def _remove(self, request: Request) -> None:
        """Take a waiting request out; without effect when it does not wait."""

    @abstractmethod
    def _waiting(self) -> list[Request]:
        """All requests that wait."""

    @abstractmethod
    def _requeue(self, request: Request) -> None:
        """Make a request that was dispatched, and was not begun, the first in line again."""

    @property
    def _takes_company(self) -> bool:
        """Whether other requests of this turn of the loop may share the batch, which is worth the turn."""
        return False

    def submit(self, request: Request) -> None:
        """Admit a request; unless this raises, it gets its answer or an error in any case.

        Raises:
            QueueFull: too many wait already.
            Unavailable: the batcher is closed.
            DeadlineExceeded: the request came too late to be worth an answer.
            Quarantined: it crashed workers before.
        """
        now_s = self._now()
        if self._closed:
            raise Unavailable(self.refusal)
        if request.deadline_s <= now_s:
            raise DeadlineExceeded(LATE)
        request.enqueued_s = now_s
        if self.quarantine.active:
            self._screen(request)
        self._enqueue(request)
        if request.deadline_s != NO_DEADLINE:
            self._deadlines.add(request)
        if self._pumping_soon:
            return
        if self._takes_company:
            self._pumping_soon = True
            self._loop.call_soon(self._pump_now)
        else:
            self.pump()

    def _pump_now(self) -> None:
        self._pumping_soon = False
        self.pump()

    def withdraw(self, request: Request, reason: ServingError | None = None) -> None:
        """Answer a request with `reason` (None: its client went away); one that has not begun never does."""
        self._remove(request)
        request.cancel_run()
        self._finish(request, reason or Cancelled())
        self._settle()

    def _expired(self, request: Request) -> None:
        self.withdraw(request, DeadlineExceeded(LATE))

    def _finish(self, request: Request, outcome: InferResponse | ServingError) -> None:
        if request.deadline_s != NO_DEADLINE:
            self._deadlines.discard(request)
        request.finish(outcome)

    def unread_parts(self, request: Request) -> UnreadParts:
        """Where the parts of a streamed answer wait for its client."""
        return UnreadParts(self.unread_limit_bytes, partial(self._given_up, request))

    def _given_up(self, request: Request, reason: ServingError) -> None:
        """The client does not take the rest of a streamed answer."""
        if isinstance(reason, LeftUnread):
            self._observer.left_unread()
            logger.warning("request %s: %s %s", request.request_id, reason, reason.detail)
        self.withdraw(request, reason)

    def _screen(self, request: Request) -> None:
        """Raise `Quarantined` for a request that is convicted; see that one that is suspect runs alone."""
        verdict = self.quarantine.verdict(request)
        if verdict is Verdict.CONVICTED:
            raise Quarantined
        if verdict is Verdict.SUSPECT and self.isolates_suspects:
            request.group = alone(request.request_id)
            request.suspect = True

    def _judged(self, run: Run, report: BatchReport, began_s: float) -> BatchReport:
        """The report after the quarantine learnt from it; requests that wait are looked at again."""
        # A stateful handler's worker has one lane, so that its batch is all there is in the process.
        alone_there = (run.exclusive or not self.isolates_suspects) and not run.shares_process
        judged = self.quarantine.judge(run.requests, report, began_s, alone=alone_there)
        for request in self._waiting() if self.quarantine.active else ():
            try:
                self._screen(request)
            except Quarantined as reason:
                self.withdraw(request, reason)
        return judged

    def _is_live(self, request: Request, now_s: float) -> bool:
        """Whether a request is still worth running; the caller answers one that is late."""
        # With no other request in, nothing is lost by trying, and the estimate learns from it.
        needed_s = 0.0 if self._is_idle else self._service_time.mean_s
        if request.deadline_s <= now_s + needed_s:
            if request.deadline_s > now_s:  # it would expire in the executor
                self._service_time.dropped()
            return False
        return True

    def _run_live(self, taken: Sequence[Request], executor_id: int | None = None) -> list[Request]:
        """Run those of the requests taken that are live; answers the others, which it returns."""
        now_s = self._now()
        live: list[Request] = []
        late: list[Request] = []
        for request in taken:
            if request.deadline_s == NO_DEADLINE or self._is_live(request, now_s):
                request.dequeued_s = request.dequeued_s or now_s
                live.append(request)
            else:
                late.append(request)
        if live:
            run = Run(live, self, now_s, executor_id, exclusive=live[0].suspect)
            for request in live:
                request.running = run
            self._runs[run] = None
            self._observer.batches_running(len(self._runs), now_s)
            self._pool.submit(run)
        for request in late:  # behind that: an answer may withdraw another request, which must find its run
            self._finish(request, DeadlineExceeded(LATE))
        self._settle()
        return late

    def run_part(self, run: Run, index: int, part: InferResponse) -> UnreadParts | None:
        """See `RunOwner`."""
        request: Request = run.requests[index]
        return request.add_part(part, self.unread_parts)

    def run_done(self, run: Run, report: BatchReport) -> None:
        """Answer the requests of a run; see `RunOwner`."""
        self._ended(run)
        began_s = report.began_s or run.dispatched_s
        if self.quarantine.concerns(report):
            report = self._judged(run, report, began_s)
        if self._answer(run, report, began_s):
            executor_s = self._now() - began_s
            self._service_time.observe(executor_s)
            self._settle()
            self.pump()
            self._observer.batch_finished(run, report, executor_s)

    @abstractmethod
    def _answer(self, run: Run, report: BatchReport, began_s: float) -> bool:
        """Give each request its outcome; False when they are to run once more instead."""

    def run_returned(self, run: Run) -> None:
        """Take back a run that no lane has begun; see `RunOwner`."""
        self._ended(run)
        self._put_back(run.requests)

    def _ended(self, run: Run) -> None:
        self._runs.pop(run, None)
        self._observer.batches_running(len(self._runs), self._now())

    def _put_back(self, requests: Sequence[Request]) -> None:
        """Have requests wait again; those with a part of an answer, and those that are over, do not."""
        for request in reversed(requests):
            request.running = None
            if request.parts is not None:
                self._finish(request, HandlerFailed())
            elif request.open:
                request.dequeued_s = 0.0
                try:
                    if self.quarantine.active:
                        self._screen(request)
                except Quarantined as reason:
                    self._finish(request, reason)
                else:
                    self._requeue(request)
        self._settle()
        self.pump()

    @property
    def _is_idle(self) -> bool:
        return not (self._runs or self.queue_length)

    def _settle(self) -> None:
        if self._idle is not None and self._is_idle:
            self._idle.set()
            self._idle = None

    def oldest_age_s(self, now_s: float) -> float:
        """How long the oldest waiting request has waited at `now_s`; 0 when none does."""
        return max((now_s - request.enqueued_s for request in self._waiting()), default=0.0)

    @property
    def predicted_s(self) -> float:
        """How long a batch is expected to be in an executor; 0 before the first."""
        return self._service_time.mean_s

    def close_admission(self, *, for_good: bool = False) -> None:
        """Refuse requests from now on; those that are in go on."""
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
        """Answer all that wait with `reason`: no executor is left to run them."""
        for request in self._waiting():
            self.withdraw(request, reason)
