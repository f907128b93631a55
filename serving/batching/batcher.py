"""The ordinary batcher: one bounded queue for a version, and batches for whichever executor is free."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import islice

from torchere.serving.batching.admission import Admission, BatchObserver
from torchere.serving.batching.pending import Pending, alone
from torchere.serving.batching.policy import Dispatch, QueueView, WaitUntil, plan
from torchere.serving.batching.priority import position
from torchere.serving.batching.running import RunningBatch
from torchere.serving.errors import Cancelled, DeadlineExceeded, HandlerFailed, QueueFull
from torchere.serving.execution.executor import BatchReport, ExecutorPool, Unfinished
from torchere.serving.settings import BatchSettings
from torchere.serving.types import NO_DEADLINE

_NOT_RUN = (Cancelled, DeadlineExceeded)  # what an executor says of requests that it left out


class Batcher(Admission):
    """Admission, queue and dispatch of one version whose handler keeps no state between calls."""

    def __init__(
        self,
        settings: BatchSettings,
        pool: ExecutorPool,
        *,
        observer: BatchObserver,
        now: Callable[[], float],
        refusal: str,
    ) -> None:
        super().__init__(pool, observer=observer, now=now, refusal=refusal)
        self._settings = settings
        self._queue: deque[Pending] = deque()
        self._ranked = False  # some that wait have a priority: the order is that of `priority.py`
        self._has_priorities = False  # some request had one: what comes later may have to overtake
        self._timer: asyncio.TimerHandle | None = None
        self._company_since_s = 0.0  # when an executor came free for a batch that is not full; 0: none is

    @property
    def queue_length(self) -> int:
        """How many requests wait, those in batches that were sent ahead included."""
        waiting = len(self._queue)
        for batch in self._batches:  # asked for with every request: no generator
            if batch.ahead and not batch.begun_s:
                waiting += len(batch.pendings)
        return waiting

    @property
    def queue_capacity(self) -> int:
        """How many more may wait."""
        return max(0, self._settings.max_queue_size - self.queue_length)

    def _enqueue(self, pending: Pending) -> None:
        if self.queue_length >= self._settings.max_queue_size:
            raise QueueFull(self.refusal)
        if self._settings.use_tickets and len(self._queue) >= self._pool.free:
            raise QueueFull(self.refusal)  # a ticket is an executor with nothing to do
        if self._ranked or pending.request.priority:
            self._ranked = bool(self._queue or pending.request.priority)
            self._has_priorities = self._has_priorities or bool(pending.request.priority)
            at = position(self._queue, pending)
            self._refuse_if_hopeless(pending, at)
            self._queue.insert(at, pending)
        else:
            self._refuse_if_hopeless(pending, len(self._queue))
            self._queue.append(pending)

    def _refuse_if_hopeless(self, pending: Pending, before: int) -> None:
        if pending.request.deadline_s == NO_DEADLINE or not (self._batches or self._queue):
            return  # a free executor loses nothing by trying, and the estimate learns from it
        in_front = len(self._batches) + before // self._settings.max_batch_size
        answer_s = self._service_time.answer_s(in_front, self._pool.in_service)
        if pending.enqueued_s + answer_s > pending.request.deadline_s:
            raise QueueFull(self.refusal, retry_after_s=answer_s)

    @property
    def _takes_company(self) -> bool:
        settings = self._settings
        return self._pool.on_loop or (settings.dispatch == "eager" and settings.max_batch_size > 1)

    def _remove(self, pending: Pending) -> None:
        if not pending.dequeued_s and pending in self._queue:
            self._queue.remove(pending)

    def _waiting(self) -> list[Pending]:
        return list(self._queue)

    def pump(self) -> None:
        """Dispatch all that can be dispatched now."""
        wait_until_s = 0.0
        while self._queue:
            action = plan(self._view(), self._settings, self._now())
            if not isinstance(action, Dispatch):
                wait_until_s = action.at_s if isinstance(action, WaitUntil) else 0.0
                if not self._pool.in_service:
                    self._end_if_given_up()
                break
            self._dispatch_all(action.size)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wait_until_s:
            now_s = self._now()
            self._company_since_s = self._company_since_s or now_s
            self._timer = self._loop.call_later(max(0.0, wait_until_s - now_s), self.pump)
        else:
            self._company_since_s = 0.0

    def _view(self) -> QueueView:
        head, free = self._queue[0], self._pool.free
        if head.group and head.group == alone(head.request):
            return QueueView(1, True, head.enqueued_s, free)
        run = 0
        for pending in islice(self._queue, self._settings.max_batch_size):
            if pending.group != head.group:
                return QueueView(run, True, head.enqueued_s, free)
            run += 1
        return QueueView(run, False, head.enqueued_s, free or self._ahead(run))

    def _ahead(self, run: int) -> int:
        """How many batches may go though no executor is free: full ones that nothing has to overtake."""
        if run < self._settings.max_batch_size or self._has_priorities or not self._pool.ahead:
            return 0
        timed = any(pending.request.deadline_s != NO_DEADLINE for pending in islice(self._queue, run))
        return 0 if timed else self._pool.ahead

    def _dispatch_all(self, size: int) -> None:
        first = size
        if size > 1 and size == len(self._queue) and self._pool.on_loop and self._pool.free > 1:
            first = self._pool.portion(size)
        self._dispatch(first)
        rest = min(size - first, len(self._queue))  # who is answered may end another request
        if rest and self._pool.free:
            self._dispatch(rest)

    def _dispatch(self, size: int) -> None:
        taken = [self._queue.popleft() for _ in range(size)]
        self._was_alone = size == 1 and not self._queue
        if self._company_since_s:
            now_s = self._now()
            for pending in taken:
                pending.company_s = now_s - max(pending.enqueued_s, self._company_since_s)
            self._company_since_s = 0.0
        self._run_live(taken)

    def _answer(self, batch: RunningBatch, report: BatchReport) -> bool:
        if len(batch.pendings) > 1 and _failed_as_one(report):
            self._run_alone(batch.pendings)
            return False
        if not self._pool.on_loop:
            self.pump()  # first: its executor is idle, and answering takes a while
        stages_s = report.all_stages_s
        for pending, outcome in zip(batch.pendings, report.outcomes, strict=True):
            pending.stages_s = stages_s
            # Stopping criteria without `continuousBatching` do nothing: the part is the whole answer.
            pending.finish(outcome.part if isinstance(outcome, Unfinished) else outcome)
        return True

    def _run_alone(self, pendings: list[Pending]) -> None:
        """The handler failed a whole batch. One request may be to blame: each gets a run of its own."""
        for pending in pendings:
            pending.group = alone(pending.request)
        self._put_back(pendings)

    def _requeue(self, pending: Pending) -> None:
        self._queue.appendleft(pending)


def _failed_as_one(report: BatchReport) -> bool:
    """Whether the handler failed all it was given of a batch, and that was more than one request."""
    ran = [outcome for outcome in report.outcomes if not isinstance(outcome, _NOT_RUN)]
    return len(ran) > 1 and all(isinstance(outcome, HandlerFailed) for outcome in ran)
