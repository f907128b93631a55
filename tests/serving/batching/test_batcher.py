"""The batcher with executors and a clock that the test moves by hand."""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime, timezone
from functools import wraps
from typing import Any, NamedTuple

import pytest

from torchere.serving.batching.batcher import Batcher
from torchere.serving.batching.pending import AwaitedReply, Pending
from torchere.serving.batching.running import RunningBatch
from torchere.serving.errors import (
    Cancelled,
    DeadlineExceeded,
    ExecutorDied,
    HandlerFailed,
    LeftUnread,
    Quarantined,
    QueueFull,
    Unavailable,
)
from torchere.serving.execution.executor import (
    BatchReport,
    BatchSink,
    ExecutorState,
    ExecutorStatus,
    Outcome,
)
from torchere.serving.settings import BatchSettings
from torchere.serving.types import NO_DEADLINE, InferRequest, InferResponse, Parameter, StreamedResponse


class PuppetPool:
    """Executors that do nothing until the test says so; `batches` holds what runs."""

    on_loop = False

    def __init__(self, free: int = 1) -> None:
        self.free = free
        self.ahead = 0
        self.executors = 0  # 0: as many as there are batches at once
        self.batches: list[tuple[list[str], BatchSink]] = []
        self.state = ExecutorState.READY

    def statuses(self) -> tuple[ExecutorStatus, ...]:
        return (ExecutorStatus(9000, self.state, datetime.now(timezone.utc), 1),)

    @property
    def in_service(self) -> int:
        return self.executors or self.free + len(self.batches)

    def portion(self, waiting: int) -> int:
        return waiting // 2 if waiting >= 4 else waiting

    def submit(
        self, requests: Sequence[InferRequest], sink: BatchSink, executor_id: int | None, *, behind: int
    ) -> None:
        if self.free:
            self.free -= 1
        else:
            self.ahead -= 1
        self.batches.append(([request.request_id for request in requests], sink))

    def finish(self, outcomes: list[Outcome] | None = None) -> list[str]:
        """Complete the oldest running batch; returns the ids it had."""
        ids, sink = self.batches.pop(0)
        self.free += 1
        sink.done(BatchReport(outcomes or [InferResponse(name.encode()) for name in ids]))
        return ids


class Submitted(NamedTuple):
    """A request in the batcher, and what its client waits for."""

    pending: Pending
    answer: asyncio.Future[InferResponse | StreamedResponse]


class Stage:
    """One batcher, its puppet, its clock, and the reports it gave."""

    def __init__(self, settings: BatchSettings, free: int = 1) -> None:
        self.now_s = 100.0
        self.pool = PuppetPool(free)
        self.reports: list[int] = []
        self.counts: list[int] = []
        self.unread = 0
        self.batcher = Batcher(
            settings,
            self.pool,
            observer=self,
            now=lambda: self.now_s,
            refusal="no worker",  # type: ignore[arg-type]
        )

    def batches_running(self, batches: int, now_s: float) -> None:
        self.counts.append(batches)

    def batch_finished(self, batch: RunningBatch, report: BatchReport, executor_s: float) -> None:
        self.reports.append(len(batch.pendings))

    def left_unread(self) -> None:
        self.unread += 1

    def submit(self, name: str, group: str = "", deadline_s: float = NO_DEADLINE) -> Submitted:
        reply = AwaitedReply()
        request = InferRequest(name, (), (), deadline_s)
        return Submitted(self.batcher.submit(request, reply, group), reply.future)

    @property
    def running(self) -> list[list[str]]:
        return [ids for ids, _ in self.pool.batches]


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
    assert (await first.answer).body == b"a"
    assert (await second.answer).body == b"b"
    assert stage.reports == [2]


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
    stage.batcher.submit(InferRequest("a", (), ()), lambda _: seen.append(stage.running), "")
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
    first = stage.submit("first").pending
    stage.now_s, stage.pool.free = 101.0, 0  # its executor was lost
    stage.batcher.pump()
    stage.now_s, stage.pool.free = 103.0, 1
    stage.batcher.pump()
    stage.now_s = 104.0
    second = stage.submit("second").pending
    assert stage.running == [["first", "second"]]
    assert (first.company_s, second.company_s) == (1.0, 0.0)
    assert first.dequeued_s == second.dequeued_s == 104.0
    third = stage.submit("third").pending
    stage.submit("fourth")
    stage.now_s = 106.0
    stage.pool.finish()
    assert stage.running == [["third", "fourth"]]
    assert third.company_s == 0.0


