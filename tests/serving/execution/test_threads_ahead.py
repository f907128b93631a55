"""Batches that lie in the inbox of executor threads before one of them is free."""

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from torchere.serving.errors import Cancelled, DeadlineExceeded
from torchere.serving.execution.executor import ExecutorState, LoadSpec
from torchere.serving.execution.threads import MAX_LEFT_BEHIND, ThreadPool

NOTES = """
    import os, time
    class Handler:
        def initialize(self, context):
            self.folder = context.system_properties["model_dir"]
            if os.path.exists(os.path.join(self.folder, "broken")):
                raise ValueError("broken")
        def handle(self, data, context):
            words = [row["body"].decode() for row in data]
            with open(os.path.join(self.folder, "ran"), "a") as notes:
                notes.write(" ".join(words) + " ")
            while words[0] == "wait" and not os.path.exists(os.path.join(self.folder, "go")):
                time.sleep(0.01)
            return words
"""


@asynccontextmanager
async def pool_of(spec: LoadSpec, response_timeout_s: float = 30.0) -> AsyncIterator[ThreadPool]:
    """One thread in service."""
    pool = ThreadPool(
        spec,
        response_timeout_s=response_timeout_s,
        startup_timeout_s=30.0,
        next_id=itertools.count(9000).__next__,
        on_free=lambda: None,
        on_loaded=lambda executor_id, load_s: None,
    )
    try:
        await pool.resize(1)
        await pool.warm_up()
        yield pool
    finally:
        await pool.close()


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.01)


async def until_it_is_quick(pool: ThreadPool, make_sink: Any, make_request: Any) -> None:
    """Run short batches until the pool would take one more than it has threads."""
    while pool.free <= pool.size:
        sink = make_sink()
        pool.submit([make_request("quick")], sink)
        await sink.outcome()


async def until_one_waits(pool: ThreadPool, folder: Path, make_sink: Any, make_request: Any) -> Any:
    """Have the only thread wait in a batch; returns the sink of that."""
    await until_it_is_quick(pool, make_sink, make_request)
    sink = make_sink()
    pool.submit([make_request("wait")], sink)
    await asyncio.wait_for(until(lambda: "wait" in (folder / "ran").read_text()), 30)
    return sink


def test_a_quick_thread_finds_its_next_batch_in_its_inbox(
    make_spec: Any, make_sink: Any, make_request: Any, tmp_path: Path
) -> None:
    async def main() -> None:
        async with pool_of(make_spec(NOTES)) as pool:
            assert pool.free == 1  # nothing is known of it yet
            running = await until_one_waits(pool, tmp_path, make_sink, make_request)
            assert pool.free == 1
            ahead = make_sink()
            pool.submit([make_request("next")], ahead)
            assert pool.free == 0
            (tmp_path / "go").touch()
            assert (await running.outcome()).body == b"wait"
            assert (await ahead.outcome()).body == b"next"

    asyncio.run(main())


@pytest.mark.parametrize("changes", [{"batch_size": 2}, {"pinned": True}])
def test_nothing_is_sent_ahead_that_would_rather_wait_outside(
    make_spec: Any, make_sink: Any, make_request: Any, changes: dict[str, Any]
) -> None:
    async def main() -> None:
        async with pool_of(make_spec(NOTES, **changes)) as pool:
            for _ in range(5):
                sink = make_sink()
                pool.submit([make_request("quick")], sink, 9000)
                await sink.outcome()
                assert pool.free == 1

    asyncio.run(main())


def test_what_nobody_wants_any_more_is_not_begun(
    make_spec: Any, make_sink: Any, make_request: Any, tmp_path: Path
) -> None:
    async def main() -> None:
        async with pool_of(make_spec(NOTES)) as pool:
            running = await until_one_waits(pool, tmp_path, make_sink, make_request)
            abandoned = make_sink()
            pool.submit([make_request("unwanted")], abandoned)
            abandoned.gone = [0]
            (tmp_path / "go").touch()
            await running.outcome()
            assert await asyncio.wait_for(abandoned.given_back, 30)
            after = make_sink()
            pool.submit([make_request("after")], after)
            assert (await after.outcome()).body == b"after"
            assert "unwanted" not in (tmp_path / "ran").read_text()

    asyncio.run(main())


