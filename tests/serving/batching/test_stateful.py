"""The stateful batcher with executors that the test moves by hand, and its table with the time passed in."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from datetime import datetime, timezone
from typing import Any

import pytest
from fakes import AwaitedRequest

from torchere.serving.access.client_limits import Account, Quota, Tally
from torchere.serving.batching import stateful
from torchere.serving.batching.request import Request, alone
from torchere.serving.batching.stateful import (
    SEQUENCE_END,
    SEQUENCE_ID,
    SequenceTable,
    StatefulBatcher,
    begin_sequence,
)
from torchere.serving.config.server_settings import BatchSettings, SequenceSettings
from torchere.serving.errors import (
    Cancelled,
    DeadlineExceeded,
    ExecutorDied,
    NoRoom,
    Quarantined,
    QueueFull,
    Unavailable,
)
from torchere.serving.types import NO_DEADLINE, InferResponse, Parameter, StreamedResponse
from torchere.serving.workers.executor import (
    BatchReport,
    ExecutorState,
    ExecutorStatus,
    Outage,
    Outcome,
    Unfinished,
)
from torchere.serving.workers.run import Run


class PuppetPool:
    """Pinned executors; `inside[executor_id]` is the run of one. As a `LanePage` it keeps the cancelled."""

    def __init__(self, *executor_ids: int) -> None:
        self.ids = executor_ids
        self.failed: tuple[int, ...] = ()  # those that gave up
        self.leaving: tuple[int, ...] = ()  # those that are to end
        self.losses: Counter[int] = Counter()
        self.unreachable: tuple[int, ...] = ()  # those whose process ends
        self.down: Outage | None = None
        self.inside: dict[int, Run] = {}
        self.cancelled: list[tuple[int, int]] = []  # the executor and the index in its run

    def idle_ids(self) -> tuple[int, ...]:
        return tuple(name for name in self.ids if name not in (*self.inside, *self.unreachable))

    def leaving_ids(self) -> tuple[int, ...]:
        return tuple(name for name in self.leaving if name not in self.inside)

    def outage(self) -> Outage | None:
        return self.down

    def statuses(self) -> tuple[ExecutorStatus, ...]:
        began = datetime.now(timezone.utc)
        ready = [
            ExecutorStatus(name, ExecutorState.READY, began, 1, losses=self.losses[name]) for name in self.ids
        ]
        return (*ready, *(ExecutorStatus(name, ExecutorState.FAILED, began, 1) for name in self.failed))

    def submit(self, run: Run) -> None:
        assert run.executor_id is not None and run.executor_id not in self.inside
        run.place, run.page = run.executor_id, self  # type: ignore[assignment]
        self.inside[run.executor_id] = run

    def cancel(self, place: int, index: int) -> None:
        self.cancelled.append((place, index))

    def finish(self, executor_id: int, outcomes: list[Outcome] | None = None, began_s: float = 0.0) -> None:
        run = self.inside.pop(executor_id)
        answers = outcomes or [InferResponse(request.request_id.encode()) for request in run.requests]
        run.done(BatchReport(answers, began_s=began_s))


class Stage:
    """One stateful batcher on puppets and a clock."""

    def __init__(
        self,
        *executor_ids: int,
        size: int = 4,
        delay_ms: int = 0,
        sequences: SequenceSettings | None = None,
        **limits: Any,
    ) -> None:
        self.now_s = 100.0
        self.pool = PuppetPool(*executor_ids)
        self.batcher = StatefulBatcher(
            BatchSettings(max_batch_size=size, max_queue_delay_ms=delay_ms, **limits),
            sequences,
            self.pool,  # type: ignore[arg-type]
            observer=self,
            now=lambda: self.now_s,
            refusal="no worker",
        )

    def batches_running(self, batches: int, now_s: float) -> None:
        pass

    def batch_finished(self, run: Run, report: BatchReport, executor_s: float) -> None:
        pass

    def left_unread(self) -> None:
        pass

    def submit(
        self,
        name: str,
        sequence: str = "",
        deadline_s: float = NO_DEADLINE,
        account: Account | None = None,
    ) -> AwaitedRequest:
        request = AwaitedRequest(name, 0.0)
        request.account = account
        request.parameters, request.deadline_s = (Parameter("body", b"x"),), deadline_s
        request.headers = ((SEQUENCE_ID, sequence),) if sequence else ()
        self.batcher.submit(request)
        return request

    def describe(self) -> AwaitedRequest:
        request = AwaitedRequest("describe", 0.0)
        request.group = alone(request.request_id)
        self.batcher.submit(request)
        return request

    def running(self, executor_id: int) -> list[str]:
        return [request.request_id for request in self.pool.inside[executor_id].requests]


SEQUENCES = SequenceSettings(max_idle_s=10.0, max_sequences=4, max_queue_size=4)
SHORT = SequenceSettings(max_idle_s=10.0, max_sequences=1, max_queue_size=1, timeout_s=30.0)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def wrapper() -> None:
        asyncio.run(test())

    wrapper.__name__ = test.__name__
    return wrapper


@run
async def test_requests_of_a_sequence_run_in_order_on_one_executor() -> None:
    stage = Stage(1, 2, sequences=SEQUENCES)
    answers = [stage.submit(name, "s") for name in ("a", "b", "c")]
    for name in ("a", "b", "c"):
        assert stage.running(1) == [name]
        assert 2 not in stage.pool.inside
        stage.pool.finish(1)
    assert [await answer.body() for answer in answers] == [b"a", b"b", b"c"]


@run
async def test_a_batch_holds_one_request_of_each_sequence() -> None:
    stage = Stage(sequences=SEQUENCES)
    for name, sequence in (("a1", "a"), ("a2", "a"), ("b1", "b")):
        stage.submit(name, sequence)
    stage.pool.ids = (1,)
    stage.batcher.pump()
    assert stage.running(1) == ["a1", "b1"]


@run
async def test_a_handler_can_end_a_sequence_and_make_room() -> None:
    stage = Stage(1, sequences=SequenceSettings(max_idle_s=10.0, max_sequences=1, max_queue_size=1))
    stage.submit("a", "s")
    with pytest.raises(QueueFull):
        stage.submit("b", "t")
    waiting = stage.submit("a2", "s")
    stage.pool.finish(1, [InferResponse(b"bye", (("other", "t"), (SEQUENCE_END, "s")))])
    with pytest.raises(Unavailable):
        waiting.future.result()
    stage.submit("b", "t")
    assert stage.running(1) == ["b"]


@run
async def test_the_queue_is_bounded_and_refuses_at_once() -> None:
    stage = Stage(1, size=1, max_queue_size=1)
    stage.submit("running")
    stage.submit("waiting")
    with pytest.raises(QueueFull):
        stage.submit("too many")


@run
async def test_with_tickets_a_request_is_admitted_only_while_an_executor_is_idle() -> None:
    stage = Stage(1, use_tickets=True)
    stage.submit("running")
    with pytest.raises(QueueFull):
        stage.submit("no ticket")


@run
async def test_a_withdrawn_request_runs_neither_from_the_queue_nor_on() -> None:
    for sequences, name in ((SEQUENCES, "s"), (None, "")):
        stage = Stage(1, sequences=sequences)
        begun = stage.submit("begun", name)
        queued, after = stage.submit("queued", name), stage.submit("after", name)
        stage.pool.inside[1].done(BatchReport([Unfinished(InferResponse(b"."))]))  # it is not idle yet
        stage.batcher.withdraw(queued)
        assert stage.batcher.queue_length == 2
        stage.batcher.withdraw(begun)
        del stage.pool.inside[1]
        stage.batcher.pump()
        assert stage.running(1) == ["after"]
        stage.pool.finish(1)
        assert await after.body() == b"after"


@run
async def test_requests_of_a_run_that_is_given_back_are_first_in_line_again() -> None:
    for sequences, name in ((SEQUENCES, "s"), (None, ""), (SEQUENCES, "describe")):
        stage = Stage(1, size=1, sequences=sequences)
        first = stage.describe() if name == "describe" else stage.submit("first", name)
        stage.now_s += 1.0
        stage.submit("second", name)
        begun = stage.running(1)
        stage.pool.inside.pop(1).give_back()
        assert stage.running(1) == begun
        stage.pool.finish(1)
        assert await first.body() == begun[0].encode()
        assert stage.running(1) == ["second"]


@run
async def test_a_describe_call_shares_its_batch_with_none_and_waits_for_none() -> None:
    stage = Stage(1, delay_ms=60_000)
    stage.describe()
    assert stage.running(1) == ["describe"]
    stage = Stage()
    stage.submit("a")
    stage.describe()
    stage.describe()
    stage.submit("b")
    stage.pool.ids = (1,)
    stage.batcher.pump()
    batches = [stage.running(1)]
    stage.pool.finish(1, [Unfinished(InferResponse(b"."))])
    while 1 in stage.pool.inside:
        batches.append(stage.running(1))
        stage.pool.finish(1)
    assert batches == [["a"], ["a"], ["describe"], ["describe"], ["b"]]


@run
async def test_an_unfinished_request_is_in_the_next_batch_again_without_parameters() -> None:
    stage = Stage(1)
    request = stage.submit("a")
    stage.pool.finish(1, [Unfinished(InferResponse(b"one "))])
    response = await request.future
    assert isinstance(response, StreamedResponse)
    (again,) = stage.pool.inside[1].requests
    assert (again.request_id, again.parameters) == ("a", ())
    newcomer = stage.submit("b")
    stage.pool.finish(1, [Unfinished(InferResponse(b"two "))])
    assert stage.running(1) == ["a", "b"]  # the newcomer joins what goes on
    stage.pool.finish(1, [InferResponse(b"end"), InferResponse(b"b")])
    assert [chunk async for chunk in response.chunks] == [b"one ", b"two ", b"end"]
    assert await newcomer.body() == b"b"  # a first message that is the last one is an ordinary answer
    assert await stage.batcher.drain(0.0)


NO_ROOM = NoRoom("Out of resources", "the worker has no memory")


@run
async def test_answers_go_on_where_a_new_request_finds_no_memory() -> None:
    for sequences, names in ((None, ("", "", "")), (SEQUENCES, ("s", "t", "u"))):
        stage = Stage(1, sequences=sequences)
        goes_on = stage.submit("goes on", names[0])
        stage.pool.finish(1, [Unfinished(InferResponse(b"one "))])
        huge, small = stage.submit("huge", names[1]), stage.submit("small", names[2])
        stage.pool.finish(1, [Unfinished(InferResponse(b"two "))])
        assert stage.running(1) == ["goes on", "huge", "small"]
        stage.pool.finish(1, [NO_ROOM] * 3)
        assert stage.running(1) == ["goes on", "huge"]
        stage.pool.finish(1, [NO_ROOM] * 2)
        assert stage.running(1) == ["goes on", "small"]
        stage.pool.finish(1, [InferResponse(b"end"), InferResponse(b"small")])
        assert isinstance(huge.future.exception(), NoRoom)
        assert await small.body() == b"small"
        response = await goes_on.future
        assert isinstance(response, StreamedResponse)
        assert [chunk async for chunk in response.chunks] == [b"one ", b"two ", b"end"]
        assert await stage.batcher.drain(0.0)


@run
async def test_answers_go_on_where_a_request_that_found_no_memory_is_withdrawn() -> None:
    for others in ([], ["small"]):
        stage = Stage(1)
        goes_on = stage.submit("goes on")
        stage.pool.finish(1, [Unfinished(InferResponse(b"one "))])
        huge, *small = [stage.submit(name) for name in ("huge", *others)]
        stage.pool.finish(1, [Unfinished(InferResponse(b"two "))])
        stage.batcher.withdraw(huge)
        stage.pool.finish(1, [NO_ROOM] * len(["goes on", "huge", *others]))
        assert stage.running(1) == ["goes on", *others]
        stage.pool.finish(1, [InferResponse(b"end"), *(InferResponse(b"small") for _ in others)])
        response = await goes_on.future
        assert isinstance(response, StreamedResponse)
        assert [chunk async for chunk in response.chunks] == [b"one ", b"two ", b"end"]
        assert [await request.body() for request in small] == [b"small" for _ in others]
        assert await stage.batcher.drain(0.0)


@run
async def test_an_executor_with_room_again_takes_a_whole_batch() -> None:
    stage = Stage(size=4)
    requests = [stage.submit(name) for name in ("a", "b", "c")]
    stage.pool.ids = (1,)
    stage.batcher.pump()
    stage.batcher.withdraw(requests[1])
    stage.pool.finish(1, [NO_ROOM] * 3)
    assert stage.running(1) == ["a"]
    requests += [stage.submit("d")]
    stage.pool.finish(1)
    assert stage.running(1) == ["c", "d"]
    stage.pool.finish(1)
    assert [await requests[at].body() for at in (0, 2, 3)] == [b"a", b"c", b"d"]


@run
async def test_requests_that_enter_one_by_one_do_not_wait_for_a_batch_to_fill() -> None:
    for sequences, names in ((None, ("", "", "")), (SEQUENCES, ("s", "t", "u"))):
        stage = Stage(1, size=3, delay_ms=60_000, sequences=sequences)
        for name, sequence in zip(("a", "b", "c"), names, strict=True):
            stage.submit(name, sequence)
        stage.pool.finish(1, [NO_ROOM] * 3)
        assert stage.running(1) == ["a"]
        stage.pool.finish(1, [NO_ROOM])
        assert stage.running(1) == ["b"]
        stage.pool.finish(1)
        assert 1 not in stage.pool.inside  # there is room again, and so the last one waits for others


@run
async def test_an_answer_that_goes_on_alone_and_finds_no_memory_ends() -> None:
    stage = Stage(1)
    request = stage.submit("a")
    stage.pool.finish(1, [Unfinished(InferResponse(b"one "))])
    stage.pool.finish(1, [NO_ROOM])
    response = await request.future
    assert isinstance(response, StreamedResponse)
    with pytest.raises(NoRoom):
        [chunk async for chunk in response.chunks]
    assert await stage.batcher.drain(0.0)


@run
async def test_a_request_that_joins_its_sequence_leaves_it_where_it_finds_no_memory() -> None:
    stage = Stage(1, sequences=SEQUENCES)
    stage.submit("stream", "s")
    stage.submit("other", "t")
    stage.pool.finish(1, [Unfinished(InferResponse(b"."))])
    joins = stage.submit("joins", "s")
    stage.pool.finish(1, [Unfinished(InferResponse(b"."))] * 2)
    assert stage.running(1) == ["stream", "other", "joins"]
    stage.pool.finish(1, [NO_ROOM] * 3)
    assert isinstance(joins.future.exception(), NoRoom)
    assert stage.running(1) == ["stream", "other"]
    stage.submit("next", "s")
    stage.pool.finish(1)
    assert stage.running(1) == ["next"]


@run
async def test_the_next_request_of_a_sequence_joins_its_unfinished_one_and_may_end_it() -> None:
    stage = Stage(1, 2, size=1, sequences=SEQUENCES)
    streamed = stage.submit("stream", "s")
    stage.pool.finish(1, [Unfinished(InferResponse(b"."))])
    stop, after = stage.submit("stop", "s"), stage.submit("after", "s")
    other = stage.submit("other", "t")
    assert (stage.running(1), stage.running(2)) == (["stream"], ["other"])
    stage.pool.finish(1, [Unfinished(InferResponse(b"."))])
    assert stage.running(1) == ["stream", "stop"]  # more than the batch's size, and one at a time
    stage.pool.finish(1, [InferResponse(b"end"), InferResponse(b"stopped")])
    assert stage.running(1) == ["after"]
    stage.pool.finish(1)
    stage.pool.finish(2)
    assert isinstance(await streamed.future, StreamedResponse)
    assert [await request.body() for request in (stop, after, other)] == [
        b"stopped",
        b"after",
        b"other",
    ]
    assert await stage.batcher.drain(0.0)


@run
async def test_unfinished_requests_of_a_sequence_fill_no_more_than_two_batches() -> None:
    stage = Stage(1, size=1, sequences=SEQUENCES)
    for name in ("a", "b", "c"):
        stage.submit(name, "s")
    stage.submit("other", "t")
    for beside in (["a", "b"], ["a", "b"]):
        stage.pool.finish(1, [Unfinished(InferResponse(b".")) for _ in stage.running(1)])
        assert stage.running(1) == beside
    stage.pool.finish(1, [Unfinished(InferResponse(b".")), InferResponse(b"end")])
    assert stage.running(1) == ["a", "c"]


@run
async def test_an_unfinished_request_whose_parts_are_not_read_is_in_no_further_batch() -> None:
    stage = Stage(1)
    stage.batcher.unread_limit_bytes = 1
    request = stage.submit("a")
    for _ in range(3):
        stage.pool.finish(1, [Unfinished(InferResponse(b"xx"))])
    response = await request.future
    assert isinstance(response, StreamedResponse)
    await asyncio.sleep(0)
    assert not request.open
    stage.pool.finish(1, [Unfinished(InferResponse(b"xx"))])
    assert stage.batcher.queue_length == 0
    assert await stage.batcher.drain(0.0)


@run
async def test_unfinished_requests_stay_on_their_executor() -> None:
    stage = Stage(1, 2, size=1)
    for name in ("a", "b"):
        stage.submit(name)
    assert (stage.running(1), stage.running(2)) == (["a"], ["b"])
    stage.pool.finish(2, [Unfinished(InferResponse(b"."))])
    stage.pool.finish(1, [Unfinished(InferResponse(b"."))])
    assert (stage.running(1), stage.running(2)) == (["a"], ["b"])


@run
async def test_an_unfinished_request_ends_with_the_process_that_knew_it() -> None:
    stage = Stage(1, 2)
    request = stage.submit("a")
    stage.pool.unreachable = (1,)  # the end of one socket is read before the last report from the other
    stage.pool.finish(1, [Unfinished(InferResponse(b"part "))])
    assert request.parts is not None
    stage.pool.unreachable, stage.pool.losses[1] = (), 1  # its successor has its id
    stage.batcher.pump()
    assert isinstance(request.error, ExecutorDied)
    assert not stage.pool.inside
    stage.submit("b")
    assert stage.running(1) == ["b"]


@run
async def test_an_executor_that_is_to_end_finishes_its_requests_and_takes_no_others() -> None:
    stage = Stage(1)
    request = stage.submit("a")
    stage.submit("b")
    stage.pool.ids, stage.pool.leaving = (2,), (1,)
    stage.pool.finish(1, [Unfinished(InferResponse(b"part "))])
    assert (stage.running(1), stage.running(2)) == (["a"], ["b"])
    stage.pool.finish(1, [Unfinished(InferResponse(b"part "))])
    assert (request.error, stage.running(1)) == (None, ["a"])
    stage.pool.leaving = ()  # it has had its time
    stage.pool.finish(1, [Unfinished(InferResponse(b"part "))])
    assert isinstance(request.error, ExecutorDied)


@run
async def test_a_sequence_can_stop_its_request_on_an_executor_that_is_to_end_and_goes_on_elsewhere() -> None:
    stage = Stage(1, sequences=SEQUENCES)
    request = stage.submit("a", "s")
    stage.submit("stop", "s")
    stage.pool.ids, stage.pool.leaving = (2,), (1,)
    stage.pool.finish(1, [Unfinished(InferResponse(b"part "))])
    assert stage.running(1) == ["a", "stop"]
    stage.submit("next", "s")
    stage.pool.finish(1)
    assert (request.error, request.open) == (None, False)
    assert (stage.running(2), list(stage.pool.inside)) == (["next"], [2])


@run
async def test_a_request_inside_a_run_is_answered_at_its_deadline_and_its_sequence_goes_on() -> None:
    stage = Stage(1, sequences=SEQUENCES)
    late = stage.submit("late", "s", deadline_s=stage.now_s + 0.01)
    after = stage.submit("after", "s")
    stage.now_s += 0.01
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(late.future, 30.0)
    assert (stage.running(1), stage.pool.cancelled) == (["late"], [(1, 0)])
    stage.pool.finish(1, [DeadlineExceeded("too late")])
    assert stage.running(1) == ["after"]
    stage.pool.finish(1)
    assert await after.body() == b"after"
    assert await stage.batcher.drain(0.0)


@run
async def test_an_unfinished_request_ends_at_its_deadline_and_is_in_no_further_batch() -> None:
    stage = Stage(1)
    streamed = stage.submit("a", deadline_s=stage.now_s + 0.01)
    stage.pool.finish(1, [Unfinished(InferResponse(b"one"))])
    response = await streamed.future
    assert isinstance(response, StreamedResponse)
    stage.now_s += 0.01
    parts = []
    with pytest.raises(DeadlineExceeded):
        async for part in response.chunks:
            parts.append(part)
    assert parts == [b"one"]
    stage.pool.finish(1, [Unfinished(InferResponse(b"late"))])
    assert stage.pool.inside == {}
    assert await stage.batcher.drain(0.0)


@run
async def test_a_request_waited_until_its_lane_began() -> None:
    stage = Stage(1, sequences=SEQUENCES)
    request = stage.submit("a", "s")
    stage.now_s += 3.0
    stage.pool.finish(1, began_s=101.0)
    assert (request.enqueued_s, request.dequeued_s) == (100.0, 101.0)


@run
async def test_a_client_that_leaves_ends_its_part_of_a_continuous_batch() -> None:
    stage = Stage(1)
    leaving, staying = stage.submit("a"), stage.submit("b")
    if stage.running(1) == ["a"]:
        stage.pool.finish(1, [Unfinished(InferResponse(b"."))])
    assert stage.running(1) == ["a", "b"]
    stage.batcher.withdraw(leaving)
    stage.pool.finish(1, [Unfinished(InferResponse(b".")), Unfinished(InferResponse(b"."))])
    assert stage.running(1) == ["b"]
    stage.pool.finish(1)
    assert isinstance(await staying.future, StreamedResponse)


@run
async def test_newcomers_wait_for_company_when_nothing_goes_on() -> None:
    stage = Stage(1, delay_ms=50)
    stage.submit("a")
    assert stage.pool.inside == {}
    stage.now_s += 0.03
    stage.submit("b")
    stage.now_s += 0.02
    stage.batcher.pump()
    assert stage.running(1) == ["a", "b"]


@run
async def test_the_wait_for_company_ends_by_itself() -> None:
    stage = Stage(1, delay_ms=1)
    stage.submit("a")
    assert stage.pool.inside == {}
    stage.now_s += 0.05
    while not stage.pool.inside:
        await asyncio.sleep(0)
    assert stage.running(1) == ["a"]


def begun(*headers: tuple[str, str]) -> dict[str, str]:
    """The headers that the handler sees of a request with these."""
    request = Request("id", 0.0)
    request.headers = headers
    begin_sequence(request)
    return dict(request.headers)


def test_a_request_without_a_sequence_begins_one_and_its_handler_sees_that() -> None:
    assert begun() == {"ts_request_sequence_start": "true", "ts_request_sequence_id": "ts-seq-id"}


def test_a_request_that_names_its_sequence_keeps_its_headers() -> None:
    assert begun((SEQUENCE_ID, "mine"), ("other", "x")) == {SEQUENCE_ID: "mine", "other": "x"}


def test_the_header_of_a_sequence_may_be_spelt_in_any_case() -> None:
    spelt = begun(("Ts_Request_Sequence_Id", "mine"))
    assert spelt[SEQUENCE_ID] == "mine"
    assert "ts_request_sequence_start" not in spelt


def test_a_header_that_names_no_sequence_begins_one() -> None:
    assert begun(("other", "x"), ("Ts_Request_Sequence_Id", ""))[SEQUENCE_ID] == "ts-seq-id"


@run
async def test_what_waits_in_a_sequence_that_is_over_is_answered_when_another_request_comes() -> None:
    stage = Stage(sequences=SHORT)
    waiting = stage.submit("a", "s")
    stage.now_s += 30.0
    stage.submit("b", "t")
    with pytest.raises(Unavailable):
        await waiting.future


@run
async def test_a_request_that_is_given_back_to_a_sequence_that_is_over_is_answered() -> None:
    stage = Stage(1, sequences=SHORT)
    begun = stage.submit("a", "s")
    stage.now_s += 30.0
    stage.batcher.pump()
    stage.pool.inside.pop(1).give_back()
    with pytest.raises(Unavailable):
        await begun.future
    assert await stage.batcher.drain(0.0)


@run
async def test_draining_ends_with_the_sequence_that_held_it_up() -> None:
    stage = Stage(sequences=SHORT)
    waiting = stage.submit("a", "s")
    drained = asyncio.ensure_future(stage.batcher.drain(5.0))
    await asyncio.sleep(0)
    stage.now_s += 30.0
    stage.batcher.pump()
    assert await asyncio.wait_for(drained, 1.0)
    with pytest.raises(Unavailable):
        await waiting.future


@run
async def test_a_sequence_goes_on_after_the_executor_with_its_unfinished_request_was_stopped() -> None:
    stage = Stage(1, sequences=SEQUENCES)
    begun = stage.submit("a", "s")
    stage.pool.ids = (2,)  # scaled down and up again: what is inside is finished by the executor that goes
    stage.pool.finish(1, [Unfinished(InferResponse(b"."))])
    response = await begun.future
    assert isinstance(response, StreamedResponse)
    with pytest.raises(ExecutorDied):
        _ = [chunk async for chunk in response.chunks]
    stage.submit("b", "s")
    assert stage.running(2) == ["b"]


@run
async def test_sequences_of_an_executor_that_gave_up_go_on_elsewhere() -> None:
    stage = Stage(1, 2, sequences=SEQUENCES)
    stage.submit("a", "s")
    stage.pool.finish(1)
    stage.pool.ids, stage.pool.failed = (2,), (1,)
    stage.submit("b", "s")
    assert stage.running(2) == ["b"]


@run
async def test_what_waits_is_answered_when_every_executor_gave_up() -> None:
    stage = Stage(1, sequences=SEQUENCES)
    stage.submit("a", "s")
    waiting = stage.submit("b", "s")
    inside = stage.pool.inside.pop(1)
    stage.pool.ids, stage.pool.failed = (), (1,)
    inside.done(BatchReport([ExecutorDied()]))
    with pytest.raises(Unavailable):
        waiting.future.result()
    assert await stage.batcher.drain(0.0)


@run
async def test_what_waits_behind_a_request_that_would_be_late_runs_at_once() -> None:
    for sequences, name in ((SEQUENCES, "s"), (None, "")):
        stage = Stage(1, size=1, sequences=sequences)
        stage.submit("a", name)
        hopeless = stage.submit("b", name, deadline_s=stage.now_s + 15.0)
        stage.submit("c", name)
        stage.now_s += 10.0  # as long as a batch takes, for all one knows
        stage.pool.finish(1)
        assert stage.running(1) == ["c"]
        with pytest.raises(DeadlineExceeded):
            hopeless.future.result()


@run
async def test_a_request_that_is_given_back_after_its_client_left_runs_no_more() -> None:
    for sequences, name in ((SEQUENCES, "s"), (None, "")):
        stage = Stage(1, sequences=sequences)
        gone = stage.submit("a", name)
        stage.batcher.withdraw(gone)
        assert stage.pool.cancelled == [(1, 0)]
        stage.pool.inside.pop(1).give_back()
        assert stage.pool.inside == {}
        stage.submit("b", name)
        assert stage.running(1) == ["b"]
        with pytest.raises(Cancelled):
            gone.future.result()


@run
async def test_a_describe_call_gets_its_turn_among_sequences_that_never_pause() -> None:
    stage = Stage(1, sequences=SEQUENCES)
    for name, sequence in (("a1", "a"), ("a2", "a"), ("b1", "b")):
        stage.submit(name, sequence)
    assert stage.running(1) == ["a1"]
    stage.now_s += 1.0
    stage.describe()
    stage.now_s += 1.0
    stage.submit("b2", "b")
    batches = []
    while 1 in stage.pool.inside:
        batches.append(stage.running(1))
        stage.pool.finish(1)
    assert batches == [["a1"], ["a2", "b1"], ["describe"], ["b2"]]


@run
async def test_an_executor_has_its_next_batch_before_the_last_one_is_counted() -> None:
    stage = Stage(1, sequences=SEQUENCES)
    for name in ("a", "b"):
        stage.submit(name, "s")
    seen = []
    stage.batch_finished = lambda *counted: seen.append(stage.running(1))  # type: ignore[method-assign]
    stage.pool.finish(1)
    assert seen == [["b"]]


@run
async def test_a_request_that_crashed_its_worker_twice_by_itself_is_refused_from_then_on() -> None:
    crash = ExecutorDied("killed by signal 11 (SIGSEGV)", crashed=True)
    for sequences, name in ((SEQUENCES, "s"), (None, "")):
        stage = Stage(1, sequences=sequences)
        tries = []
        for number in range(2):
            tries.append(stage.submit(f"try-{number}", name))
            stage.now_s += 1.0
            stage.pool.finish(1, [crash])
        with pytest.raises(ExecutorDied):
            await tries[0].future
        with pytest.raises(Quarantined):
            await tries[1].future
        with pytest.raises(Quarantined):
            stage.submit("third", name)


def client(name: str) -> Account:
    """An account without limits."""
    return Account(name, Quota(), Tally(), Counter())


@run
async def test_places_that_become_free_in_a_continuous_batch_go_to_clients_in_turn() -> None:
    stage = Stage(1, size=2)
    many, one = client("many"), client("one")
    for number in range(8):
        stage.submit(f"m{number}", account=many)
    stage.pool.finish(1)
    stage.submit("o0", account=one)
    part = Unfinished(InferResponse(b"part"))
    assert stage.running(1) == ["m1", "m2"]
    stage.pool.finish(1, [part, InferResponse(b"done")])
    assert stage.running(1) == ["m1", "m3"]
    stage.pool.finish(1, [part, InferResponse(b"done")])
    assert stage.running(1) == ["m1", "o0"]


@run
async def test_a_sequence_takes_no_place_of_another_client_in_a_full_queue() -> None:
    stage = Stage(sequences=SEQUENCES, max_queue_size=2)
    many, one = client("many"), client("one")
    for name in ("a", "b"):
        stage.submit(name, name, account=many)
    with pytest.raises(QueueFull):
        stage.submit("c", "c", account=one)


@run
async def test_a_client_below_its_share_takes_a_place_in_a_full_queue() -> None:
    stage = Stage(size=2, max_queue_size=3)
    many, one = client("many"), client("one")
    asked = [stage.submit(f"m{number}", account=many) for number in range(3)]
    stage.submit("o", account=one)
    with pytest.raises(QueueFull):
        await asked[2].future
    stage.pool.ids = (1,)
    stage.batcher.pump()
    assert stage.running(1) == ["m0", "o"]


def table(**settings: float) -> SequenceTable:
    defaults = {"max_idle_s": 10.0, "max_sequences": 2, "max_queue_size": 2}
    return SequenceTable(SequenceSettings(**{**defaults, **settings}), "no worker")  # type: ignore[arg-type]


def request_at(name: str, at_s: float = 0.0) -> Request:
    request = Request(name, 0.0)
    request.enqueued_s = at_s
    return request


def test_a_sequence_stays_on_the_executor_that_took_it_first() -> None:
    sequences = table()
    sequences.add("s", request_at("a"), 0.0)
    sequences.add("s", request_at("b"), 0.0)
    (sequence,) = sequences.heads(9000, 4)
    taken = sequences.take(sequence, 9000)
    assert taken.request_id == "a"
    assert sequences.heads(9000, 4) == []  # one at a time
    sequences.done("s", taken, 1.0)
    assert sequences.heads(9001, 4) == []
    assert [s.name for s in sequences.heads(9000, 4)] == ["s"]


def test_the_oldest_heads_come_first() -> None:
    sequences = table(max_sequences=3)
    for name, at_s in (("late", 3.0), ("early", 1.0), ("middle", 2.0)):
        sequences.add(name, request_at(name, at_s), at_s)
    assert [s.name for s in sequences.heads(9000, 2)] == ["early", "middle"]


def test_the_number_of_sequences_and_of_their_requests_is_bounded() -> None:
    sequences = table()
    for name in ("s", "s", "t"):
        sequences.add(name, request_at(name), 0.0)
    for name in ("s", "u"):
        with pytest.raises(QueueFull):
            sequences.add(name, request_at(name), 0.0)


def test_an_idle_sequence_ends_and_makes_room() -> None:
    sequences = table(max_sequences=1)
    sequences.add("s", request_at("a"), 0.0)
    (sequence,) = sequences.heads(1, 1)
    sequences.done("s", sequences.take(sequence, 1), 5.0)
    assert sequences.next_expiry_s() == 15.0
    assert sequences.expire(15.0) == []
    sequences.add("t", request_at("b"), 15.0)
    assert [s.name for s in sequences.heads(1, 9)] == ["t"]


def test_a_sequence_does_not_idle_while_a_request_runs_nor_from_before_the_last_one_came() -> None:
    sequences = table()
    first, second = request_at("a"), request_at("b")
    sequences.add("s", first, 0.0)
    (head,) = sequences.heads(1, 1)
    sequences.take(head, 1)
    assert sequences.expire(99.0) == [] and len(sequences) == 1
    sequences.done("s", first, 99.0)
    sequences.add("s", second, 105.0)
    sequences.remove(second)  # its client left
    assert sequences.next_expiry_s() == 115.0
    sequences.add("t", request_at("c"), 105.0)  # waits, so that it does not idle
    assert sequences.next_expiry_s() == 115.0


def test_a_request_that_was_not_begun_goes_in_front_again() -> None:
    sequences = table()
    first, second = request_at("a"), request_at("b")
    for each in (first, second):
        sequences.add("s", each, 0.0)
    (sequence,) = sequences.heads(1, 1)
    sequences.take(sequence, 1)
    assert sequences.give_back("s", first)
    assert sequences.waiting == [first, second]
    assert sequences.end(["s", "nobody's"]) == [first, second]
    assert not sequences.give_back("s", first)


def test_a_sequence_that_waits_does_not_idle_but_its_life_is_bounded() -> None:
    sequences = table(timeout_s=30.0)
    sequences.add("s", request_at("a"), 0.0)
    assert sequences.expire(29.0) == []
    assert [request.request_id for request in sequences.expire(30.0)] == ["a"]
    assert len(sequences) == 0


def test_sequences_of_a_lost_executor_go_on_elsewhere() -> None:
    sequences = table()
    sequences.add("s", request_at("a"), 0.0)
    (sequence,) = sequences.heads(1, 1)
    sequences.done("s", sequences.take(sequence, 1), 0.0)
    sequences.add("s", request_at("b"), 0.0)
    sequences.keep_on([1, 2])
    assert sequences.heads(2, 1) == []
    sequences.keep_on([2])
    assert [s.name for s in sequences.heads(2, 1)] == ["s"]


def test_a_request_costs_the_same_however_many_sequences_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()

    class Watched(stateful.Sequence):
        __slots__ = ()

        def __getattribute__(self, field: str) -> Any:
            seen.add(object.__getattribute__(self, "name"))
            return object.__getattribute__(self, field)

    monkeypatch.setattr(stateful, "Sequence", Watched)

    async def main() -> None:
        settings = SequenceSettings(max_idle_s=10.0, max_sequences=100, max_queue_size=4, timeout_s=60.0)
        stage = Stage(1, 2, sequences=settings)
        names = [f"s{number}" for number in range(100)]
        for name in names:
            stage.submit("first", name)
            stage.pool.finish(1)
        seen.clear()
        stage.submit("second", "s50")
        stage.pool.finish(1)
        assert seen == {"s50", "s0"}  # and the one that ends first
        waiting = [stage.submit(name, "s50") for name in ("third", "fourth")]
        stage.batcher.withdraw(waiting[1])
        assert seen == {"s50", "s0"}
        stage.now_s = 115.0
        assert stage.batcher._table is not None
        assert stage.batcher._table.expire(115.0) == []
        assert len(stage.batcher._table) == 1  # that runs
        assert seen == set(names)

    asyncio.run(main())


@pytest.mark.parametrize("timeout_s", [0.0, 25.0])
def test_the_next_sequence_to_expire_is_the_first_of_all(timeout_s: float) -> None:
    settings = SequenceSettings(max_idle_s=10.0, max_sequences=9, max_queue_size=9, timeout_s=timeout_s)
    sequences, chance, ended = SequenceTable(settings, "no worker"), random.Random(1), 0
    running: list[tuple[str, Request]] = []
    for now_s in range(1000):
        name = f"s{chance.randrange(9)}"
        sequences.add(name, request_at("any", now_s), now_s)
        if chance.random() < 0.3:
            sequences.remove(chance.choice(sequences.waiting))  # its client left
        running += [(head.name, sequences.take(head, 1)) for head in sequences.heads(1, chance.randrange(4))]
        while running and chance.random() < 0.7:
            sequences.done(*running.pop(chance.randrange(len(running))), now_s)
        expiries_s = [sequence.expires_s(settings) for sequence in sequences._sequences.values()]
        assert sequences.next_expiry_s() == min(expiries_s)
        left = sum(expiry_s > now_s for expiry_s in expiries_s)
        ended += len(expiries_s) - left
        sequences.expire(now_s)
        assert len(sequences) == left
    assert ended > 100


def test_an_expired_sequence_goes_on_where_its_state_may_be_and_an_ended_one_anywhere() -> None:
    sequences = table()
    for name, executor_id in (("idle", 9000), ("ended", 9001)):
        sequences.add(name, request_at(name), 0.0)
        (sequence,) = sequences.heads(executor_id, 4)
        sequences.done(name, sequences.take(sequence, executor_id), 0.0)
    sequences.end(["ended"])
    sequences.expire(10.0)
    assert len(sequences) == 0
    for name in ("idle", "ended"):
        sequences.add(name, request_at(name), 11.0)
    assert [sequence.name for sequence in sequences.heads(9001, 4)] == ["ended"]
    sequences.keep_on([9001])  # its executor is gone, and the state with it
    assert [sequence.name for sequence in sequences.heads(9001, 4)] == ["idle", "ended"]