@run
async def test_groups_do_not_share_a_batch() -> None:
    stage = Stage(BatchSettings(max_batch_size=4, max_queue_delay_ms=0), free=0)
    for name, group in (("a", ""), ("b", ""), ("c", "explain"), ("d", "")):
        stage.submit(name, group)
    stage.pool.free = 3
    stage.batcher.pump()
    assert stage.running == [["a", "b"], ["c"], ["d"]]


@run
async def test_a_request_that_is_late_on_arrival_is_refused() -> None:
    stage = Stage(BatchSettings())
    with pytest.raises(DeadlineExceeded):
        stage.submit("late", deadline_s=100.0)
    assert stage.running == []


@run
async def test_batches_sent_ahead_of_an_executor_do_not_make_it_look_slow() -> None:
    stage = Stage(BatchSettings(max_queue_size=100), free=3)
    stage.pool.executors = 1  # with room for two more than it runs
    for name in ("first", "second", "third"):
        stage.submit(name)
    for _ in range(3):
        stage.now_s += 1.0
        stage.pool.finish()
    stage.pool.free = 1
    stage.submit("running")
    stage.submit("in time", deadline_s=stage.now_s + 4.0)
    with pytest.raises(QueueFull):
        stage.submit("hopeless", deadline_s=stage.now_s + 2.0)


@run
async def test_an_expired_request_never_runs() -> None:
    stage = Stage(BatchSettings(), free=0)
    expired = stage.submit("expired", deadline_s=101.0)
    stage.submit("alive", deadline_s=200.0)
    stage.now_s = 102.0
    stage.pool.free = 2
    stage.batcher.pump()
    assert stage.running == [["alive"]]
    with pytest.raises(DeadlineExceeded):
        await expired.answer
    stage.pool.finish()
    assert await stage.batcher.drain(0.0)


@run
async def test_a_request_is_answered_at_its_deadline_whatever_its_executor_does() -> None:
    stage = Stage(BatchSettings())
    running = stage.submit("running", deadline_s=stage.now_s + 0.01)
    waiting = stage.submit("waiting", deadline_s=stage.now_s + 0.01)
    for submitted in (running, waiting):
        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(submitted.answer, 30.0)
    assert (stage.running, stage.batcher.queue_length) == ([["running"]], 0)


@run
async def test_a_request_that_is_answered_is_not_held_until_its_deadline() -> None:
    stage = Stage(BatchSettings())
    pending = stage.submit("a", deadline_s=stage.now_s + 3600.0).pending
    stage.pool.finish()
    assert pending.deadline_timer is not None
    assert pending.deadline_timer.cancelled()


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
        await waiting.answer


@run
async def test_a_withdrawn_request_leaves_the_queue() -> None:
    stage = Stage(BatchSettings(), free=0)
    gone = stage.submit("gone")
    gone.answer.cancel()
    stage.batcher.withdraw(gone.pending)
    assert stage.batcher.queue_length == 0
    stage.pool.free = 1
    stage.batcher.pump()
    assert stage.running == []
    assert await stage.batcher.drain(0.0)


@run
async def test_a_batch_is_wanted_until_the_last_of_its_clients_is_gone() -> None:
    stage = Stage(BatchSettings(max_batch_size=2), free=0)
    stays, goes = stage.submit("stays"), stage.submit("goes")
    stage.pool.free = 1
    stage.batcher.pump()
    ((_, sink),) = stage.pool.batches
    goes.answer.cancel()
    stage.batcher.withdraw(goes.pending)
    assert sink.begun(stage.now_s) == [1]
    stays.answer.cancel()
    stage.batcher.withdraw(stays.pending)
    assert sink.begun(stage.now_s) == [0, 1]
    drained = asyncio.ensure_future(stage.batcher.drain(30.0))
    await asyncio.sleep(0)
    assert not drained.done()
    sink.returned()  # an executor does so that has not begun
    assert await drained


