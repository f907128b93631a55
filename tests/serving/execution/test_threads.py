"""Executor threads in this process."""

import asyncio
import gc
import itertools
import json
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from torchere.serving.errors import DeadlineExceeded, ExecutorDied, HandlerFailed, LoadFailed
from torchere.serving.execution import letting_go
from torchere.serving.execution.executor import ExecutorState, LoadSpec
from torchere.serving.execution.inline import FIRST_TRIAL
from torchere.serving.execution.threads import MAX_LEFT_BEHIND, ThreadPool
from torchere.serving.types import InferRequest, Parameter


@asynccontextmanager
async def pool_of(
    spec: LoadSpec, count: int = 1, response_timeout_s: float = 30.0
) -> AsyncIterator[ThreadPool]:
    """A pool in service; `pool.freed` is set whenever an executor may have come free."""
    freed = asyncio.Event()
    pool = ThreadPool(
        spec,
        response_timeout_s=response_timeout_s,
        startup_timeout_s=30.0,
        next_id=itertools.count(9000).__next__,
        on_free=freed.set,
        on_loaded=lambda executor_id, load_s: None,
        sends_ahead=False,  # as `test_threads_ahead.py` has it
    )
    pool.freed = freed  # type: ignore[attr-defined]
    try:
        await pool.resize(count)
        await pool.warm_up()
        yield pool
    finally:
        await pool.close()


def executor_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("executor-")}


def test_threads_answer_side_by_side(make_spec: Any, make_sink: Any, make_request: Any) -> None:
    gate = """
        import threading
        barrier = threading.Barrier(2, timeout=20)
        class Handler:
            def initialize(self, context): pass
            def handle(self, data, context):
                barrier.wait()
                return [threading.current_thread().name] * len(data)
    """

    async def main() -> None:
        async with pool_of(make_spec(gate), count=2) as pool:
            sinks = [make_sink(), make_sink()]
            for sink in sinks:
                pool.submit([make_request("x")], sink)
            assert pool.free == 0
            names = {(await sink.outcome()).body for sink in sinks}
            assert names == {b"executor-9000", b"executor-9001"}
            assert pool.free == 2

    asyncio.run(main())


def test_a_raising_handler_fails_its_request_and_lives_on(
    make_spec: Any, make_sink: Any, make_request: Any
) -> None:
    async def main() -> None:
        async with pool_of(make_spec()) as pool:
            bad, good = make_sink(), make_sink()
            pool.submit([make_request("raise")], bad)
            assert isinstance(await bad.outcome(), HandlerFailed)
            pool.submit([make_request("hi")], good)
            assert (await good.outcome()).body == b"hi!"

    asyncio.run(main())


def test_a_thread_in_a_call_is_not_idle(
    make_spec: Any, make_sink: Any, make_request: Any, tmp_path: Path
) -> None:
    async def main() -> None:
        async with pool_of(make_spec(IN_CALLS), count=2) as pool:
            sink = make_sink()
            pool.submit([make_request("a")], sink)
            await asyncio.wait_for(until((tmp_path / "in a").exists), 30)
            (batch,) = pool._inside
            assert set(pool.idle_ids()) == {9000, 9001} - {batch.taker.status.executor_id}
            (tmp_path / "out of a").touch()
            await sink.outcome()
            assert pool.idle_ids() == (9000, 9001)

    asyncio.run(main())