def test_the_time_in_the_inbox_is_not_the_models_silence(
    make_spec: Any, make_sink: Any, make_request: Any, tmp_path: Path
) -> None:
    async def main() -> None:
        async with pool_of(make_spec(NOTES)) as pool:
            await until_one_waits(pool, tmp_path, make_sink, make_request)
            ahead = make_sink()
            pool.submit([make_request("wait")], ahead)
            batch = next(batch for batch in pool._inside if batch.taker is None)
            assert math.isinf(batch.taken_s)
            pool._silent(batch)  # the time is over since it was sent
            assert not batch.answered
            (tmp_path / "go").touch()
            assert (await ahead.outcome()).body == b"wait"

    asyncio.run(main())


def test_what_waits_for_threads_that_never_come_back_is_given_back(
    make_spec: Any, make_sink: Any, make_request: Any, tmp_path: Path
) -> None:
    async def main() -> None:
        async with pool_of(make_spec(NOTES), response_timeout_s=0.5) as pool:
            hung = await until_one_waits(pool, tmp_path, make_sink, make_request)
            (tmp_path / "broken").touch()
            ahead = make_sink()
            pool.submit([make_request("next")], ahead)
            assert isinstance(await hung.outcome(), DeadlineExceeded)
            assert await asyncio.wait_for(ahead.given_back, 30)
            assert [status.state for status in pool.statuses()] == [ExecutorState.FAILED]
            (tmp_path / "broken").unlink()
            (tmp_path / "go").touch()
            await pool.resize(1)
            await pool.warm_up()
            again = make_sink()
            pool.submit([make_request("again")], again)
            assert (await again.outcome()).body == b"again"
            assert "next" not in (tmp_path / "ran").read_text()

    asyncio.run(main())


def test_a_full_batch_may_lie_ahead_and_who_left_meanwhile_is_not_run(
    make_spec: Any, make_sink: Any, make_request: Any, tmp_path: Path
) -> None:
    async def main() -> None:
        async with pool_of(make_spec(NOTES, batch_size=3)) as pool:
            running = make_sink()
            pool.submit([make_request("wait")], running)
            await asyncio.wait_for(until((tmp_path / "ran").exists), 30)
            assert (pool.free, pool.ahead) == (0, 1)
            ahead = make_sink()
            pool.submit([make_request(word) for word in ("stays", "left", "stays-too")], ahead)
            assert (pool.free, pool.ahead) == (0, 0)
            ahead.gone = [1]
            (tmp_path / "go").touch()
            await running.outcome()
            first, left, last = (await asyncio.wait_for(ahead.report, 30)).outcomes
            assert (first.body, last.body) == (b"stays", b"stays-too")
            assert isinstance(left, Cancelled)
            assert (tmp_path / "ran").read_text().split() == ["wait", "stays", "stays-too"]
            assert pool.free == 1

    asyncio.run(main())


@pytest.mark.parametrize("changes", [{"batch_size": 1}, {"batch_size": 2, "pinned": True}])
def test_no_full_batch_lies_ahead_where_there_is_none_or_it_has_a_place_of_its_own(
    make_spec: Any, changes: dict[str, Any]
) -> None:
    async def main() -> None:
        async with pool_of(make_spec(NOTES, **changes)) as pool:
            assert pool.ahead == 0

    asyncio.run(main())


def test_nothing_is_sent_ahead_of_a_thread_that_hangs(
    make_spec: Any, make_sink: Any, make_request: Any, tmp_path: Path
) -> None:
    async def main() -> None:
        async with pool_of(make_spec(NOTES, batch_size=2), response_timeout_s=0.5) as pool:
            hung = make_sink()
            pool._left = {*range(MAX_LEFT_BEHIND)}  # type: ignore[arg-type]  # it has to stay where it is
            pool.submit([make_request("wait")], hung)
            assert isinstance(await hung.outcome(), DeadlineExceeded)
            assert (pool.in_service, pool.free, pool.ahead) == (0, 0, 0)
            (tmp_path / "go").touch()
            await asyncio.wait_for(until(lambda: pool.free == 1), 30)

    asyncio.run(main())