@run
async def test_draining_ends_when_the_last_request_is_too_late_to_be_run() -> None:
    stage = Stage(BatchSettings(), free=0)
    stage.submit("late", deadline_s=stage.now_s + 60.0)
    drained = asyncio.ensure_future(stage.batcher.drain(30.0))
    await asyncio.sleep(0)
    stage.now_s += 60.0
    stage.pool.free = 1
    stage.batcher.pump()
    assert await drained


@run
async def test_a_late_answer_is_dropped() -> None:
    stage = Stage(BatchSettings())
    late = stage.submit("late")
    stage.batcher.withdraw(late.pending, DeadlineExceeded("too late"))
    stage.pool.finish()
    with pytest.raises(DeadlineExceeded, match="too late"):
        await late.answer


@run
async def test_a_batch_that_failed_as_a_whole_is_run_again_one_by_one() -> None:
    stage = Stage(BatchSettings(max_batch_size=3))
    pendings = [stage.submit(name) for name in ("a", "bad", "c")]
    stage.pool.finish([HandlerFailed()] * 3)
    assert stage.running == [["a"]]
    assert stage.pool.finish() == ["a"]
    stage.pool.finish([HandlerFailed("no image", 400)])
    assert stage.pool.finish() == ["c"]
    assert (await pendings[0].answer).body == b"a"
    with pytest.raises(HandlerFailed, match="no image"):
        await pendings[1].answer
    assert (await pendings[2].answer).body == b"c"
    assert await stage.batcher.drain(0.0)


@run
async def test_those_that_were_left_out_do_not_hide_that_a_batch_failed_as_a_whole() -> None:
    stage = Stage(BatchSettings(max_batch_size=4))
    gone, late, good, _ = [stage.submit(name) for name in ("gone", "late", "good", "bad")]
    gone.answer.cancel()
    stage.batcher.withdraw(gone.pending)
    stage.batcher.withdraw(late.pending, DeadlineExceeded("too late"))
    stage.pool.finish([Cancelled(), DeadlineExceeded("too late"), HandlerFailed(), HandlerFailed()])
    assert stage.running == [["good"]]
    stage.pool.finish()
    assert (await good.answer).body == b"good"
    assert stage.running == [["bad"]]


@run
async def test_the_only_one_of_its_batch_that_ran_is_not_run_again() -> None:
    stage = Stage(BatchSettings(max_batch_size=2))
    gone, bad = stage.submit("gone"), stage.submit("bad")
    gone.answer.cancel()
    stage.batcher.withdraw(gone.pending)
    stage.pool.finish([Cancelled(), HandlerFailed()])
    assert stage.running == []
    with pytest.raises(HandlerFailed):
        await bad.answer


def busy(**settings: Any) -> Stage:
    """A stage whose only executor has a full batch of two, and would take one more."""
    stage = Stage(BatchSettings(max_batch_size=2, **settings))
    stage.submit("a")
    stage.submit("b")
    stage.pool.ahead = 1
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
    sink = stage.pool.batches[1][1]
    assert sink.begun(stage.now_s) == []
    stage.pool.finish()
    assert stage.pool.finish() == ["c", "d"]
    assert (await ahead.answer).body == b"d"
    assert ahead.pending.dequeued_s == sink.begun_s > 0.0  # until then it waited
    assert (sink.dispatched_s, sink.rounds) == (sink.begun_s, 1)


@run
async def test_the_observer_learns_how_many_batches_executors_have() -> None:
    stage = busy()
    stage.submit("c")
    stage.submit("d")
    assert stage.counts == [1, 2]
    stage.pool.batches.pop()[1].returned()  # its requests wait again, and go ahead once more
    stage.pool.finish()
    stage.pool.finish()
    assert stage.counts[2] == 1
    assert stage.counts[-1] == 0


@run
async def test_what_lies_ahead_counts_as_waiting_until_it_is_begun() -> None:
    stage = busy(max_queue_size=3)
    for name in "cd":
        stage.submit(name)
    assert stage.running == [["a", "b"], ["c", "d"]]
    stage.pool.ahead = 0
    assert (stage.batcher.queue_length, stage.batcher.queue_capacity) == (2, 1)
    stage.submit("e")
    with pytest.raises(QueueFull):
        stage.submit("f")
    stage.pool.batches[1][1].begun(stage.now_s)
    assert (stage.batcher.queue_length, stage.batcher.queue_capacity) == (1, 2)
    stage.submit("f")


