"""The batcher for handlers that keep state between calls: sequences and continuous batching.

With `sequenceBatching`, requests of one sequence run in order on one executor. With `continuousBatching`, a
request whose stopping criterion says "more" is also in the next batch of the same executor, with its id and
without parameters, and new requests join it there. With both, the next request of a sequence joins the
sequence's unfinished request, for example to stop it; so a batch may be twice as large. If the worker has no
memory for a batch, the handler has not begun it: the unfinished requests go on without the new ones, which
enter one by one, so that only the request that needs too much memory gets the error.

A sequence begins with its first request, stays on one executor, has at most one new request in a batch, and
ends after an idle or total time-out, or when its handler ends it; `SequenceTable` keeps them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, takewhile

from torchere.serving.batching.admission import Admission, BatchObserver
from torchere.serving.batching.policy import NOT_DUE, QueueView, due_s
from torchere.serving.batching.request import Request
from torchere.serving.config.server_settings import BatchSettings, SequenceHeaders, SequenceSettings
from torchere.serving.errors import ExecutorDied, NoRoom, QueueFull, ServingError, Unavailable
from torchere.serving.workers.executor import BatchReport, ExecutorState, ExecutorStatus, Outcome, Unfinished
from torchere.serving.workers.pool import WorkerPool
from torchere.serving.workers.run import Run

USUAL = SequenceHeaders()
SEQUENCE_ID, SEQUENCE_START, SEQUENCE_END = USUAL.id, USUAL.start, USUAL.end
MOST_FORMER = 10_000  # expired sequences whose executor is remembered


class Sequence:
    """One sequence: its executor, its waiting requests, and its last activity (monotonic seconds)."""

    __slots__ = ("began_s", "executor_id", "name", "running", "touched_s", "waiting")

    def __init__(self, name: str, executor_id: int | None, now_s: float) -> None:
        self.name = name
        self.executor_id = executor_id
        self.waiting: deque[Request] = deque()
        self.running: set[Request] = set()  # taken and not answered, including unfinished ones
        self.began_s = self.touched_s = now_s

    def expires_s(self, settings: SequenceSettings) -> float:
        """Return when the sequence expires; it is not idle while a request waits or runs."""
        idle_s = float("inf") if self.waiting or self.running else self.touched_s + settings.max_idle_s
        return min(idle_s, self.began_s + settings.timeout_s if settings.timeout_s else float("inf"))


class SequenceTable:
    """All sequences of a version; bounds their number and the waiting requests of each.

    Bookkeeping only, without a clock: the times that are passed in never decrease. Not thread-safe. No call
    looks at all open sequences, unless an executor is gone.
    """

    def __init__(self, settings: SequenceSettings, refusal: str) -> None:
        self._settings = settings
        self._refusal = refusal
        self._sequences: OrderedDict[str, Sequence] = OrderedDict()  # by their last activity, oldest first
        self._by_age: OrderedDict[str, Sequence] = OrderedDict()  # the same sequences, by their beginning
        self._lined_up: OrderedDict[str, Sequence] = OrderedDict()  # sequences with waiting requests
        self._bound_to: set[int] = set()  # executors that sequences may be bound to
        # Executors of expired sequences, the latest last: a sequence that resumes may have its state there.
        self._former: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def waiting(self) -> list[Request]:
        """Every waiting request, sequence by sequence."""
        return [request for sequence in self._lined_up.values() for request in sequence.waiting]

    def add(self, name: str, request: Request, now_s: float) -> None:
        """Append a request to its sequence, or begin a new one. Call `expire` before.

        Raises:
            QueueFull: too many sequences, or too many requests wait in this one.
        """
        sequence = self._sequences.get(name)
        if sequence is None:
            if len(self._sequences) >= self._settings.max_sequences:
                raise QueueFull(self._refusal)
            sequence = self._begin(name, now_s)
        if len(sequence.waiting) >= self._settings.max_queue_size:
            raise QueueFull(self._refusal)
        sequence.waiting.append(request)
        self._lined_up[name] = sequence
        self._touch(sequence, now_s)

    def _begin(self, name: str, now_s: float) -> Sequence:
        sequence = Sequence(name, self._former.pop(name, None), now_s)
        self._sequences[name] = self._by_age[name] = sequence
        if sequence.executor_id is not None:
            self._bound_to.add(sequence.executor_id)
        return sequence

    def _touch(self, sequence: Sequence, now_s: float) -> None:
        sequence.touched_s = now_s
        self._sequences.move_to_end(sequence.name)

    def remove(self, request: Request) -> None:
        """Remove a waiting request; do nothing if it is not waiting."""
        sequence = next((one for one in self._lined_up.values() if request in one.waiting), None)
        if sequence is not None:
            sequence.waiting.remove(request)
            self._leave_line(sequence)

    def _leave_line(self, sequence: Sequence) -> None:
        if not sequence.waiting:
            self._lined_up.pop(sequence.name, None)

    def heads(self, executor_id: int, limit: int) -> list[Sequence]:
        """Return at most `limit` sequences of this executor, or of none yet, whose next request may run."""
        ready = (s for s in self._lined_up.values() if not s.running)
        able = (s for s in ready if s.executor_id in (None, executor_id))
        return sorted(able, key=lambda sequence: sequence.waiting[0].enqueued_s)[:limit]

    def joining(self, going_on: Iterable[Request], limit: int) -> list[Sequence]:
        """Return at most `limit` sequences whose next request may join those that they have in `going_on`."""
        between_batches = set(going_on)
        ready = (s for s in self._lined_up.values() if s.running)
        able = (s for s in ready if s.running <= between_batches)
        return sorted(able, key=lambda sequence: sequence.waiting[0].enqueued_s)[:limit]

    def take(self, sequence: Sequence, executor_id: int) -> Request:
        """Take the next request of a sequence and bind the sequence to the executor."""
        sequence.executor_id = executor_id
        self._bound_to.add(executor_id)
        request = sequence.waiting.popleft()
        self._leave_line(sequence)
        sequence.running.add(request)
        return request

    def give_back(self, name: str, request: Request) -> bool:
        """Put a request that was not begun back in front; return False if its sequence has ended."""
        sequence = self._sequences.get(name)
        if sequence is None:
            return False
        sequence.waiting.appendleft(request)
        self._lined_up[name] = sequence
        self._lined_up.move_to_end(name, last=False)
        return True

    def done(self, name: str, request: Request, now_s: float) -> None:
        """Note that a running request of the sequence is answered."""
        if (sequence := self._sequences.get(name)) is not None:
            sequence.running.discard(request)
            self._touch(sequence, now_s)

    def end(self, names: Iterable[str]) -> list[Request]:
        """End sequences by name; return their waiting requests."""
        ended = [self._sequences.pop(name) for name in names if name in self._sequences]
        for sequence in ended:
            del self._by_age[sequence.name]
            self._lined_up.pop(sequence.name, None)
        return [request for sequence in ended for request in sequence.waiting]

    def expire(self, now_s: float) -> list[Request]:
        """End the expired sequences; return their waiting requests."""
        over = dict.fromkeys(
            sequence
            for order in self._orders()
            for sequence in takewhile(lambda each: each.expires_s(self._settings) <= now_s, order)
        )
        for sequence in over:
            if sequence.executor_id is not None:
                self._former[sequence.name] = sequence.executor_id
        while len(self._former) > MOST_FORMER:
            del self._former[next(iter(self._former))]
        return self.end(sequence.name for sequence in over)

    def next_expiry_s(self) -> float:
        """Return when the next sequence expires; infinity if no sequence is open."""
        first = (sequence for order in self._orders() for sequence in islice(order, 1))
        return min((sequence.expires_s(self._settings) for sequence in first), default=float("inf"))

    def _orders(self) -> tuple[Iterator[Sequence], Iterator[Sequence]]:
        """Return the idle sequences in the order in which idleness ends them, and all in the order of age."""
        idle = (s for s in self._sequences.values() if not (s.waiting or s.running))
        return idle, iter(self._by_age.values())

    def keep_on(self, executor_ids: Iterable[int]) -> None:
        """Unbind the sequences of other executors: they continue on any executor, without their state."""
        there = set(executor_ids)
        if self._bound_to <= there:
            return
        for sequence in self._sequences.values():
            if sequence.executor_id not in there:
                sequence.executor_id = None
        self._bound_to &= there


class StatefulBatcher(Admission):
    """Admission and dispatch of a version with a stateful handler; one batch per executor at a time.

    With `sequences` None it does continuous batching only. The queue holds requests without a sequence.
    """

    isolates_suspects = False  # the sequence determines which requests run together

    def __init__(
        self,
        settings: BatchSettings,
        sequences: SequenceSettings | None,
        pool: WorkerPool,
        *,
        observer: BatchObserver,
        now: Callable[[], float],
        refusal: str,
    ) -> None:
        super().__init__(settings, pool, observer=observer, now=now, refusal=refusal)
        self._table = SequenceTable(sequences, refusal) if sequences else None
        self._end_headers = {SEQUENCE_END, sequences.headers.end} if sequences else set()
        self._going_on: dict[int, list[Request]] = {}  # unfinished requests, by the executor they live on
        self._crowded: set[int | None] = set()  # executors without room for their last batch
        self._losses: dict[int, int] = {}  # losses of each executor at the last check of unfinished requests

    @property
    def queue_length(self) -> int:
        """The number of waiting requests, including unfinished ones."""
        return len(self._waiting())

    def _enqueue(self, request: Request) -> None:
        self._end_what_is_over()
        in_sequence = self._table is not None and not request.group  # a describe call belongs to no sequence
        is_full = self.queue_length >= self._settings.max_queue_size
        if is_full and (in_sequence or not self._queue.has_share_left(request)):
            raise QueueFull(self.refusal)
        if self._settings.use_tickets and self.queue_length >= len(self._pool.idle_ids()):
            raise QueueFull(self.refusal)
        if self._table is not None and in_sequence:
            self._table.add(sequence_of(request), request, self._now())
            return
        self._queue.add(request)
        if is_full:
            self._refuse_displaced(self._queue.displace())

    def _remove(self, request: Request) -> None:
        self._queue.remove(request)
        if self._table is not None:
            self._table.remove(request)
        for going_on in self._going_on.values():
            if request in going_on:
                going_on.remove(request)
                self._sequence_done(request)

    def _waiting(self) -> list[Request]:
        in_sequences = self._table.waiting if self._table is not None else []
        return [*self._queue, *in_sequences, *(p for those in self._going_on.values() for p in those)]

    def pump(self) -> None:
        """Send every idle executor its next batch, if it has one."""
        self._end_what_is_over()
        self._end_if_given_up()
        wake_s = self._table.next_expiry_s() if self._table is not None else NOT_DUE
        for executor_id in self._pool.idle_ids():
            wake_s = min(wake_s, self._pump_one(executor_id))
        for executor_id in self._pool.leaving_ids():
            self._pump_one(executor_id, takes_new=False)
        self._pump_at(wake_s)

    def _end_what_is_over(self) -> None:
        statuses = self._pool.statuses()
        there = {one.executor_id: one for one in statuses if one.state is not ExecutorState.FAILED}
        self._end_what_lost_its_state(there)
        if self._table is not None:
            self._table.keep_on(there)
            for request in self._table.expire(self._now()):
                self._finish(request, Unavailable(self.refusal))
        self._settle()

    def _end_what_lost_its_state(self, there: dict[int, ExecutorStatus]) -> None:
        """End the unfinished requests of executors that are gone, or that were lost since their last report.

        A process may report a batch and be lost before it takes the next one; its successor has the id of its
        executor, but not the state of its requests.
        """
        losses = {name: status.losses for name, status in there.items()}
        leaving = self._pool.leaving_ids() if self._going_on else ()
        for executor_id in [name for name in self._going_on if name not in leaving]:
            if executor_id in there and losses[executor_id] == self._losses.get(executor_id):
                continue
            cause = there[executor_id].last_failure if executor_id in there else "its executor was stopped"
            for request in self._going_on.pop(executor_id):
                self._finish(request, ExecutorDied(cause))
                self._sequence_done(request)
        self._losses = losses

    def _pump_one(self, executor_id: int, *, takes_new: bool = True) -> float:
        """Dispatch to one idle executor; return when to try again, or `NOT_DUE`.

        Without `takes_new`, the executor gets its unfinished requests and the next ones of their sequences.
        """
        while True:
            going_on = self._going_on.pop(executor_id, [])
            if not (going_on or takes_new):
                return NOT_DUE
            room = self._settings.max_batch_size - len(going_on) if takes_new else 0
            if executor_id in self._crowded:  # it takes one new request at a time
                room = min(room, 1)
            heads = self._heads(executor_id, going_on, room)
            newcomers = self._newcomers(room - len(heads), alone=bool(going_on or heads))
            if not going_on:  # unfinished requests do not wait for the batch to fill
                waiting = [*(sequence.waiting[0] for sequence in heads), *newcomers]
                view = _view(waiting, is_whole=executor_id in self._crowded)
                batch_due_s = due_s(view, self._settings)
                if batch_due_s > self._now():
                    return batch_due_s
            taken = list(going_on)
            if self._table is not None:
                taken += [self._table.take(sequence, executor_id) for sequence in heads]
            queue = self._queue.first(len(newcomers))
            taken += [queue.popleft() for _ in newcomers]
            late = self._run_live(taken, executor_id)
            for request in late:
                self._sequence_done(request)
            if len(late) < len(taken):
                return NOT_DUE

    def _heads(self, executor_id: int, going_on: list[Request], room: int) -> list[Sequence]:
        """Return the sequences that run next; those behind a describe call wait, as it runs by itself.

        `room`: how many sequences without an unfinished request may run.
        """
        if self._table is None:
            return []
        size = self._settings.max_batch_size
        may_join = 1 if executor_id in self._crowded else 2 * size - len(going_on)
        heads = self._table.joining(going_on, may_join)
        heads += self._table.heads(executor_id, max(0, room - len(heads)))
        queue = self._queue.first(1)
        if queue and queue[0].group:
            first_s = queue[0].enqueued_s
            heads = [sequence for sequence in heads if sequence.waiting[0].enqueued_s <= first_s]
        return heads

    def _newcomers(self, room: int, *, alone: bool) -> list[Request]:
        """Return the requests at the queue's head that may join the batch; a describe call runs by itself."""
        front = self._queue.first(room)
        if front and front[0].group:
            return [front[0]] if room > 0 and not alone else []
        return list(takewhile(lambda each: not each.group, islice(front, max(0, room))))

    def _answer(self, run: Run, report: BatchReport, began_s: float) -> bool:
        """Answer the finished requests of a run, and queue the others for the next batch."""
        # Includes requests that were closed meanwhile: one of them may be why the run had no room.
        newcomers = [request for request in run.requests if request.parts is None]
        had_no_room = bool(newcomers) and all(isinstance(outcome, NoRoom) for outcome in report.outcomes)
        if had_no_room and len(newcomers) > 1:
            self._run_without_most(run)
            return False
        if not had_no_room:
            self._crowded.discard(run.executor_id)
        stages_s = report.all_stages_s
        for request, outcome in zip(run.requests, report.outcomes, strict=True):
            request.running = None
            request.stages_s = stages_s
            if not request.answered_s:
                request.dequeued_s = began_s
            if had_no_room and request.parts is not None:
                self._go_on(run, request)
            else:
                self._take_outcome(run, request, outcome)
        return True

    def _run_without_most(self, run: Run) -> None:
        """Run the unfinished requests again, with one new one: the worker had no memory for the batch."""
        self._crowded.add(run.executor_id)
        for request in run.requests:
            if request.parts is None:
                self._sequence_done(request)
            else:
                request.running = None
                self._go_on(run, request)
        self._put_back([request for request in run.requests if request.parts is None])

    def _go_on(self, run: Run, request: Request) -> None:
        assert run.executor_id is not None  # set by `_pump_one`
        self._going_on.setdefault(run.executor_id, []).append(request)

    def _take_outcome(self, run: Run, request: Request, outcome: Outcome) -> None:
        if isinstance(outcome, Unfinished):
            request.add_part(outcome.part, self.unread_parts)
            if request.open:
                request.parameters = ()
                self._go_on(run, request)
                return
        else:
            self._finish(request, outcome)
        self._sequence_done(request)
        self._end_sequences_of(outcome)

    def _sequence_done(self, request: Request) -> None:
        if self._table is not None and not request.group:
            self._table.done(sequence_of(request), request, self._now())

    def _end_sequences_of(self, outcome: Outcome) -> None:
        if self._table is None or isinstance(outcome, (ServingError, Unfinished)):
            return
        ended = next((value for name, value in outcome.headers if name in self._end_headers), "")
        for request in self._table.end(filter(None, ended.split(";"))):
            self._finish(request, Unavailable(self.refusal))

    def run_returned(self, run: Run) -> None:
        """See `RunOwner`."""
        for request in run.requests:
            self._sequence_done(request)
        super().run_returned(run)

    def _requeue(self, request: Request) -> None:
        if self._table is None or request.group:
            super()._requeue(request)
        elif not self._table.give_back(sequence_of(request), request):
            self._finish(request, Unavailable(self.refusal))


