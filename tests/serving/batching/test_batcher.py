"""The batcher with executors and a clock that the test moves by hand."""

import asyncio
import base64
import contextlib
import gc
import json
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine
from datetime import datetime, timezone
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from fakes import AwaitedRequest

from torchere.serving.access.client_limits import QUEUE_SHARE, Account, Quota, Tally
from torchere.serving.batching import quarantine
from torchere.serving.batching.batcher import Batcher
from torchere.serving.batching.quarantine import QuarantineFiles, digest_of
from torchere.serving.batching.request import Answer, Ledger, Request
from torchere.serving.config.server_settings import BatchSettings, QuarantineSettings
from torchere.serving.errors import (
    Cancelled,
    DeadlineExceeded,
    ExecutorDied,
    HandlerFailed,
    InvalidRequest,
    LeftUnread,
    NoRoom,
    OutOfResources,
    Quarantined,
    QueueFull,
    Restarting,
    ServingError,
    Unavailable,
)
from torchere.serving.types import NO_DEADLINE, InferResponse, ModelKey, Parameter, StreamedResponse
from torchere.serving.workers.executor import (
    BatchReport,
    ExecutorState,
    ExecutorStatus,
    Outage,
    Outcome,
)
from torchere.serving.workers.run import Run


class PuppetPool:
    """Executors that do nothing until the test says so. As a `LanePage` it keeps the requests cancelled.

    Attributes:
        executors: how many are in service.
        more: how many runs may be sent ahead of them.
        lanes: they share one process.
        runs: those inside, oldest first.
        cancelled: the requests cancelled inside, as the place of the run and the index in it.
        let_go: the places of runs that were held and may go on.
    """

    def __init__(self, executors: int = 1, *, lanes: bool = False) -> None:
        self.executors = executors
        self.more = 0
        self.lanes = lanes
        self.runs: list[Run] = []
        self.submitted = 0
        self.cancelled: list[tuple[int, int]] = []
        self.let_go: list[int] = []
        self.state = ExecutorState.READY
        self.down: Outage | None = None

    def outage(self) -> Outage | None:
        return self.down

    def statuses(self) -> tuple[ExecutorStatus, ...]:
        return (ExecutorStatus(9000, self.state, datetime.now(timezone.utc), 1),)

    @property
    def in_service(self) -> int:
        return self.executors

    def idle_ids(self) -> tuple[int, ...]:
        raise NotImplementedError  # only versions with sequences ask

    @property
    def free(self) -> int:
        return 0 if self.lanes and self._is_exclusive else max(0, self.executors - len(self.runs))

    @property
    def ahead(self) -> int:
        return max(0, self.executors + self.more - len(self.runs)) if self.more else 0

    @property
    def empty(self) -> int:
        return 0 if self.lanes and self.runs else self.free

    @property
    def _is_exclusive(self) -> bool:
        return any(run.exclusive for run in self.runs)

    def submit(self, run: Run) -> None:
        assert self.empty if run.exclusive else self.free or self.ahead
        run.place, run.page = self.submitted, self  # type: ignore[assignment]
        self.submitted += 1
        self.runs.append(run)

    def cancel(self, place: int, index: int) -> None:
        self.cancelled.append((place, index))

    def hold(self, place: int, *, held: bool) -> None:
        assert not held  # a worker's process holds, and the run lets go
        self.let_go.append(place)

    def pop(self) -> Run:
        """Take the oldest run out."""
        run = self.runs.pop(0)
        run.page = None
        return run

    def finish(self, outcomes: list[Outcome] | None = None, began_s: float = 0.0) -> list[str]:
        """Complete the oldest run; returns the ids it had."""
        run = self.pop()
        ids = [request.request_id for request in run.requests]
        run.done(BatchReport(outcomes or [InferResponse(name.encode()) for name in ids], began_s=began_s))
        return ids


class CallingRequest(Request):
    """A request whose answer a callback takes."""

    __slots__ = ("_taken",)

    def __init__(self, request_id: str, taken: Callable[[Answer], object] = lambda outcome: None) -> None:
        super().__init__(request_id, 0.0)
        self._taken = taken

    def reply(self, outcome: Answer) -> None:
        self._taken(outcome)


class Stage:
    """One batcher, its puppet, its clock, and the reports it gave."""

    def __init__(self, settings: BatchSettings, executors: int = 1, *, lanes: bool = False) -> None:
        self.now_s = 100.0
        self.pool = PuppetPool(executors, lanes=lanes)
        self.reports: list[tuple[int, float]] = []  # the size of each run, and its seconds in an executor
        self.counts: list[int] = []  # of runs in executors
        self.unread = 0
        pool: Any = self.pool
        self.batcher = Batcher(settings, pool, observer=self, now=lambda: self.now_s, refusal="no worker")

    def batches_running(self, batches: int, now_s: float) -> None:
        self.counts.append(batches)

    def batch_finished(self, run: Run, report: BatchReport, executor_s: float) -> None:
        self.reports.append((len(run.requests), executor_s))

    def left_unread(self) -> None:
        self.unread += 1

    def submit(
        self,
        name: str,
        group: str = "",
        deadline_s: float = NO_DEADLINE,
        *,
        priority: int = 0,
        content: str = "",
        account: Account | None = None,
    ) -> AwaitedRequest:
        request = AwaitedRequest(name, 0.0)
        request.group, request.deadline_s, request.priority = group, deadline_s, priority
        request.account = account
        if content:
            request.parameters = (Parameter("body", content.encode()),)
        self.batcher.submit(request)
        return request

    @property
    def running(self) -> list[list[str]]:
        return [[request.request_id for request in run.requests] for run in self.pool.runs]


