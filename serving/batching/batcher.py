"""The default batcher: one bounded queue for a version, and batches for any free executor."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice

from torchere.serving.batching.admission import Admission
from torchere.serving.batching.fair_queue import MIXED
from torchere.serving.batching.policy import NOT_DUE, QueueView, due_s
from torchere.serving.batching.request import Request, alone
from torchere.serving.errors import HandlerFailed, NoRoom, QueueFull, ServingError
from torchere.serving.types import NO_DEADLINE
from torchere.serving.workers.executor import NOT_RUN, BatchReport, Unfinished
from torchere.serving.workers.run import Run


class Batcher(Admission):
    """Admission, queue and dispatch of one version whose handler keeps no state between calls."""

    _has_priorities = False  # True once a request had a priority: later ones may have to overtake
    _company_since_s = 0.0  # when an executor became free for a partial batch; 0: none is free

    @property
    def queue_length(self) -> int:
        """The number of waiting requests, including those in runs that were sent ahead."""
        queue = self._queue
        waiting = len(queue.front) + queue.behind
        ahead = len(self._runs) - self._pool.in_service * self._settings.at_once
        if ahead > 0:  # executors take runs in the order of dispatch
            waiting += sum(len(run.requests) for run in islice(reversed(self._runs), ahead))
        return waiting

    @property
    def _is_collecting(self) -> bool:
        """Whether an idle executor waits for more requests: in TorchServe its batch has left the queue."""
        return len(self._queue) < self._settings.max_batch_size and self._pool.free > 0

    def _enqueue(self, request: Request) -> None:
        queue = self._queue
        is_full = self.queue_length >= self._settings.max_queue_size and not self._is_collecting
        if is_full and not queue.has_share_left(request):
            raise QueueFull(self.refusal)
        if self._settings.use_tickets and len(queue) >= self._pool.free:
            raise QueueFull(self.refusal)  # a ticket is an idle executor
        if request.priority:
            self._has_priorities = True
        if request.deadline_s != NO_DEADLINE:
            self._refuse_if_hopeless(request)
        if queue.client is request.account and not (queue.behind or queue.is_ranked or request.priority):
            queue.front.append(request)  # does the same as `add`, without a call for each request
        else:
            queue.add(request)
        if is_full:
            self._refuse_displaced(queue.displace())

    def _refuse_if_hopeless(self, request: Request) -> None:
        if not (self._runs or self._queue):
            return  # the queue is empty: this request delays no other, and its run updates the estimate
        in_front = len(self._runs) + self._queue.before(request) // self._settings.max_batch_size
        answer_s = self._service_time.answer_s(in_front, self._pool.in_service * self._settings.at_once)
        if request.enqueued_s + answer_s > request.deadline_s:
            raise QueueFull(self.refusal, retry_after_s=answer_s)

    @property
    def _takes_company(self) -> bool:
        settings = self._settings
        return settings.dispatch == "eager" and settings.max_batch_size > 1

    def _remove(self, request: Request) -> None:
        if request.running is None:
            self._queue.remove(request)
            if request.suspect:  # the requests behind it may share a process
                self._pump_soon()  # not now: a request may leave in the midst of a dispatch

    def pump(self) -> None:
        """Dispatch all batches that can run now."""
        wake_s = NOT_DUE
        queue = self._queue
        while queue.front or queue.behind:
            view = self._view()
            batch_due_s = due_s(view, self._settings)
            if batch_due_s > self._now():
                wake_s = batch_due_s
                if not self._pool.in_service:
                    self._end_if_given_up()
                break
            self._dispatch(view.head_run)
        if self._timer is not None or wake_s != NOT_DUE:
            self._pump_at(wake_s)
        if wake_s == NOT_DUE:
            self._company_since_s = 0.0
        elif not self._company_since_s:
            self._company_since_s = self._now()

    def _view(self) -> QueueView:
        size = self._settings.max_batch_size
        queue = self._queue.front
        if self._queue.behind:
            if not (self._pool.free or (self._pool.ahead and not self._has_priorities)):
                return QueueView(0, False, 0.0, 0)  # the next client is chosen when an executor is free
            queue = self._queue.first(size)
        head = queue[0]
        if head.suspect:
            return QueueView(1, True, head.enqueued_s, self._pool.empty)
        free = self._pool.free
        if head.group and head.group == alone(head.request_id):
            return QueueView(1, True, head.enqueued_s, free)
        if not head.group and len(queue) == 1:
            return QueueView(1, False, head.enqueued_s, free or self._ahead(1))
        run = 0
        for request in islice(queue, size):
            if request.group != head.group:
                return QueueView(run, True, head.enqueued_s, free)
            run += 1
        oldest_s = head.enqueued_s
        if run < size and (self._has_priorities or self._queue.client is MIXED):  # else the head is oldest
            oldest_s = min(request.enqueued_s for request in islice(queue, run))
        return QueueView(run, False, oldest_s, free or self._ahead(run))

    def _ahead(self, run: int) -> int:
        """Return how many full runs may be sent ahead: none if a later request may have to overtake."""
        full = self._settings.max_batch_size
        if run < full or self._has_priorities or not self._pool.ahead:
            return 0
        # A request with a deadline would wait for a long batch, while another worker may become free.
        queue = self._queue.front  # `_view` has filled it
        timed = full > 1 and any(one.deadline_s != NO_DEADLINE for one in islice(queue, run))
        return 0 if timed else self._pool.ahead

    def _dispatch(self, size: int) -> None:
        queue = self._queue.front
        taken = [queue.popleft() for _ in range(size)]
        if self._company_since_s:
            now_s = self._now()
            for request in taken:
                request.company_s = now_s - max(request.enqueued_s, self._company_since_s)
            self._company_since_s = 0.0
        self._run_live(taken)

    def _answer(self, run: Run, report: BatchReport, began_s: float) -> bool:
        if len(run.requests) > 1 and _failed_as_one(report):
            self._run_alone(run.requests)
            return False
        self.pump()  # dispatch first: the executor is idle, and answering takes time
        stages_s, answered_s = report.all_stages_s, time.monotonic()
        for request, outcome in zip(run.requests, report.outcomes, strict=True):
            request.running = None
            request.stages_s = stages_s
            if request.answered:
                request.parameters = ()
            if request.open:
                request.dequeued_s = began_s
            if request.deadline_s != NO_DEADLINE:
                self._deadlines.discard(request)
            if isinstance(outcome, ServingError):
                request.finish(outcome)
                continue
            if not request.answered:
                request.answered_s = answered_s
            # Without `continuousBatching`, stopping criteria do nothing: the first part is the whole answer.
            request.finish(outcome.part if isinstance(outcome, Unfinished) else outcome)
        return True

    def _run_alone(self, requests: Sequence[Request]) -> None:
        """Requeue each request of a batch that the handler failed as a whole, to run by itself."""
        for request in requests:
            request.group = alone(request.request_id)
        self._put_back(requests)


def _failed_as_one(report: BatchReport) -> bool:
    """Return whether the batch had no room, or the handler ran more than one request and all failed."""
    if all(isinstance(outcome, NoRoom) for outcome in report.outcomes):
        return True
    ran = [outcome for outcome in report.outcomes if not isinstance(outcome, NOT_RUN)]
    return len(ran) > 1 and all(isinstance(outcome, HandlerFailed) for outcome in ran)