@pytest.mark.parametrize("timed", ["deadline", "priority"])
@run
async def test_nothing_goes_ahead_that_something_may_have_to_overtake(timed: str) -> None:
    stage = busy()
    stage.pool.executors = 1
    deadline_s, priority = (200.0, 0) if timed == "deadline" else (NO_DEADLINE, 1)
    stage.batcher.submit(InferRequest("c", (), (), deadline_s, priority), AwaitedReply())
    stage.submit("d")
    assert stage.running == [["a", "b"]]
    stage.pool.finish()
    assert stage.running == [["c", "d"]]
    stage.submit("e")
    stage.submit("f")  # plain ones: one with a priority may come any time where there was one
    assert stage.running == [["c", "d"], ["e", "f"]][: 2 if timed == "deadline" else 1]


@run
async def test_a_batch_that_was_given_back_is_first_in_line_again() -> None:
    stage = Stage(BatchSettings())
    first = stage.submit("first")
    stage.submit("second")
    _, sink = stage.pool.batches.pop(0)
    stage.pool.free = 1
    sink.returned()
    assert stage.pool.finish() == ["first"]
    assert (await first.answer).body == b"first"
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
        await bad.answer
    assert (await good.answer).body == b"fine"


@run
async def test_a_streamed_answer_arrives_in_parts_and_ends() -> None:
    stage = Stage(BatchSettings())
    pending = stage.submit("a")
    sink = stage.pool.batches[0][1]
    sink.partial(0, InferResponse(b"one", (("k", "v"),), 202))
    response = await pending.answer
    assert isinstance(response, StreamedResponse)
    assert (response.head.status, response.head.headers) == (202, (("k", "v"),))
    sink.partial(0, InferResponse(b"two"))
    stage.pool.finish([InferResponse(b"end")])
    assert [chunk async for chunk in response.chunks] == [b"one", b"two", b"end"]


@run
async def test_a_stream_that_breaks_raises_where_it_is_read() -> None:
    stage = Stage(BatchSettings())
    pending = stage.submit("a")
    stage.pool.batches[0][1].partial(0, InferResponse(b"one"))
    response = await pending.answer
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
    stage.pool.batches[0][1].partial(0, InferResponse(b"one"))
    response = await begun.answer
    assert isinstance(response, StreamedResponse)
    stage.pool.finish([HandlerFailed()] * 2)
    assert stage.running == [["other"]]
    with pytest.raises(HandlerFailed):
        async for _ in response.chunks:
            pass


@run
async def test_a_client_that_leaves_its_stream_did_not_read_too_slowly() -> None:
    stage = Stage(BatchSettings())
    submitted = stage.submit("a")
    sink = stage.pool.batches[0][1]
    sink.partial(0, InferResponse(b"one"))
    await submitted.answer
    del submitted  # nobody holds the answer now
    while not sink.begun(stage.now_s):
        await asyncio.sleep(0)
    assert stage.unread == 0


@run
async def test_a_stream_that_is_not_read_holds_its_executor_and_then_is_given_up(caplog: Any) -> None:
    stage = Stage(BatchSettings())
    stage.batcher.unread_limit_bytes = 10
    pending = stage.submit("a")
    sink = stage.pool.batches[0][1]
    assert sink.partial(0, InferResponse(bytes(10))) is None
    response = await pending.answer
    assert isinstance(response, StreamedResponse)
    assert sink.partial(0, InferResponse(bytes(11))) is not None
    assert sink.partial(0, InferResponse(b"no room")) is None
    with pytest.raises(LeftUnread):
        await anext(response.chunks)
    await asyncio.sleep(0)
    assert sink.partial(0, InferResponse(b"too late")) is None
    assert not pending.pending.open
    assert stage.unread == 1
    (line,) = caplog.messages
    assert line.startswith("request a: The answer was given up: it was read too slowly. 21 bytes")
    stage.pool.finish([InferResponse(b"end")])
    assert await stage.batcher.drain(0)