def _view(waiting: list[Request], *, is_whole: bool) -> QueueView:
    """Summarise the requests that may run next on a free executor."""
    if not waiting:
        return QueueView(0, False, 0.0, 0)
    oldest_s = min(request.enqueued_s for request in waiting)
    is_describe = bool(waiting[0].group)
    return QueueView(len(waiting), is_whole or is_describe, oldest_s, free_executors=1)


def sequence_of(request: Request) -> str:
    """Return the sequence id of a request; `begin_sequence` has set it."""
    return next((value for name, value in request.headers if name == SEQUENCE_ID), "")


def begin_sequence(request: Request, names: SequenceHeaders = USUAL) -> None:
    """Give a request a sequence id; one without an id begins a new sequence, with `names.start` set.

    HTTP header names are case-insensitive; the handler finds the id under the exact name `names.id`. Where
    the operator renamed the headers, those of the other protocols keep the usual names, under which the
    server looks for the id; so the request has both.
    """
    if names == USUAL:
        if sequence_of(request):
            return
    else:
        renamed = {SEQUENCE_ID: names.id, SEQUENCE_START: names.start, SEQUENCE_END: names.end}
        given = tuple((renamed[name], value) for name, value in request.headers if name in renamed)
        request.headers = (*request.headers, *given)
    named = [value for name, value in request.headers if name.lower() == names.id.lower() and value]
    sequence_id = named[-1] if named else f"ts-seq-{request.request_id}"
    added = [] if named else [(names.start, "true")]
    ids = [(name, sequence_id) for name in dict.fromkeys((names.id, SEQUENCE_ID))]
    request.headers = (*request.headers, *added, *ids)
