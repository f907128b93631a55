"""The base class of the batchers: admission, deadlines, service times, batch reports, and the drain.

All code here runs on the event loop, so it needs no lock, and does not block.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from torchere.serving.access.client_limits import QUEUE_SHARE
from torchere.serving.batching.fair_queue import FairQueue
from torchere.serving.batching.policy import NOT_DUE
from torchere.serving.batching.quarantine import Quarantine, Verdict
from torchere.serving.batching.request import Request, alone
from torchere.serving.batching.unread_parts import LEAST_LIMIT_BYTES, UnreadParts
from torchere.serving.config.server_settings import BatchSettings
from torchere.serving.errors import (
    Cancelled,
    DeadlineExceeded,
    ExecutorDied,
    HandlerFailed,
    LeftUnread,
    Quarantined,
    QueueFull,
    Restarting,
    ServingError,
    Unavailable,
)
from torchere.serving.types import NO_DEADLINE, InferResponse
from torchere.serving.workers.executor import BatchReport, ExecutorState
from torchere.serving.workers.pool import WorkerPool
from torchere.serving.workers.run import Run

MIN_RETRY_S = 1.0  # as for a full queue
LATE = "The deadline of the request passed before there was an answer."

logger = logging.getLogger(__name__)


class BatchObserver(Protocol):
    """Observes batches; called on the event loop."""

    def batches_running(self, batches: int, now_s: float) -> None:
        """Record that `batches` batches are now in executors or on their way to them."""

    def batch_finished(self, run: Run, report: BatchReport, executor_s: float) -> None:
        """Record that a batch was answered, `executor_s` seconds after an executor started it."""

    def left_unread(self) -> None:
        """Record that a streamed response was aborted because the client read it too slowly."""


class Deadlines:
    """Expires requests at their deadlines, with one timer for all of them. Lives on the event loop."""

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
        """Stop watching a request; without effect if it is not watched."""
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


_MEMORY = 0.9  # of the running mean, per batch
_FORGET = 0.95  # per request dropped because of the estimate: an estimate that drops all requests must decay
_MARGIN = 1.25  # on the estimate: executor times vary, and sending the answer takes time


class ServiceTime:
    """Estimates the time of a batch in an executor, to refuse requests that can't meet their deadline.

    Under overload, a first-come, first-served queue with deadlines starts every request just before it
    expires, and answers none in time. So a request whose answer would be late is refused on arrival, and one
    whose deadline would pass in the executor is not begun.
    """

    def __init__(self) -> None:
        self.mean_s = 0.0  # 0: no batch has run yet, so no request is dropped

    def observe(self, batch_s: float) -> None:
        """Record that an executor took `batch_s` seconds for a batch, not counting batches before it."""
        self.mean_s = _MEMORY * self.mean_s + (1 - _MEMORY) * batch_s if self.mean_s else batch_s

    def dropped(self) -> None:
        """Lower the estimate a little, because a request was dropped on account of it."""
        self.mean_s *= _FORGET

    def answer_s(self, batches_before: int, executors: int) -> float:
        """Return the estimated seconds until a request behind `batches_before` full batches is answered."""
        return (1 + batches_before // max(1, executors)) * self.mean_s * _MARGIN


class Admission(ABC):
    """Admits requests of one version, and tracks them until the last one is answered.

    `drain` returns when the last admitted request is finished. `refusal` is the error text for a request that
    can't be admitted (the contract puts the model's name into it).
    """

    isolates_suspects = True  # whether a suspect request runs alone in its process
    restart_wait_s = 10.0  # a request waits at most this long in an outage, counted from its beginning
    unread_limit_bytes = LEAST_LIMIT_BYTES  # of one streamed answer; see `unread_parts.py`

    def __init__(
        self,
        settings: BatchSettings,
        pool: WorkerPool,
        *,
        observer: BatchObserver,
        now: Callable[[], float],
        refusal: str,
    ) -> None:
        self.quarantine = Quarantine(now=now)
        self._settings = settings
        self._queue = FairQueue(settings.max_batch_size)
        self._pool = pool
        self._observer = observer
        self._now = now
        self.refusal = refusal
        self._loop = asyncio.get_running_loop()
        self._service_time = ServiceTime()
        self._deadlines = Deadlines(self._expired, now)
        self._pumping_soon = False
        self._timer: asyncio.TimerHandle | None = None  # of the next pump
        self._outage_timer: asyncio.TimerHandle | None = None
        self._runs: dict[Run, None] = {}  # inside executors, in the order they were dispatched
        self._closed = self._closed_for_good = False
        self._idle: asyncio.Event | None = None  # set when no request waits or runs

    @property
    @abstractmethod
    def queue_length(self) -> int:
        """The number of waiting requests."""

    @property
    def queue_capacity(self) -> int:
        """The number of further requests that may wait."""
        return max(0, self._settings.max_queue_size - self.queue_length)

    @abstractmethod
    def pump(self) -> None:
        """Dispatch all batches that can run now; call it whenever an executor becomes free."""

    @abstractmethod
    def _enqueue(self, request: Request) -> None:
        """Queue a request; raise `QueueFull` or `Unavailable` to refuse it."""

    @abstractmethod
    def _remove(self, request: Request) -> None:
        """Remove a waiting request; without effect if it does not wait."""

    def _waiting(self) -> list[Request]:
        """Return all waiting requests."""
        return list(self._queue)

    def _requeue(self, request: Request) -> None:
        """Put a request that was dispatched but not begun back at the head of the queue."""
        self._queue.put_back(request)

    @property
    def _takes_company(self) -> bool:
        """Whether to delay dispatch by one turn of the event loop, so that requests can share a batch."""
        return False

    def submit(self, request: Request) -> None:
        """Admit a request; unless this raises, the request always gets an answer or an error.

        Raises:
            QueueFull: too many requests wait already.
            Unavailable: the batcher is closed.
            DeadlineExceeded: the deadline of the request has passed.
            Quarantined: the request crashed workers before.
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
            self._pump_soon()
        else:
            self.pump()

    def _pump_soon(self) -> None:
        if not self._pumping_soon:
            self._pumping_soon = True
            self._loop.call_soon(self._pump_now)

    def _pump_now(self) -> None:
        self._pumping_soon = False
        self.pump()

    def _pump_at(self, due_s: float) -> None:
        """Pump at the time that `policy.due_s` returned, instead of the one set before."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due_s != NOT_DUE:
            self._timer = self._loop.call_later(max(0.0, due_s - self._now()), self.pump)

    def withdraw(self, request: Request, reason: ServingError | None = None) -> None:
        """Answer a request with `reason` (None: its client disconnected); if not begun, it does not run."""
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
        """Return a new queue for the parts of a streamed answer."""
        return UnreadParts(self.unread_limit_bytes, partial(self._given_up, request))

    def _given_up(self, request: Request, reason: ServingError) -> None:
        """Withdraw a request whose client does not take the rest of its streamed answer."""
        if isinstance(reason, LeftUnread):
            self._observer.left_unread()
            logger.warning("request %s: %s %s", request.request_id, reason, reason.detail)
        self.withdraw(request, reason)

    def _refuse_displaced(self, request: Request) -> None:
        """Refuse a waiting request that gave its place to another client's; see `FairQueue.displace`."""
        if request.account is not None:
            request.account.count_refusal(QUEUE_SHARE)
        self.withdraw(request, QueueFull(self.refusal))

    def _screen(self, request: Request) -> None:
        """Raise `Quarantined` for a convicted request; mark a suspect request to run alone."""
        verdict = self.quarantine.verdict(request)
        if verdict is Verdict.CONVICTED:
            raise Quarantined
        if verdict is Verdict.SUSPECT and self.isolates_suspects:
            request.group = alone(request.request_id)
            request.suspect = True

    def _judged(self, run: Run, report: BatchReport, began_s: float) -> BatchReport:
        """Pass a report through the quarantine and screen the waiting requests again."""
        # A stateful handler's worker has one lane, so its batch is always alone in the process.
        alone_there = (run.exclusive or not self.isolates_suspects) and not run.shares_process
        judged = self.quarantine.judge(run.requests, report, began_s, alone=alone_there)
        # Only a crash adds to the records; screening hashes the bodies, which may block the loop for long.
        has_learnt = any(isinstance(one, (ExecutorDied, Quarantined)) for one in judged.outcomes)
        for request in self._waiting() if has_learnt else ():
            try:
                self._screen(request)
            except Quarantined as reason:
                self.withdraw(request, reason)
        return judged

    def _is_live(self, request: Request, now_s: float) -> bool:
        """Return whether a request can be answered in time; the caller answers a late one."""
        # If no other request is admitted, running this one delays no other, and updates the estimate.
        needed_s = 0.0 if self._is_idle else self._service_time.mean_s
        if request.deadline_s <= now_s + needed_s:
            if request.deadline_s > now_s:  # dropped because of the estimate: it would expire in the executor
                self._service_time.dropped()
            return False
        return True

    def _run_live(self, taken: Sequence[Request], executor_id: int | None = None) -> list[Request]:
        """Run the taken requests that are live; answer the late ones and return them."""
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
        for request in late:  # after submit: an answer may withdraw another request, which must find its run
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
        """Give each request its outcome; return False if the requests are to run again instead."""

    def run_returned(self, run: Run) -> None:
        """Take back a run that no lane has begun; see `RunOwner`."""
        self._ended(run)
        self._put_back(run.requests)

    def _ended(self, run: Run) -> None:
        self._runs.pop(run, None)
        self._observer.batches_running(len(self._runs), self._now())

    def _put_back(self, requests: Sequence[Request]) -> None:
        """Requeue open requests; fail those that have sent a part of their answer."""
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
        """Return how long the oldest waiting request has waited at `now_s`; 0 if none waits."""
        return max((now_s - request.enqueued_s for request in self._waiting()), default=0.0)

    @property
    def predicted_s(self) -> float:
        """The expected time of a batch in an executor, in seconds; 0 before the first batch."""
        return self._service_time.mean_s

    def close_admission(self, *, for_good: bool = False) -> None:
        """Refuse requests from now on; admitted requests continue."""
        self._closed, self._closed_for_good = True, self._closed_for_good or for_good

    def open_admission(self) -> None:
        """Admit requests again, unless the admission is closed for good."""
        self._closed = self._closed_for_good

    async def drain(self, timeout_s: float) -> bool:
        """Wait until all admitted requests are answered; return False on a time-out."""
        if self._is_idle:
            return True
        self._idle = idle = self._idle or asyncio.Event()
        try:
            await asyncio.wait_for(idle.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True

    def _end_if_given_up(self) -> None:
        """Fail the waiting requests if every executor failed for good, or has restarted for too long."""
        if {status.state for status in self._pool.statuses()} == {ExecutorState.FAILED}:
            self.fail_queued(Unavailable(self.refusal))
        outage = self._pool.outage()
        if outage is None or not self._waiting():
            return
        now_s = self._now()
        rest_s = outage.since_s + self.restart_wait_s - now_s
        if rest_s <= 0:
            self.fail_queued(Restarting(retry_after_s=max(MIN_RETRY_S, outage.restart_s - now_s)))
        elif self._outage_timer is None:
            self._outage_timer = self._loop.call_later(rest_s, self._look_at_outage)

    def _look_at_outage(self) -> None:
        self._outage_timer = None
        self.pump()

    def fail_all(self, reason: ServingError) -> None:
        """Answer all admitted requests with `reason`, those that run included; their outcomes are dropped."""
        for run in list(self._runs):
            for request in run.requests:
                if request.open:
                    self.withdraw(request, reason)
        self.fail_queued(reason)

    def fail_queued(self, reason: ServingError) -> None:
        """Answer all waiting requests with `reason`: no executor is left to run them."""
        for request in self._waiting():
            self.withdraw(request, reason)