@run
async def test_draining_refuses_new_requests_and_waits_for_the_old() -> None:
    stage = Stage(BatchSettings())
    pending = stage.submit("a")
    stage.batcher.close_admission()
    with pytest.raises(Unavailable):
        stage.submit("b")
    assert not await stage.batcher.drain(0.0)
    stage.pool.finish()
    assert await stage.batcher.drain(0.0)
    assert (await pending.answer).body == b"a"
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
            stage.batcher.submit(InferRequest(str(number), (Parameter("body", body),)), print)
        del body
    gc.collect()
    assert [body() for body in freed] == [None] * 3


@run
async def test_an_answer_that_ends_another_request_does_not_end_draining_before_its_batch() -> None:
    stage = Stage(BatchSettings(max_batch_size=2), free=0)
    leaving = stage.submit("leaving")
    ends_it = InferRequest("late", (), (), deadline_s=stage.now_s + 5.0)
    stage.batcher.submit(ends_it, lambda outcome: stage.batcher.withdraw(leaving.pending))
    stage.submit("stays")
    drained = asyncio.ensure_future(stage.batcher.drain(5.0))
    await asyncio.sleep(0)
    stage.batcher.withdraw(leaving.pending)
    stage.now_s += 6.0
    stage.pool.free = 1
    stage.batcher.pump()
    await asyncio.sleep(0.01)  # more turns than a drain needs to end
    assert stage.running == [["stays"]]
    assert not drained.done()
    stage.pool.finish()
    assert await drained


@run
async def test_what_waits_is_answered_when_nobody_is_left_to_run_it() -> None:
    stage = Stage(BatchSettings(), free=0)
    pending = stage.submit("a")
    stage.batcher.fail_queued(Unavailable("no worker"))
    with pytest.raises(Unavailable):
        await pending.answer
    assert await stage.batcher.drain(0.0)


@run
async def test_what_waits_is_answered_when_every_executor_gave_up() -> None:
    stage = Stage(BatchSettings())
    stage.submit("a")
    waiting = stage.submit("b")
    stage.pool.finish()
    _, sink = stage.pool.batches.pop()
    stage.pool.state = ExecutorState.FAILED
    sink.returned()  # nor had it begun with this one
    with pytest.raises(Unavailable):
        waiting.answer.result()
    assert await stage.batcher.drain(0.0)


CRASH = ExecutorDied("killed by signal 11 (SIGSEGV)", crashed=True)


def with_content(name: str, content: str) -> InferRequest:
    return InferRequest(name, (Parameter("body", content.encode()),))


@run
async def test_a_request_that_crashed_executors_twice_is_refused_and_never_runs_a_third_time() -> None:
    stage = Stage(BatchSettings(max_batch_size=2, max_queue_delay_ms=0))
    replies = []
    for number, outcome in enumerate((CRASH, CRASH)):
        reply = AwaitedReply()
        stage.batcher.submit(with_content(f"try-{number}", "poison"), reply)
        stage.now_s += 1.0
        stage.pool.finish([outcome])
        replies.append(reply)
    with pytest.raises(ExecutorDied):
        await replies[0].future
    with pytest.raises(Quarantined, match="two crashes"):
        await replies[1].future
    with pytest.raises(Quarantined):
        stage.batcher.submit(with_content("third", "poison"), AwaitedReply())
    assert stage.running == []


@run
async def test_a_suspect_runs_alone_and_its_neighbours_together() -> None:
    stage = Stage(BatchSettings(max_batch_size=3, max_queue_delay_ms=0), free=1)
    first = [AwaitedReply() for _ in range(3)]
    stage.pool.free = 0
    for name, reply in zip("abc", first, strict=True):
        stage.batcher.submit(with_content(name, f"content {name}"), reply)
    stage.pool.free = 1
    stage.batcher.pump()
    assert stage.running == [["a", "b", "c"]]
    stage.now_s += 1.0
    stage.pool.finish([CRASH] * 3)
    for reply in first:
        with pytest.raises(ExecutorDied):
            await reply.future
    stage.pool.free = 0
    for name, content in (("x", "new x"), ("a2", "content a"), ("y", "new y"), ("z", "new z")):
        stage.batcher.submit(with_content(name, content), AwaitedReply())
    stage.pool.free = 3
    stage.batcher.pump()
    assert stage.running == [["x"], ["a2"], ["y", "z"]]