def run(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def wrapper(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return wrapper


@run
async def test_each_request_gets_its_own_answer() -> None:
    stage = Stage(BatchSettings(max_batch_size=2))
    first, second = stage.submit("a"), stage.submit("b")
    assert stage.pool.finish() == ["a", "b"]
    assert await first.body() == b"a"
    assert await second.body() == b"b"
    assert [size for size, _ in stage.reports] == [2]


@run
async def test_a_free_executor_takes_the_next_batch_when_one_is_done() -> None:
    stage = Stage(BatchSettings())
    stage.submit("a")
    stage.submit("b")
    assert stage.running == [["a"]]
    stage.pool.finish()
    assert stage.running == [["b"]]


@run
async def test_an_executor_has_its_next_batch_before_the_last_one_is_answered() -> None:
    stage = Stage(BatchSettings())
    seen: list[list[list[str]]] = []
    stage.batcher.submit(CallingRequest("a", lambda _: seen.append(stage.running)))
    stage.submit("b")
    stage.pool.finish()
    assert seen == [[["b"]]]


@run
async def test_the_queue_is_bounded_and_refuses_at_once() -> None:
    stage = Stage(BatchSettings(max_queue_size=1))
    stage.submit("running")
    stage.submit("waiting")
    with pytest.raises(QueueFull, match="no worker"):
        stage.submit("too many")
    assert stage.batcher.queue_capacity == 0


@run
async def test_a_batch_that_an_idle_executor_collects_takes_no_room_of_the_queue() -> None:
    stage = Stage(BatchSettings(max_batch_size=4, max_queue_delay_ms=50, max_queue_size=2))
    for name in "abcd":
        stage.submit(name)
    assert stage.running == [["a", "b", "c", "d"]]
    stage.submit("waiting")
    stage.submit("waiting, too")
    with pytest.raises(QueueFull):
        stage.submit("too many")


@run
async def test_a_partial_batch_goes_when_its_delay_is_over() -> None:
    stage = Stage(BatchSettings(max_batch_size=4, max_queue_delay_ms=50))
    stage.submit("a")
    assert stage.running == []
    stage.now_s += 0.05
    stage.batcher.pump()
    assert stage.running == [["a"]]


@run
async def test_the_wait_for_company_is_told_from_the_wait_for_an_executor() -> None:
    stage = Stage(BatchSettings(max_batch_size=2, max_queue_delay_ms=60_000))
    first = stage.submit("first")
    stage.now_s, stage.pool.executors = 101.0, 0  # its executor was lost
    stage.batcher.pump()
    stage.now_s, stage.pool.executors = 103.0, 1
    stage.batcher.pump()
    stage.now_s = 104.0
    second = stage.submit("second")
    assert stage.running == [["first", "second"]]
    assert (first.company_s, second.company_s) == (1.0, 0.0)
    assert first.dequeued_s == second.dequeued_s == 104.0
    third = stage.submit("third")
    stage.submit("fourth")
    stage.now_s = 106.0
    stage.pool.finish()
    assert stage.running == [["third", "fourth"]]
    assert third.company_s == 0.0


@run
async def test_groups_do_not_share_a_batch() -> None:
    stage = Stage(BatchSettings(max_batch_size=4, max_queue_delay_ms=0), executors=0)
    for name, group in (("a", ""), ("b", ""), ("c", "explain"), ("d", "")):
        stage.submit(name, group)
    stage.pool.executors = 3
    stage.batcher.pump()
    assert stage.running == [["a", "b"], ["c"], ["d"]]


@run
async def test_a_request_that_is_late_on_arrival_is_refused() -> None:
    stage = Stage(BatchSettings())
    with pytest.raises(DeadlineExceeded):
        stage.submit("late", deadline_s=100.0)
    assert stage.running == []


@run
async def test_runs_sent_ahead_of_an_executor_do_not_make_it_look_slow() -> None:
    stage = Stage(BatchSettings(max_queue_size=100))
    stage.pool.more = 2
    for name in ("first", "second", "third"):
        stage.submit(name)
    for _ in range(3):
        stage.now_s += 1.0
        stage.pool.finish(began_s=stage.now_s - 1.0)
    assert stage.reports == [(1, 1.0)] * 3
    assert stage.batcher.predicted_s == pytest.approx(1.0)
    stage.pool.more = 0
    stage.submit("running")
    stage.submit("in time", deadline_s=stage.now_s + 4.0)
    with pytest.raises(QueueFull):
        stage.submit("hopeless", deadline_s=stage.now_s + 2.0)


@run
async def test_a_run_that_does_not_say_when_it_began_counts_from_its_dispatch() -> None:
    stage = Stage(BatchSettings())
    request = stage.submit("a")
    stage.now_s += 2.0
    stage.pool.finish()
    assert stage.reports == [(1, 2.0)]
    assert request.dequeued_s == 100.0


@run
async def test_an_expired_request_never_runs() -> None:
    stage = Stage(BatchSettings(), executors=0)
    expired = stage.submit("expired", deadline_s=101.0)
    stage.submit("alive", deadline_s=200.0)
    stage.now_s = 102.0
    stage.pool.executors = 2
    stage.batcher.pump()
    assert stage.running == [["alive"]]
    with pytest.raises(DeadlineExceeded):
        await expired.future
    stage.pool.finish()
    assert await stage.batcher.drain(0.0)


@run
async def test_a_request_is_answered_at_its_deadline_whatever_its_executor_does() -> None:
    stage = Stage(BatchSettings())
    running = stage.submit("running", deadline_s=stage.now_s + 0.01)
    waiting = stage.submit("waiting", deadline_s=stage.now_s + 0.01)
    stage.now_s += 0.01
    for request in (running, waiting):
        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(request.future, 30.0)
    assert (stage.running, stage.batcher.queue_length) == ([["running"]], 0)
    assert stage.pool.cancelled == [(0, 0)]  # the lane need not go on for it


@run
async def test_requests_inside_a_run_and_waiting_share_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    timers: list[asyncio.TimerHandle] = []
    call_later = loop.call_later

    def counted(*args: Any) -> asyncio.TimerHandle:
        timers.append(call_later(*args))
        return timers[-1]

    monkeypatch.setattr(loop, "call_later", counted)
    stage = Stage(BatchSettings(max_batch_size=4))
    left_s = {"a": 9.0, "b": 0.01, "c": 9.0, "d": 9.0}
    inside = [stage.submit(name, deadline_s=stage.now_s + each_s) for name, each_s in left_s.items()]
    waiting = stage.submit("waiting", deadline_s=stage.now_s + 8.0)
    assert stage.running == [["a", "b", "c", "d"]]
    assert [timer.cancelled() for timer in timers].count(False) == 1
    stage.now_s += 0.01
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(inside[1].future, 30.0)
    assert stage.pool.cancelled == [(0, 1)]
    assert [timer.when() > loop.time() and not timer.cancelled() for timer in timers].count(True) == 1
    stage.pool.finish()
    assert await inside[0].body() == b"a"
    assert not waiting.answered


@run
async def test_a_report_after_the_deadline_is_dropped() -> None:
    stage = Stage(BatchSettings())
    late = stage.submit("late", deadline_s=stage.now_s + 0.01)
    late.ledger = ledger = Ledger()
    stage.now_s += 0.01
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(late.future, 30.0)
    stage.submit("next")
    drained = asyncio.ensure_future(stage.batcher.drain(30.0))
    await asyncio.sleep(0)
    assert stage.running == [["late"]]
    stage.now_s += 1.0
    assert stage.pool.finish() == ["late"]
    assert (ledger.answered, late.answered_s) == (1, 0.0)
    assert stage.running == [["next"]]
    stage.pool.finish()
    assert await drained


@run
async def test_a_request_that_is_answered_is_not_held_until_its_deadline() -> None:
    stage = Stage(BatchSettings(), executors=2)
    bodies = []
    for name in ("answered", "given up"):
        request = stage.submit(name, deadline_s=stage.now_s + 3600.0)
        body = Body(b"large")
        request.parameters = (Parameter("body", body),)  # type: ignore[arg-type]  # bytes have no weak references
        bodies.append(weakref.ref(body))
    stage.batcher.withdraw(request)
    del request, body
    for _ in range(2):
        stage.pool.finish()
    gc.collect()
    assert [body() for body in bodies] == [None, None]


@run
async def test_a_request_whose_answer_would_come_too_late_is_refused_with_the_time_to_wait() -> None:
    stage = Stage(BatchSettings(max_queue_size=100))
    stage.submit("slow")
    stage.now_s += 2.0
    stage.pool.finish()  # took two seconds
    stage.submit("running")
    with pytest.raises(QueueFull) as caught:
        stage.submit("hopeless", deadline_s=stage.now_s + 1.0)
    assert caught.value.retry_after_s == pytest.approx(5.0)
    stage.submit("patient", deadline_s=stage.now_s + 60.0)
    assert stage.batcher.queue_length == 1


@run
async def test_a_request_that_would_expire_in_the_executor_is_not_begun() -> None:
    stage = Stage(BatchSettings())
    stage.submit("first")
    stage.now_s += 2.0
    stage.pool.finish()
    stage.submit("running")
    waiting = stage.submit("waiting", deadline_s=stage.now_s + 6.0)
    stage.submit("behind")
    stage.now_s += 5.0
    stage.pool.finish()
    assert stage.running == [["behind"]]
    with pytest.raises(DeadlineExceeded):
        await waiting.future


@run
async def test_a_withdrawn_request_leaves_the_queue() -> None:
    stage = Stage(BatchSettings(), executors=0)
    gone = stage.submit("gone")
    gone.future.cancel()
    stage.batcher.withdraw(gone)
    assert stage.batcher.queue_length == 0
    stage.pool.executors = 1
    stage.batcher.pump()
    assert stage.running == []
    assert await stage.batcher.drain(0.0)


@run
async def test_a_withdrawn_request_inside_a_run_is_cancelled_there() -> None:
    stage = Stage(BatchSettings(max_batch_size=2), executors=0)
    stays, goes = stage.submit("stays"), stage.submit("goes")
    stage.pool.executors = 1
    stage.batcher.pump()
    goes.future.cancel()
    stage.batcher.withdraw(goes)
    assert stage.pool.cancelled == [(0, 1)]
    stays.future.cancel()
    stage.batcher.withdraw(stays)
    assert stage.pool.cancelled == [(0, 1), (0, 0)]
    drained = asyncio.ensure_future(stage.batcher.drain(30.0))
    await asyncio.sleep(0)
    assert not drained.done()
    stage.pool.pop().give_back()  # no lane has begun with it
    assert stage.running == []
    assert await drained


@run
async def test_the_neighbour_of_a_withdrawn_request_gets_its_answer() -> None:
    stage = Stage(BatchSettings(max_batch_size=2))
    goes, stays = stage.submit("goes"), stage.submit("stays")
    goes.future.cancel()
    stage.batcher.withdraw(goes)
    stage.pool.finish([Cancelled(), InferResponse(b"fine")])
    assert await stays.body() == b"fine"
    assert await stage.batcher.drain(0.0)


@run
async def test_a_request_that_is_withdrawn_after_its_answer_cancels_nothing() -> None:
    stage = Stage(BatchSettings())
    first = stage.submit("first")
    stage.pool.finish()
    stage.submit("second")  # in the place of the first, for all the page knows
    stage.batcher.withdraw(first)
    assert stage.pool.cancelled == []
    assert await first.body() == b"first"


@run
async def test_draining_ends_when_the_last_request_is_too_late_to_be_run() -> None:
    stage = Stage(BatchSettings(), executors=0)
    stage.submit("late", deadline_s=stage.now_s + 60.0)
    drained = asyncio.ensure_future(stage.batcher.drain(30.0))
    await asyncio.sleep(0)
    stage.now_s += 60.0
    stage.pool.executors = 1
    stage.batcher.pump()
    assert await drained


@run
async def test_a_late_answer_is_dropped() -> None:
    stage = Stage(BatchSettings())
    late = stage.submit("late")
    stage.batcher.withdraw(late, DeadlineExceeded("too late"))
    assert stage.pool.cancelled == [(0, 0)]
    stage.pool.finish()
    with pytest.raises(DeadlineExceeded, match="too late"):
        await late.future


@pytest.mark.parametrize("failure", [HandlerFailed(), NoRoom("Out of resources")])
@run
async def test_a_batch_that_failed_as_a_whole_is_run_again_one_by_one(failure: ServingError) -> None:
    stage = Stage(BatchSettings(max_batch_size=3))
    requests = [stage.submit(name) for name in ("a", "bad", "c")]
    stage.pool.finish([failure] * 3)
    assert stage.running == [["a"]]
    assert stage.pool.finish() == ["a"]
    stage.pool.finish([HandlerFailed("no image", 400)])
    assert stage.pool.finish() == ["c"]
    assert await requests[0].body() == b"a"
    with pytest.raises(HandlerFailed, match="no image"):
        await requests[1].future
    assert await requests[2].body() == b"c"
    assert await stage.batcher.drain(0.0)


@run
async def test_one_request_that_has_no_room_is_not_run_again() -> None:
    stage = Stage(BatchSettings())
    request = stage.submit("large")
    stage.pool.finish([NoRoom("Out of resources")])
    with pytest.raises(OutOfResources):
        await request.future
    assert stage.running == []


@run
async def test_one_request_of_a_batch_without_room_does_not_make_the_others_run_again() -> None:
    stage = Stage(BatchSettings(max_batch_size=2))
    large, small = stage.submit("large"), stage.submit("small")
    stage.pool.finish([NoRoom("Out of resources"), InferResponse(b"small")])
    with pytest.raises(OutOfResources):
        await large.future
    assert await small.body() == b"small"
    assert stage.running == []


@run
async def test_a_request_without_room_does_not_hide_that_the_others_failed_as_a_whole() -> None:
    stage = Stage(BatchSettings(max_batch_size=3))
    stage.submit("large").future.add_done_callback(lambda done: done.exception())
    good, _ = stage.submit("good"), stage.submit("bad")
    stage.pool.finish([NoRoom("Out of resources"), HandlerFailed(), HandlerFailed()])
    assert stage.running != []
    while stage.running:
        stage.pool.finish()
    assert await good.body() == b"good"


@run
async def test_those_that_were_left_out_do_not_hide_that_a_batch_failed_as_a_whole() -> None:
    stage = Stage(BatchSettings(max_batch_size=4))
    gone, late, good, _ = [stage.submit(name) for name in ("gone", "late", "good", "bad")]
    gone.future.cancel()
    stage.batcher.withdraw(gone)
    stage.batcher.withdraw(late, DeadlineExceeded("too late"))
    stage.pool.finish([Cancelled(), DeadlineExceeded("too late"), HandlerFailed(), HandlerFailed()])
    assert stage.running == [["good"]]
    stage.pool.finish()
    assert await good.body() == b"good"
    assert stage.running == [["bad"]]


@run
async def test_a_request_with_a_wrong_tensor_does_not_hide_that_the_rest_of_its_batch_failed() -> None:
    stage = Stage(BatchSettings(max_batch_size=3))
    wrong, bad, good = [stage.submit(name) for name in ("wrong", "bad", "good")]
    refusal = InvalidRequest("Input x is wrong: it is too short")
    stage.pool.finish([refusal, HandlerFailed(), HandlerFailed()])
    assert stage.running == [["wrong"]]
    stage.pool.finish([refusal])
    assert stage.running == [["bad"]]
    stage.pool.finish([HandlerFailed("no image", 400)])
    assert stage.pool.finish() == ["good"]
    with pytest.raises(InvalidRequest, match="too short"):
        await wrong.future
    with pytest.raises(HandlerFailed, match="no image"):
        await bad.future
    assert await good.body() == b"good"


@run
async def test_the_only_one_of_its_batch_that_ran_is_not_run_again() -> None:
    stage = Stage(BatchSettings(max_batch_size=2))
    gone, bad = stage.submit("gone"), stage.submit("bad")
    gone.future.cancel()
    stage.batcher.withdraw(gone)
    stage.pool.finish([Cancelled(), HandlerFailed()])
    assert stage.running == []
    with pytest.raises(HandlerFailed):
        await bad.future


def busy(**settings: Any) -> Stage:
    """A stage whose only executor has a full batch of two, and would take one more."""
    stage = Stage(BatchSettings(max_batch_size=2, **settings))
    stage.submit("a")
    stage.submit("b")
    stage.pool.more = 1
    return stage


@run
async def test_a_full_batch_goes_ahead_of_the_executor_that_will_be_free_first() -> None:
    stage = busy()
    stage.submit("c")
    assert stage.running == [["a", "b"]]
    stage.now_s += 3600.0  # no delay makes less than a full one go
    stage.batcher.pump()
    assert stage.running == [["a", "b"]]
    ahead = stage.submit("d")
    assert stage.running == [["a", "b"], ["c", "d"]]
    began_s = stage.now_s + 1.0
    stage.now_s += 3.0
    stage.pool.finish()
    assert stage.pool.finish(began_s=began_s) == ["c", "d"]
    assert await ahead.body() == b"d"
    assert ahead.dequeued_s == began_s  # until then it waited
    assert stage.reports[1] == (2, 2.0)


@run
async def test_the_observer_learns_how_many_batches_executors_have() -> None:
    stage = busy()
    stage.submit("c")
    stage.submit("d")
    assert stage.counts == [1, 2]
    stage.pool.finish()
    assert stage.counts[2] == 1
    stage.pool.finish()
    assert stage.counts[-1] == 0


@run
async def test_runs_beyond_the_executors_in_service_count_as_waiting() -> None:
    stage = busy(max_queue_size=3)
    for name in "cd":
        stage.submit(name)
    assert stage.running == [["a", "b"], ["c", "d"]]
    assert (stage.batcher.queue_length, stage.batcher.queue_capacity) == (2, 1)
    stage.submit("e")
    with pytest.raises(QueueFull):
        stage.submit("f")
    stage.pool.finish()  # now the other run is in the executor
    assert (stage.batcher.queue_length, stage.batcher.queue_capacity) == (1, 2)
    stage.submit("f")
    stage.pool.finish()
    assert (stage.running, stage.batcher.queue_length) == ([["e", "f"]], 0)


@pytest.mark.parametrize("timed", ["deadline", "priority"])
@run
async def test_nothing_goes_ahead_that_something_may_have_to_overtake(timed: str) -> None:
    stage = busy()
    deadline_s, priority = (200.0, 0) if timed == "deadline" else (NO_DEADLINE, 1)
    stage.submit("c", deadline_s=deadline_s, priority=priority)
    stage.submit("d")
    assert stage.running == [["a", "b"]]
    stage.pool.finish()
    assert stage.running == [["c", "d"]]
    stage.submit("e")
    stage.submit("f")  # plain ones: one with a priority may come any time where there was one
    assert stage.running == [["c", "d"], ["e", "f"]][: 2 if timed == "deadline" else 1]


@run
async def test_a_run_that_was_given_back_is_first_in_line_again() -> None:
    stage = Stage(BatchSettings())
    first = stage.submit("first")
    stage.submit("second")
    stage.now_s += 1.0
    stage.pool.pop().give_back()
    assert first.dequeued_s == stage.now_s  # it waited until now
    assert stage.pool.finish() == ["first"]
    assert await first.body() == b"first"
    assert stage.running == [["second"]]


@run
async def test_with_tickets_a_request_is_admitted_only_while_an_executor_is_idle() -> None:
    stage = Stage(BatchSettings(use_tickets=True))
    stage.submit("running")
    with pytest.raises(QueueFull):
        stage.submit("no ticket")


@run
async def test_one_failed_item_does_not_touch_its_neighbour() -> None:
    stage = Stage(BatchSettings(max_batch_size=2))
    bad, good = stage.submit("bad"), stage.submit("good")
    stage.pool.finish([HandlerFailed(), InferResponse(b"fine")])
    with pytest.raises(HandlerFailed):
        await bad.future
    assert await good.body() == b"fine"


@run
async def test_a_streamed_answer_arrives_in_parts_and_ends() -> None:
    stage = Stage(BatchSettings())
    request = stage.submit("a")
    inside = stage.pool.runs[0]
    inside.part(0, InferResponse(b"one", (("k", "v"),), 202))
    response = await request.future
    assert isinstance(response, StreamedResponse)
    assert (response.head.status, response.head.headers) == (202, (("k", "v"),))
    inside.part(0, InferResponse(b"two"))
    stage.pool.finish([InferResponse(b"end")])
    assert [chunk async for chunk in response.chunks] == [b"one", b"two", b"end"]


@run
async def test_a_stream_that_breaks_raises_where_it_is_read() -> None:
    stage = Stage(BatchSettings())
    request = stage.submit("a")
    stage.pool.runs[0].part(0, InferResponse(b"one"))
    response = await request.future
    assert isinstance(response, StreamedResponse)
    stage.pool.finish([ExecutorDied("killed")])
    seen = []
    with pytest.raises(ExecutorDied):
        async for chunk in response.chunks:
            seen.append(chunk)
    assert seen == [b"one"]


@run
async def test_who_has_a_part_of_an_answer_is_not_run_again() -> None:
    stage = Stage(BatchSettings(max_batch_size=2))
    begun, _ = stage.submit("begun"), stage.submit("other")
    stage.pool.runs[0].part(0, InferResponse(b"one"))
    response = await begun.future
    assert isinstance(response, StreamedResponse)
    stage.pool.finish([HandlerFailed()] * 2)
    assert stage.running == [["other"]]
    with pytest.raises(HandlerFailed):
        async for _ in response.chunks:
            pass


@run
async def test_a_client_that_leaves_its_stream_did_not_read_too_slowly() -> None:
    stage = Stage(BatchSettings())
    stage.batcher.submit(CallingRequest("a"))
    stage.pool.runs[0].part(0, InferResponse(b"one"))  # its client does not keep the answer
    while not stage.pool.cancelled:
        await asyncio.sleep(0)
    assert stage.unread == 0


@run
async def test_a_stream_that_is_not_read_holds_its_lane_and_then_is_given_up(caplog: Any) -> None:
    stage = Stage(BatchSettings())
    stage.batcher.unread_limit_bytes = 100
    request = stage.submit("a")
    inside = stage.pool.runs[0]
    assert not inside.part(0, InferResponse(bytes(100)))
    response = await request.future
    assert isinstance(response, StreamedResponse)
    assert inside.part(0, InferResponse(bytes(110)))
    assert inside.held
    assert not inside.part(0, InferResponse(b"no room"))
    with pytest.raises(LeftUnread):
        await anext(response.chunks)
    await asyncio.sleep(0)
    assert not inside.held
    assert not inside.part(0, InferResponse(b"too late"))
    assert not request.open
    assert stage.unread == 1
    assert stage.pool.cancelled == [(0, 0)]
    (line,) = caplog.messages
    assert line.startswith("request a: The answer was given up: it was read too slowly. 210 bytes")
    stage.pool.finish([InferResponse(b"end")])
    assert await stage.batcher.drain(0)


@run
async def test_a_lane_that_is_held_goes_on_when_its_client_has_read() -> None:
    stage = Stage(BatchSettings())
    stage.batcher.unread_limit_bytes = 10
    request = stage.submit("a")
    inside = stage.pool.runs[0]
    assert inside.part(0, InferResponse(bytes(11)))
    response = await request.future
    assert isinstance(response, StreamedResponse)
    assert stage.pool.let_go == []
    assert await anext(response.chunks) == bytes(11)
    assert (stage.pool.let_go, inside.held) == ([0], False)
    stage.pool.finish([InferResponse(b"end")])
    assert [chunk async for chunk in response.chunks] == [b"end"]


@run
async def test_draining_refuses_new_requests_and_waits_for_the_old() -> None:
    stage = Stage(BatchSettings())
    request = stage.submit("a")
    stage.batcher.close_admission()
    with pytest.raises(Unavailable):
        stage.submit("b")
    assert not await stage.batcher.drain(0.0)
    stage.pool.finish()
    assert await stage.batcher.drain(0.0)
    assert await request.body() == b"a"
    stage.batcher.open_admission()
    stage.submit("c")
    assert not await stage.batcher.drain(0.01)


@run
async def test_what_is_closed_for_good_is_not_opened_again() -> None:
    stage = Stage(BatchSettings())
    stage.batcher.close_admission(for_good=True)
    stage.batcher.close_admission()
    stage.batcher.open_admission()
    with pytest.raises(Unavailable):
        stage.submit("a")


class Body(bytearray):
    """Bytes that tell when they are freed."""


@run
async def test_a_request_that_was_refused_is_not_held() -> None:
    stage = Stage(BatchSettings())
    stage.batcher.close_admission()
    freed = []
    for number in range(3):
        body = Body(b"large")
        freed.append(weakref.ref(body))
        with contextlib.suppress(Unavailable):
            request = CallingRequest(str(number))
            request.parameters = (Parameter("body", body),)  # type: ignore[arg-type]  # bytes have no weak references
            stage.batcher.submit(request)
        del request, body
    gc.collect()
    assert [body() for body in freed] == [None] * 3


@run
async def test_an_answer_that_ends_another_request_does_not_end_draining_before_its_batch() -> None:
    stage = Stage(BatchSettings(max_batch_size=2), executors=0)
    leaving = stage.submit("leaving")
    ends_it = CallingRequest("late", lambda outcome: stage.batcher.withdraw(leaving))
    ends_it.deadline_s = stage.now_s + 5.0
    stage.batcher.submit(ends_it)
    stage.submit("stays")
    drained = asyncio.ensure_future(stage.batcher.drain(5.0))
    await asyncio.sleep(0)
    stage.batcher.withdraw(leaving)
    stage.now_s += 6.0
    stage.pool.executors = 1
    stage.batcher.pump()
    await asyncio.sleep(0.01)  # more turns than a drain needs to end
    assert stage.running == [["stays"]]
    assert not drained.done()
    stage.pool.finish()
    assert await drained


@run
async def test_requests_that_wait_are_answered_when_no_executor_is_left() -> None:
    stage = Stage(BatchSettings(), executors=0)
    request = stage.submit("a")
    stage.batcher.fail_queued(Unavailable("no worker"))
    with pytest.raises(Unavailable):
        await request.future
    assert await stage.batcher.drain(0.0)


@run
async def test_requests_that_wait_are_answered_when_every_executor_gave_up() -> None:
    stage = Stage(BatchSettings())
    stage.submit("a")
    waiting = stage.submit("b")
    stage.pool.finish()
    inside = stage.pool.pop()
    stage.pool.state, stage.pool.executors = ExecutorState.FAILED, 0
    inside.give_back()  # nor had it begun with this one
    with pytest.raises(Unavailable):
        waiting.future.result()
    assert await stage.batcher.drain(0.0)


def all_restart(stage: Stage, since_s: float, restart_s: float) -> None:
    stage.pool.executors, stage.pool.state = 0, ExecutorState.RESTARTING
    stage.pool.down = Outage(since_s, restart_s)


@run
async def test_requests_wait_for_executors_that_restart_until_the_outage_is_too_long() -> None:
    stage = Stage(BatchSettings())
    stage.batcher.restart_wait_s = 0.05
    all_restart(stage, since_s=99.99, restart_s=107.5)
    first, second = stage.submit("a"), stage.submit("b")
    assert stage.batcher.queue_length == 2
    stage.now_s = 100.5
    for request in (first, second):
        with pytest.raises(Restarting) as caught:
            await asyncio.wait_for(request.future, 10.0)
        assert caught.value.retry_after_s == 7.0
    assert await stage.batcher.drain(0.0)


@run
async def test_a_request_in_an_outage_that_is_too_long_already_is_answered_at_once() -> None:
    stage = Stage(BatchSettings())
    all_restart(stage, since_s=89.0, restart_s=95.0)  # the new process loads
    with pytest.raises(Restarting) as caught:
        stage.submit("a").future.result()
    assert caught.value.retry_after_s == 1.0


@run
async def test_requests_run_when_an_executor_is_back_before_the_outage_is_too_long() -> None:
    stage = Stage(BatchSettings())
    stage.batcher.restart_wait_s = 0.05
    all_restart(stage, since_s=100.0, restart_s=100.0)
    request = stage.submit("a")
    stage.pool.executors, stage.pool.down, stage.pool.state = 1, None, ExecutorState.READY
    stage.batcher.pump()
    assert stage.running == [["a"]]
    stage.now_s = 200.0
    stage.batcher.pump()
    assert not request.future.done()
    stage.pool.finish()
    assert await request.body() == b"a"


@run
async def test_requests_wait_for_a_first_load_however_long_it_takes() -> None:
    stage = Stage(BatchSettings(), executors=0)
    stage.batcher.restart_wait_s = 0.0
    stage.pool.state = ExecutorState.STARTING
    request = stage.submit("a")
    stage.batcher.pump()
    assert not request.future.done()


CRASH = ExecutorDied("killed by signal 11 (SIGSEGV)", crashed=True)


@run
async def test_a_request_that_crashed_workers_twice_is_refused_and_never_runs_a_third_time() -> None:
    stage = Stage(BatchSettings(max_batch_size=2, max_queue_delay_ms=0))
    tries = []
    for number in range(2):
        tries.append(stage.submit(f"try-{number}", content="poison"))
        assert stage.pool.runs[0].exclusive is bool(number)
        stage.now_s += 1.0
        stage.pool.finish([CRASH])
    with pytest.raises(ExecutorDied):
        await tries[0].future
    with pytest.raises(Quarantined, match="two crashes"):
        await tries[1].future
    with pytest.raises(Quarantined):
        stage.submit("third", content="poison")
    assert stage.running == []


@run
async def test_the_saved_copy_of_a_quarantined_request_has_its_content(tmp_path: Path) -> None:
    stage = Stage(BatchSettings())
    files = QuarantineFiles(ModelKey("net", "1.0"), QuarantineSettings(tmp_path))
    stage.batcher.quarantine = quarantine.Quarantine(files, now=lambda: stage.now_s)
    await suspected(stage, "poison")
    request = stage.submit("bad", content="poison")
    stage.now_s += 1.0
    stage.pool.finish([CRASH])
    with pytest.raises(Quarantined):
        await request.future
    await asyncio.gather(*files._writing)
    (file,) = tmp_path.iterdir()
    (parameter,) = json.loads(file.read_text())["parameters"]
    assert base64.b64decode(parameter["base64"]) == b"poison"


@run
async def test_a_suspect_runs_alone_and_its_neighbours_together() -> None:
    stage = Stage(BatchSettings(max_batch_size=3, max_queue_delay_ms=0), executors=0)
    first = [stage.submit(name, content=f"content {name}") for name in "abc"]
    stage.pool.executors = 1
    stage.batcher.pump()
    assert stage.running == [["a", "b", "c"]]
    stage.now_s += 1.0
    stage.pool.finish([CRASH] * 3)
    for request in first:
        with pytest.raises(ExecutorDied):
            await request.future
    stage.pool.executors = 0
    for name, content in (("x", "new x"), ("a2", "content a"), ("y", "new y"), ("z", "new z")):
        stage.submit(name, content=content)
    stage.pool.executors = 3
    stage.batcher.pump()
    assert stage.running == [["x"], ["a2"], ["y", "z"]]
    assert [run.exclusive for run in stage.pool.runs] == [False, True, False]


async def suspected(stage: Stage, content: str) -> None:
    """Have a request of that content crash the worker once."""
    request = stage.submit("first crash", content=content)
    stage.now_s += 1.0
    stage.pool.finish([CRASH])
    with pytest.raises(ExecutorDied):
        await request.future


@run
async def test_a_suspect_waits_until_nothing_else_is_in_its_process() -> None:
    stage = Stage(BatchSettings(), executors=2, lanes=True)
    await suspected(stage, "poison")
    stage.submit("neighbour")
    suspect = stage.submit("suspect", content="poison")
    behind = stage.submit("behind")
    assert (stage.pool.free, stage.running) == (1, [["neighbour"]])
    stage.pool.finish()
    assert stage.running == [["suspect"]]  # in a process of two lanes
    stage.now_s += 1.0
    stage.pool.finish()
    assert stage.running == [["behind"]]
    stage.pool.finish()
    assert [await request.body() for request in (suspect, behind)] == [b"suspect", b"behind"]


@run
async def test_requests_behind_a_suspect_run_when_it_leaves_the_queue() -> None:
    stage = Stage(BatchSettings(), executors=2, lanes=True)
    await suspected(stage, "poison")
    stage.submit("neighbour")
    suspect = stage.submit("suspect", content="poison")
    stage.submit("behind")
    assert (stage.pool.free, stage.running) == (1, [["neighbour"]])
    stage.batcher.withdraw(suspect)
    await asyncio.sleep(0)
    assert stage.running == [["neighbour"], ["behind"]]


@run
async def test_a_suspect_that_is_given_back_waits_for_an_empty_process_again() -> None:
    stage = Stage(BatchSettings(), executors=2, lanes=True)
    await suspected(stage, "poison")
    stage.submit("suspect", content="poison")
    stage.pool.executors, inside = 0, stage.pool.pop()
    inside.give_back()
    assert stage.running == []
    stage.pool.executors = 2
    stage.batcher.pump()
    assert stage.running == [["suspect"]]
    assert stage.pool.runs[0].exclusive


@run
async def test_a_crash_beside_others_convicts_none_of_them() -> None:
    stage = Stage(BatchSettings(), executors=2, lanes=True)
    for name in ("one", "two"):
        stage.submit(name, content=name)
    waiting = stage.submit("copy", content="two")
    stage.now_s += 1.0
    for _ in range(2):  # one process was lost with both in it
        stage.pool.executors = 0
        stage.pool.finish([CRASH])
    stage.pool.executors = 2
    stage.batcher.pump()
    assert [run.exclusive for run in stage.pool.runs] == [True]  # it waited as a clean one
    stage.now_s += 1.0
    stage.pool.finish()
    assert await waiting.body() == b"copy"
    assert not stage.batcher.quarantine.convicted


@run
async def test_a_suspect_is_convicted_only_in_a_process_that_no_other_version_shares() -> None:
    stage = Stage(BatchSettings())
    await suspected(stage, "poison")
    for shared, outcome in ((True, ExecutorDied), (False, Quarantined)):
        request = stage.submit("again", content="poison")
        stage.pool.runs[0].shares_process = shared
        stage.now_s += 1.0
        stage.pool.finish([CRASH])
        with pytest.raises(outcome):
            await request.future


@run
async def test_bodies_of_waiting_requests_are_hashed_when_a_record_is_added_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed: list[str] = []

    def counted(request: Request) -> str:
        hashed.append(request.request_id)
        return digest_of(request)

    stage = Stage(BatchSettings())
    await suspected(stage, "poison")
    stage.submit("running", content="honest")
    for number in range(20):
        stage.submit(f"waits-{number}", content="honest")
    monkeypatch.setattr(quarantine, "digest_of", counted)
    stage.pool.finish([InferResponse(b"")])
    assert not [one for one in hashed if one.startswith("waits")]


@run
async def test_a_copy_that_waits_is_answered_when_its_request_is_convicted() -> None:
    stage = Stage(BatchSettings())
    await suspected(stage, "poison")
    stage.submit("two", content="poison")
    waiting = stage.submit("copy", content="poison")
    stage.now_s += 1.0
    stage.pool.finish([CRASH])
    with pytest.raises(Quarantined):
        await waiting.future
    assert (stage.running, stage.batcher.queue_length) == ([], 0)


@run
async def test_the_more_urgent_request_runs_first_and_an_expired_one_never() -> None:
    stage = Stage(BatchSettings(), executors=0)
    for name, priority, deadline_s in (("plain", 0, 200.0), ("late", 9, 101.0), ("urgent", 2, 200.0)):
        stage.submit(name, deadline_s=deadline_s, priority=priority)
    stage.now_s = 102.0
    stage.pool.executors = 3
    stage.batcher.pump()
    assert stage.running == [["urgent"], ["plain"]]


@run
async def test_more_urgent_requests_do_not_extend_the_wait_of_those_that_came_before() -> None:
    stage = Stage(BatchSettings(max_batch_size=32, max_queue_delay_ms=10_000))
    for priority in (-9, 0, 9):
        stage.submit(f"{priority}", priority=priority)
        assert stage.running == []
        stage.now_s += 4.0
    stage.batcher.pump()
    assert stage.running == [["9", "0", "-9"]]


@run
async def test_the_turns_of_other_clients_do_not_extend_the_wait_of_those_that_came_before() -> None:
    stage = Stage(BatchSettings(max_batch_size=3, max_queue_delay_ms=10_000), executors=0)
    one, two = client("one"), client("two")
    for name in ("a1", "a2", "a3"):
        stage.submit(name, account=one)
    stage.now_s += 8.0
    for name in ("b1", "b2"):
        stage.submit(name, account=two)
    stage.pool.executors = 2
    stage.batcher.pump()
    assert stage.running == [["a1", "b1", "a2"]]
    stage.now_s += 4.0
    stage.batcher.pump()
    assert stage.running == [["a1", "b1", "a2"], ["b2", "a3"]]


@run
async def test_what_comes_after_a_prioritised_queue_is_empty_waits_in_line_again() -> None:
    stage = Stage(BatchSettings(), executors=0)
    for name, priority in (("patient", -5), ("plain", 0), ("urgent", 5)):
        stage.submit(name, priority=priority)
    stage.pool.executors = 3
    stage.batcher.pump()
    assert stage.running == [["urgent"], ["plain"], ["patient"]]
    stage.submit("first")
    stage.submit("second")
    for _ in range(2):
        stage.pool.finish()
    assert stage.running == [["patient"], ["first"], ["second"]]


@run
async def test_eager_batches_take_what_comes_in_the_same_turn_of_the_loop() -> None:
    stage = Stage(BatchSettings(max_batch_size=4, dispatch="eager"))
    stage.submit("a")
    stage.submit("b")
    assert stage.running == []
    await asyncio.sleep(0)
    assert stage.running == [["a", "b"]]
    stage.submit("c")
    await asyncio.sleep(0)
    stage.submit("d")
    stage.pool.finish()
    assert stage.running == [["c", "d"]]


@run
async def test_an_eager_batch_of_one_waits_for_no_turn_of_the_loop() -> None:
    stage = Stage(BatchSettings(dispatch="eager"))
    stage.submit("a")
    assert stage.running == [["a"]]


@run
async def test_where_nobody_else_wants_an_executor_a_short_deadline_is_tried() -> None:
    stage = Stage(BatchSettings())
    stage.submit("slow")
    stage.now_s += 10.0
    stage.pool.finish()
    tried = stage.submit("tried", deadline_s=stage.now_s + 1.0)
    assert stage.running == [["tried"]]
    stage.pool.finish()
    assert await tried.body() == b"tried"


@run
async def test_a_request_withdrawn_by_the_answer_of_a_late_neighbour_is_cancelled_in_its_run() -> None:
    stage = Stage(BatchSettings(max_batch_size=2), executors=0)
    leaving = stage.submit("leaving")
    late = CallingRequest("late", lambda outcome: stage.batcher.withdraw(leaving))
    late.deadline_s = stage.now_s + 5.0
    stage.batcher.submit(late)
    stage.now_s += 6.0
    stage.pool.executors = 1
    stage.batcher.pump()
    assert (stage.running, stage.pool.cancelled) == ([["leaving"]], [(0, 0)])


def client(name: str, weight: int = 1) -> Account:
    """An account without limits."""
    return Account(name, Quota(weight=weight), Tally(), Counter())


@run
async def test_a_client_with_a_thousand_waiting_requests_delays_another_by_no_more_than_one_batch() -> None:
    stage = Stage(BatchSettings(max_batch_size=8, max_queue_size=2000))
    many, one = client("many"), client("one")
    for number in range(1008):
        stage.submit(f"m{number}", account=many)
    first = stage.submit("first", account=one)
    stage.pool.finish()
    assert "first" in stage.running[0]
    stage.pool.finish()
    assert await first.body() == b"first"
    second = stage.submit("second", account=one)
    stage.pool.finish()
    assert "second" in stage.running[0]
    assert len(stage.running[0]) == 8
    stage.pool.finish()
    assert await second.body() == b"second"


@run
async def test_all_requests_of_several_clients_are_answered() -> None:
    stage = Stage(BatchSettings(max_batch_size=3, dispatch="eager"), executors=2)
    clients = [client(name) for name in "abc"]
    asked = [stage.submit(str(number), account=clients[number % 7 % 3]) for number in range(50)]
    await asyncio.sleep(0)
    while stage.pool.runs:
        stage.pool.finish()
    assert [await each.body() for each in asked] == [str(number).encode() for number in range(50)]
    assert await stage.batcher.drain(0.0)


@run
async def test_clients_take_turns_by_weight() -> None:
    stage = Stage(BatchSettings(max_batch_size=6), executors=0)
    heavy, light = client("heavy", weight=2), client("light")
    for number in range(9):
        stage.submit(f"h{number}", account=heavy)
        stage.submit(f"l{number}", account=light)
    stage.pool.executors = 1
    stage.batcher.pump()
    assert stage.running == [["h0", "h1", "l0", "h2", "h3", "l1"]]


@run
async def test_a_client_that_fills_the_queue_keeps_no_other_out_and_is_told_when_to_come_back() -> None:
    stage = Stage(BatchSettings(max_queue_size=4))
    many, one = client("many"), client("one")
    asked = [stage.submit(f"m{number}", account=many) for number in range(5)]  # the first one runs
    stage.submit("a", account=one)
    stage.submit("b", account=one)
    with pytest.raises(QueueFull):
        stage.submit("c", account=one)  # it has its half
    with pytest.raises(QueueFull):
        stage.submit("m5", account=many)
    for displaced in asked[3:]:
        with pytest.raises(QueueFull) as refusal:
            await displaced.future
        assert refusal.value.retry_after_s == 1.0
    assert stage.batcher.queue_length == 4
    assert many.tally.refused[QUEUE_SHARE] == 2
    order = []
    while stage.pool.runs:
        order += stage.pool.finish()
    assert order == ["m0", "m1", "a", "m2", "b"]


@run
async def test_a_request_that_is_refused_for_its_deadline_displaces_no_other() -> None:
    stage = Stage(BatchSettings(max_queue_size=2))
    many, one = client("many"), client("one")
    stage.submit("m0", account=many)
    stage.now_s += 1.0
    stage.pool.finish(began_s=100.0)  # a batch takes a second
    asked = [stage.submit(f"m{number}", account=many) for number in range(1, 4)]
    with pytest.raises(QueueFull):
        stage.submit("late", account=one, deadline_s=stage.now_s + 0.1)
    assert not any(each.future.done() for each in asked)


@run
async def test_a_deadline_passes_and_a_client_leaves_while_several_clients_wait() -> None:
    stage = Stage(BatchSettings())
    first, second = client("first"), client("second")
    for number in range(3):
        stage.submit(f"f{number}", account=first)
    late = stage.submit("late", account=second, deadline_s=stage.now_s + 5.0)
    gone = stage.submit("gone", account=second)
    stage.batcher.withdraw(gone)
    stage.now_s += 10.0
    order = []
    while stage.pool.runs:
        order += stage.pool.finish()
    assert order == ["f0", "f1", "f2"]
    with pytest.raises(DeadlineExceeded):
        await late.future


@run
async def test_a_prediction_counts_for_its_client_until_it_is_answered() -> None:
    stage = Stage(BatchSettings())
    account = client("a")
    account.running = 3
    stage.submit("answered", account=account)
    stage.pool.finish()
    assert account.running == 2
    stage.batcher.withdraw(stage.submit("gone", account=account))
    assert account.running == 1
    stage.pool.finish()
    request = stage.submit("streamed", account=account)
    stage.pool.runs[0].part(0, InferResponse(b"part"))
    assert (account.running, request.future.done()) == (1, True)
    stage.pool.finish()
    assert account.running == 0


@run
async def test_a_client_may_send_its_next_request_from_within_the_answer() -> None:
    """As a pipelined request is: it is parsed as soon as the answer before it is written."""
    stage = Stage(BatchSettings())
    account = client("a")
    account.running = 1
    seen: list[int] = []
    asked = CallingRequest("a", lambda _: seen.append(account.running))
    asked.account = account
    stage.batcher.submit(asked)
    stage.pool.finish()
    assert seen == [0]