def test_a_thread_that_the_system_does_not_give_is_a_failed_executor(
    make_spec: Any, make_sink: Any, make_request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        async with pool_of(make_spec(IN_CALLS), response_timeout_s=0.05) as pool:
            hung = make_sink()
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", refused)
                pool.freed.clear()  # type: ignore[attr-defined]
                pool.submit([make_request("a")], hung)
                assert isinstance(await hung.outcome(), DeadlineExceeded)
                await asyncio.wait_for(pool.freed.wait(), 30)  # type: ignore[attr-defined]
                (status,) = pool.statuses()
                assert (status.state, status.last_failure) == (ExecutorState.FAILED, "can't start new thread")
                with pytest.raises(LoadFailed):
                    await pool.resize(1)
            await pool.resize(1)
            (tmp_path / "out of a").touch()

    asyncio.run(main())


def test_a_slow_call_is_answered_in_time_and_its_late_answer_dropped(
    make_spec: Any, make_sink: Any, make_request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # threads share the server's folder: the handler looks for its file there

    async def main() -> None:
        async with pool_of(make_spec(), response_timeout_s=0.05) as pool:
            slow = make_sink()
            pool.submit([make_request("wait")], slow)
            assert isinstance(await slow.outcome(), DeadlineExceeded)
            assert pool.free == 0
            (tmp_path / "go").touch()
            while not pool.free:
                pool.freed.clear()  # type: ignore[attr-defined]
                await asyncio.wait_for(pool.freed.wait(), 30)  # type: ignore[attr-defined]
            assert pool.free == 1
        await asyncio.to_thread(_join_executors)

    asyncio.run(main())


def test_resizing_starts_and_ends_threads(make_spec: Any, make_sink: Any, make_request: Any) -> None:
    async def main() -> None:
        async with pool_of(make_spec(), count=3) as pool:
            assert len(executor_threads()) == 3
            await pool.resize(1)
            sink = make_sink()
            assert pool.size == 1
            pool.submit([make_request("hi")], sink)
            assert (await sink.outcome()).body == b"hi!"
        await asyncio.to_thread(_join_executors)
        assert executor_threads() == set()

    asyncio.run(main())


def _join_executors() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("executor-"):
            thread.join(20)


def test_closing_answers_what_is_inside(
    make_spec: Any, make_sink: Any, make_request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    async def main() -> None:
        async with pool_of(make_spec()) as pool:
            inside = make_sink()
            pool.submit([make_request("wait")], inside)
        assert isinstance(await inside.outcome(), ExecutorDied)
        (tmp_path / "go").touch()
        await asyncio.to_thread(_join_executors)

    asyncio.run(main())


def test_a_handler_that_does_not_load_is_refused_and_leaves_no_thread(make_spec: Any) -> None:
    async def main() -> None:
        with pytest.raises(LoadFailed) as caught:
            async with pool_of(make_spec("raise RuntimeError('no weights')"), count=2):
                pass
        assert "no weights" in caught.value.detail
        await asyncio.to_thread(_join_executors)
        assert executor_threads() == set()

    asyncio.run(main())


def test_a_thread_that_hangs_is_replaced_under_its_id_and_ends_when_it_comes_back(
    make_spec: Any, make_sink: Any, make_request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    async def main() -> None:
        async with pool_of(make_spec(), count=2, response_timeout_s=0.05) as pool:
            hung = make_sink()
            pool.submit([make_request("wait")], hung)
            assert isinstance(await hung.outcome(), DeadlineExceeded)
            while pool.in_service < 2:
                pool.freed.clear()  # type: ignore[attr-defined]
                await asyncio.wait_for(pool.freed.wait(), 30)  # type: ignore[attr-defined]
            assert [status.executor_id for status in pool.statuses()] == [9000, 9001]
            (replaced,) = [status for status in pool.statuses() if status.losses]
            assert "response_timeout" in replaced.last_failure
            assert (pool.free, len(executor_threads_alive())) == (2, 3)
            (tmp_path / "go").touch()
            while len(executor_threads_alive()) > 2:
                await asyncio.sleep(0)
            for _ in range(4):
                sink = make_sink()
                pool.submit([make_request("hi")], sink)
                assert (await sink.outcome()).body == b"hi!"
        await asyncio.to_thread(_join_executors)
        assert executor_threads() == set()

    asyncio.run(main())


def executor_threads_alive() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("executor-")]


def test_threads_that_keep_hanging_are_not_replaced_for_ever(
    make_spec: Any, make_sink: Any, make_request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    async def main() -> None:
        async with pool_of(make_spec(), response_timeout_s=0.05) as pool:
            for _ in range(MAX_LEFT_BEHIND + 1):
                hung = make_sink()
                pool.submit([make_request("wait")], hung)
                assert isinstance(await hung.outcome(), DeadlineExceeded)
                while not pool.in_service and pool.statuses()[0].state is not ExecutorState.READY:
                    await asyncio.sleep(0)
            assert (pool.in_service, pool.free) == (0, 0)
            assert len(executor_threads_alive()) == MAX_LEFT_BEHIND + 1
            (tmp_path / "go").touch()
            while not pool.free:
                await asyncio.sleep(0)
            assert pool.in_service == 1
        await asyncio.to_thread(_join_executors)

    asyncio.run(main())


@pytest.mark.parametrize(("handler", "on_loop"), [("base_handler", True), ("voice_activity", False)])
def test_quick_built_in_handlers_run_on_the_loop_save_those_whose_time_depends_on_the_request(
    make_spec: Any, make_sink: Any, make_request: Any, handler: str, on_loop: bool
) -> None:
    async def main() -> None:
        spec = replace(make_spec(), handler=handler)
        folder = Path(spec.archive_dir)
        (folder / "handler.py").rename(folder / f"{handler}.py")
        async with pool_of(spec) as pool:
            assert not pool.on_loop
            for _ in range(FIRST_TRIAL):
                sink = make_sink()
                pool.submit([make_request("x")], sink)
                assert (await sink.outcome()).body == b"x!"
            assert pool.on_loop is on_loop

    asyncio.run(main())


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x * 0 + self.count


def test_a_model_that_counts_goes_on_counting_in_its_one_executor(make_spec: Any, make_sink: Any) -> None:
    spec = make_spec("")
    torch.jit.script(Counter().eval()).save(str(Path(spec.archive_dir, "counter.pt")))
    manifest = {"model": {"serializedFile": "counter.pt"}}
    spec = replace(spec, handler="base_handler", manifest=manifest, envelope="json")
    body = Parameter("body", b'{"instances": [[1.0]]}', "application/json")

    async def main() -> None:
        async with pool_of(spec) as pool:
            answers = []
            for _ in range(8 * FIRST_TRIAL):
                sink = make_sink()
                pool.submit([InferRequest("x", (body,))], sink)
                answers.append(json.loads((await sink.outcome()).body)["predictions"])
            assert answers == [[[float(count)]] for count in range(1, 8 * FIRST_TRIAL + 1)]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("circle", "after_s"),
    [
        pytest.param("pass", 3600, id="at once"),
        pytest.param("self.me = self", 0.1, id="that hold themselves, a little later"),
    ],
)
def test_a_closed_pool_lets_go_of_its_handlers(
    make_spec: Any, make_sink: Any, make_request: Any, circle: str, after_s: float
) -> None:
    source = f"""
        import pathlib, weakref
        class Handler:
            def initialize(self, context):
                {circle}
                folder = pathlib.Path(context.system_properties["model_dir"])
                weakref.finalize(self, (folder / "freed").touch)
            def handle(self, data, context):
                return ["ok"] * len(data)
    """
    spec = make_spec(source)
    freed = Path(spec.archive_dir) / "freed"

    async def main() -> None:
        async with pool_of(spec) as pool:
            sink = make_sink()
            pool.submit([make_request("x")], sink)
            assert (await sink.outcome()).body == b"ok"
            assert not freed.exists()
        await asyncio.wait_for(until(freed.exists), 30)

    gc.disable()  # it would not look at what is frozen anyway, but may come before that
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(letting_go, "LET_GO_S", after_s)
            asyncio.run(main())
    finally:
        gc.enable()


def test_a_closed_pool_lets_go_of_a_handler_that_was_in_a_call_for_longer(
    make_spec: Any, make_sink: Any, make_request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
        import pathlib, time, weakref
        class Handler:
            def initialize(self, context):
                self.me = self
                self.folder = pathlib.Path(context.system_properties["model_dir"])
                weakref.finalize(self, (self.folder / "freed").touch)
            def handle(self, data, context):
                (self.folder / "entered").touch()
                while not (self.folder / "go").exists():
                    time.sleep(0.01)
                return ["ok"] * len(data)
    """
    spec = make_spec(source)
    folder = Path(spec.archive_dir)

    async def main() -> None:
        async with pool_of(spec) as pool:
            pool.submit([make_request("x")], make_sink())
            await asyncio.wait_for(until((folder / "entered").exists), 30)
        await asyncio.sleep(0.1)  # ten times as long as the pool waits for a thread that has ended
        assert not (folder / "freed").exists()
        (folder / "go").touch()
        await asyncio.wait_for(until((folder / "freed").exists), 30)

    monkeypatch.setattr(letting_go, "LET_GO_S", 0.01)
    asyncio.run(main())


def test_what_a_handler_left_in_circles_is_not_kept_when_an_executor_is_added(
    make_spec: Any, make_sink: Any, make_request: Any
) -> None:
    source = """
        import pathlib, weakref
        class Handler:
            def initialize(self, context):
                self.freed = pathlib.Path(context.system_properties["model_dir"]) / "freed"
            def handle(self, data, context):
                def circle():
                    pass
                circle.me = circle
                weakref.finalize(circle, self.freed.touch)
                return ["ok"]
    """
    spec = make_spec(source)

    async def main() -> None:
        async with pool_of(spec) as pool:
            sink = make_sink()
            pool.submit([make_request("x")], sink)
            assert (await sink.outcome()).body == b"ok"
            await pool.resize(2)
            await pool.warm_up()
            assert Path(spec.archive_dir, "freed").exists()

    thresholds = gc.get_threshold()
    gc.set_threshold(0)  # it would come by itself sooner or later, but not to what is frozen
    try:
        asyncio.run(main())
    finally:
        gc.set_threshold(*thresholds)


class Circle:
    """Stands for a handler and its host."""

    def __init__(self) -> None:
        self.me = self

    def traces(self) -> list[Any]:
        return [weakref.ref(self)]


def test_a_thread_that_takes_its_time_to_end_keeps_a_handler_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        letting_go_of = letting_go.LettingGo()
        host, looked, emptied = Circle(), asyncio.Event(), threading.Event()
        collect = gc.collect
        monkeypatch.setattr(gc, "collect", lambda: (looked.set(), collect()))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "empty_cache", emptied.set)
        letting_go_of.watch(host)  # type: ignore[arg-type]
        letting_go_of.closed()
        letting_go_of.none_in_a_call()
        await asyncio.wait_for(looked.wait(), 30)
        gone = weakref.ref(host)
        assert not emptied.is_set()
        del host
        await asyncio.wait_for(until(lambda: gone() is None), 30)
        await asyncio.wait_for(until(emptied.is_set), 30)  # the memory of its GPU, for other processes

    monkeypatch.setattr(letting_go, "LET_GO_S", 0.01)
    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.01)


WARMING = """
    import os
    class Handler:
        def initialize(self, context):
            self.folder = context.system_properties["model_dir"]
        def warmup_data(self):
            return [{}]
        def handle(self, data, context):
            if os.path.exists(os.path.join(self.folder, "cold")):
                raise ValueError("cold")
            return ["warm"] * len(data)
"""


def test_the_first_thread_that_is_warm_is_told_of(check_first_warm: Any) -> None:
    asyncio.run(check_first_warm(pool_of))


def test_a_warm_up_that_fails_leaves_no_thread_behind(make_spec: Any, tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "cold").touch()
        with pytest.raises(LoadFailed):
            async with pool_of(make_spec(WARMING), count=2):
                pass
        await asyncio.to_thread(_join_executors)
        assert executor_threads() == set()

    asyncio.run(main())


def test_scaling_up_to_a_warm_up_that_fails_and_down_again_costs_no_executor(
    make_spec: Any, make_sink: Any, make_request: Any, tmp_path: Path
) -> None:
    async def main() -> None:
        async with pool_of(make_spec(WARMING)) as pool:
            (tmp_path / "cold").touch()
            await pool.resize(2)
            with pytest.raises(LoadFailed):
                await pool.warm_up()
            assert pool.size == 1
            await pool.resize(1)
            (tmp_path / "cold").unlink()
            sink = make_sink()
            pool.submit([make_request("x")], sink)
            assert (await sink.outcome()).body == b"warm"

    asyncio.run(main())


IN_CALLS = """
    import pathlib, time
    class Handler:
        def initialize(self, context):
            self.folder = pathlib.Path(context.system_properties["model_dir"])
            while (self.folder / "slow load").exists():
                time.sleep(0.005)
        def handle(self, data, context):
            word = bytes(data[0]["body"]).decode()
            if word != "hi":
                (self.folder / f"in {word}").touch()
                while not (self.folder / f"out of {word}").exists():
                    time.sleep(0.005)
            return [word + "!"] * len(data)
"""


def test_a_pool_that_is_loaded_again_does_not_wait_for_a_call_of_before(
    make_spec: Any, make_sink: Any, make_request: Any, tmp_path: Path
) -> None:
    async def main() -> None:
        async with pool_of(make_spec(IN_CALLS)) as pool:
            before, after = make_sink(), make_sink()
            pool.submit([make_request("long")], before)
            await asyncio.wait_for(until((tmp_path / "in long").exists), 30)
            await pool.close()
            assert isinstance(await before.outcome(), ExecutorDied)
            await pool.resize(1)
            await pool.warm_up()
            await asyncio.sleep(0)
            assert (pool.in_service, pool.free) == (1, 1)
            pool.submit([make_request("hi")], after)
            assert (await after.outcome()).body == b"hi!"
            (tmp_path / "out of long").touch()
            await asyncio.wait_for(until(lambda: len(executor_threads_alive()) == 1), 30)
            assert (pool.in_service, pool.free) == (1, 1)
        await asyncio.to_thread(_join_executors)
        assert executor_threads() == set()

    asyncio.run(main())


def test_a_thread_that_hangs_while_it_is_to_end_takes_no_other_with_it(
    make_spec: Any, make_sink: Any, make_request: Any, tmp_path: Path
) -> None:
    async def main() -> None:
        async with pool_of(make_spec(IN_CALLS), count=2, response_timeout_s=1.0) as pool:
            sinks = {word: make_sink() for word in ("a", "b")}
            for word, sink in sinks.items():
                pool.submit([make_request(word)], sink)
                await asyncio.wait_for(until((tmp_path / f"in {word}").exists), 30)
            threads_of = {batch.requests[0].request_id: batch.taker for batch in pool._inside}
            await pool.resize(1)
            (ending,) = pool._crew._retiring
            hangs = next(word for word, thread in threads_of.items() if thread is ending)
            ends = "ab".replace(hangs, "")
            (tmp_path / f"out of {ends}").touch()
            assert (await sinks[ends].outcome()).body == f"{ends}!".encode()
            assert isinstance(await sinks[hangs].outcome(), DeadlineExceeded)
            await asyncio.wait_for(until(lambda: pool.free == 1), 30)
            after = make_sink()
            pool.submit([make_request("hi")], after)
            assert (await after.outcome()).body == b"hi!"
            (tmp_path / f"out of {hangs}").touch()
        await asyncio.to_thread(_join_executors)
        assert executor_threads() == set()

    asyncio.run(main())


def test_a_thread_that_is_given_up_as_it_ends_leaves_the_order_to_the_one_it_was_meant_for(
    make_spec: Any, make_sink: Any, make_request: Any, tmp_path: Path
) -> None:
    async def main() -> None:
        async with pool_of(make_spec(IN_CALLS), count=2) as pool:
            for word in ("a", "b"):
                pool.submit([make_request(word)], make_sink())
                await asyncio.wait_for(until((tmp_path / f"in {word}").exists), 30)
            (first,) = [batch.taker for batch in pool._inside if batch.requests[0].request_id == "a"]
            await pool.resize(1)
            (tmp_path / "out of a").touch()
            first._thread.join(30)  # it is through, and has taken the order, before the loop hears of either
            pool._crew.leave_behind(first, "its time was over")
            (tmp_path / "out of b").touch()
            await asyncio.wait_for(until(lambda: pool._crew.all_ended), 30)
        await asyncio.to_thread(_join_executors)
        assert executor_threads() == set()

    asyncio.run(main())


def test_scaling_down_keeps_the_thread_that_serves_rather_than_one_that_is_on_its_way(
    make_spec: Any, make_sink: Any, make_request: Any, tmp_path: Path
) -> None:
    async def main() -> None:
        async with pool_of(make_spec(IN_CALLS), count=2, response_timeout_s=0.05) as pool:
            (tmp_path / "slow load").touch()
            hung, after = make_sink(), make_sink()
            pool.submit([make_request("a")], hung)
            assert isinstance(await hung.outcome(), DeadlineExceeded)
            await pool.resize(1)
            assert [status.state for status in pool.statuses()] == [ExecutorState.READY]
            (tmp_path / "slow load").unlink()
            (tmp_path / "out of a").touch()
            await asyncio.wait_for(until(lambda: len(executor_threads_alive()) == 1), 30)
            pool.submit([make_request("hi")], after)
            assert (await after.outcome()).body == b"hi!"
        await asyncio.to_thread(_join_executors)
        assert executor_threads() == set()

    asyncio.run(main())


def test_a_thread_that_comes_back_at_the_moment_it_is_given_up_ends_also_where_it_has_an_inbox_of_its_own(
    make_spec: Any, make_sink: Any, make_request: Any, tmp_path: Path
) -> None:
    async def main() -> None:
        async with pool_of(make_spec(IN_CALLS, pinned=True)) as pool:
            given_up = make_sink()
            pool.submit([make_request("a")], given_up, 9000)
            (batch,) = pool._inside
            await asyncio.wait_for(until((tmp_path / "in a").exists), 30)
            (tmp_path / "out of a").touch()
            time.sleep(0.2)  # the loop stands still, and the thread waits for its next batch by then
            pool._timed_out(batch)
            assert isinstance(await given_up.outcome(), DeadlineExceeded)
            await asyncio.wait_for(until(lambda: len(executor_threads_alive()) == 1), 30)

    asyncio.run(main())