@run
async def test_a_copy_that_waits_is_answered_when_its_request_is_convicted() -> None:
    stage = Stage(BatchSettings())
    stage.batcher.submit(with_content("one", "poison"), AwaitedReply())
    stage.now_s += 1.0
    stage.pool.finish([CRASH])
    stage.batcher.submit(with_content("two", "poison"), AwaitedReply())
    waiting = AwaitedReply()
    stage.batcher.submit(with_content("copy", "poison"), waiting)
    stage.now_s += 1.0
    stage.pool.finish([CRASH])
    with pytest.raises(Quarantined):
        await waiting.future
    assert (stage.running, stage.batcher.queue_length) == ([], 0)


@run
async def test_the_more_urgent_request_runs_first_and_an_expired_one_never() -> None:
    stage = Stage(BatchSettings(), free=0)
    for name, priority, deadline_s in (("plain", 0, 200.0), ("late", 9, 101.0), ("urgent", 2, 200.0)):
        stage.batcher.submit(InferRequest(name, (), (), deadline_s, priority), AwaitedReply())
    stage.now_s = 102.0
    stage.pool.free = 3
    stage.batcher.pump()
    assert stage.running == [["urgent"], ["plain"]]


@run
async def test_what_comes_after_a_prioritised_queue_is_empty_waits_in_line_again() -> None:
    stage = Stage(BatchSettings(), free=0)
    for name, priority in (("patient", -5), ("plain", 0), ("urgent", 5)):
        stage.batcher.submit(InferRequest(name, (), (), NO_DEADLINE, priority), AwaitedReply())
    stage.pool.free = 3
    stage.batcher.pump()
    assert stage.running == [["urgent"], ["plain"], ["patient"]]
    stage.submit("first")
    stage.submit("second")
    assert [pending.request.request_id for pending in stage.batcher._queue] == ["first", "second"]


@run
async def test_on_the_loop_a_request_that_came_alone_before_does_not_wait_for_company() -> None:
    stage = Stage(BatchSettings(max_batch_size=4, dispatch="eager"))
    stage.pool.on_loop = True
    stage.submit("a")
    stage.batcher.hurry()
    assert stage.running == []  # who knows what else this turn brings
    await asyncio.sleep(0)
    assert stage.pool.finish() == ["a"]
    stage.submit("b")
    stage.batcher.hurry()
    stage.submit("c")
    stage.batcher.hurry()
    stage.submit("d")
    assert stage.running == [["b"]]
    stage.pool.finish()
    assert stage.running == [["c", "d"]]
    stage.pool.finish()
    await asyncio.sleep(0)
    stage.submit("e")
    stage.batcher.hurry()
    assert stage.running == []  # the last batch had company
    await asyncio.sleep(0)
    assert stage.running == [["e"]]


@run
async def test_in_threads_nothing_is_hurried() -> None:
    stage = Stage(BatchSettings(max_batch_size=4, dispatch="eager"))
    for name in ("a", "b"):
        stage.submit(name)
        stage.batcher.hurry()
        assert stage.running == []
        await asyncio.sleep(0)
        assert stage.pool.finish() == [name]


@run
async def test_where_nobody_else_wants_an_executor_a_short_deadline_is_tried() -> None:
    stage = Stage(BatchSettings())
    stage.submit("slow")
    stage.now_s += 10.0
    stage.pool.finish()
    tried = stage.submit("tried", deadline_s=stage.now_s + 1.0)
    assert stage.running == [["tried"]]
    stage.pool.finish()
    assert (await tried.answer).body == b"tried"


@run
async def test_what_would_be_one_batch_goes_as_two_at_once_where_the_pool_wants_that() -> None:
    stage = Stage(BatchSettings(max_batch_size=4, max_queue_delay_ms=10_000), free=2)
    stage.pool.on_loop = True
    for name in "abcd":
        stage.submit(name)
    await asyncio.sleep(0)
    assert stage.running == [["a", "b"], ["c", "d"]]


@run
async def test_with_room_for_one_batch_it_stays_one() -> None:
    stage = Stage(BatchSettings(max_batch_size=4, max_queue_delay_ms=10_000))
    stage.pool.on_loop = True
    for name in "abcd":
        stage.submit(name)
    await asyncio.sleep(0)
    assert stage.running == [["a", "b", "c", "d"]]
