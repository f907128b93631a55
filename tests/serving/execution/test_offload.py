"""Batches that pile up on the event loop: a real worker process takes them, as long as they do."""

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchere.serving.errors import ExecutorDied
from torchere.serving.execution import demand, offload
from torchere.serving.execution.executor import LoadSpec
from torchere.serving.execution.inline import FIRST_TRIAL
from torchere.serving.execution.launch import ForkLauncher, worker_environment
from torchere.serving.execution.offload import ROOM, WORTH_TWO, Offload
from torchere.serving.execution.processes import ProcessPool
from torchere.serving.execution.threads import ThreadPool

HERE = str(os.getpid()).encode()
PILE = 2  # requests behind a batch of one


@asynccontextmanager
async def pool_of(spec: LoadSpec, count: int) -> AsyncIterator[ThreadPool]:
    """A pool of threads in service, with a worker process at hand."""
    folder = Path(spec.archive_dir)
    (folder / "handler.py").rename(folder / "base_handler.py")
    spec = replace(spec, handler="base_handler", batch_size=4)
    launcher = ForkLauncher(worker_environment())
    next_id = itertools.count(9000).__next__
    common: dict[str, Any] = {
        "response_timeout_s": 30.0,
        "startup_timeout_s": 60.0,
        "next_id": next_id,
        "on_free": lambda: None,
        "on_loaded": lambda executor_id, load_s: None,
    }

    workers = ProcessPool(spec, **common, max_retry_timeout_s=60.0, launcher=launcher, depth=ROOM)
    pool = ThreadPool(spec, **common, offload=Offload("the model", workers))
    try:
        await pool.resize(count)
        await pool.warm_up()
        yield pool
    finally:
        await pool.close()
        await launcher.close()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand, "WINDOW_S", 1e-9)
    monkeypatch.setattr(demand, "HIGH_SHARE", 0.0)


@pytest.fixture
def asked(make_sink: Any, make_request: Any) -> Callable[..., Any]:
    """`async with asked(spec, count) as (pool, ask, until)`: its batches of one run on the loop already.

    `ask(word, behind)` is an answer, or its error; `until(is_there, behind)` the first process that is there.
    """

    @asynccontextmanager
    async def asking(spec: LoadSpec, count: int = 2) -> AsyncIterator[tuple[ThreadPool, Any, Any]]:
        async with pool_of(spec, count) as pool:

            async def ask(word: str = "pid", behind: int = 0) -> Any:
                sink = make_sink()
                pool.submit([make_request(word)], sink, behind=behind)
                outcome = await sink.outcome()
                return getattr(outcome, "body", outcome)

            async def until(is_there: Callable[[bytes], bool], behind: int) -> bytes:
                for _ in range(6000):
                    if is_there(where := await ask(behind=behind)):
                        return where
                    await asyncio.sleep(0.01)
                raise TimeoutError

            for _ in range(FIRST_TRIAL):
                await ask()
            assert pool.on_loop
            yield pool, ask, until

    return asking


def elsewhere(where: bytes) -> bool:
    return where != HERE


@pytest.mark.usefixtures("at_once")
def test_what_piles_up_runs_in_a_worker_and_the_rest_on_the_loop(make_spec: Any, asked: Any) -> None:
    async def main() -> None:
        async with asked(make_spec()) as (pool, ask, until):
            worker = await until(elsewhere, PILE)
            assert [await ask(behind=PILE) for _ in range(3)] == [worker] * 3
            assert await ask(behind=0) == HERE
            assert pool.size == pool.in_service == 2

    asyncio.run(main())


@pytest.mark.usefixtures("at_once")
def test_what_is_worth_two_batches_is_halved_while_the_worker_has_nothing_to_do(
    make_spec: Any, asked: Any, make_sink: Any, make_request: Any
) -> None:
    async def main() -> None:
        async with asked(make_spec()) as (pool, _, until):
            assert pool.portion(2 * WORTH_TWO) == 2 * WORTH_TWO  # there is no worker
            await until(lambda where: where != HERE, PILE)
            sizes = [pool.portion(waiting) for waiting in (WORTH_TWO - 1, WORTH_TWO, 2 * WORTH_TWO + 1)]
            assert sizes == [WORTH_TWO - 1, WORTH_TWO // 2, WORTH_TWO]
            sink = make_sink()
            pool.submit([make_request("pid")], sink, behind=PILE)
            assert pool.portion(WORTH_TWO) == WORTH_TWO  # it has something to do
            await sink.outcome()

    asyncio.run(main())


@pytest.mark.usefixtures("at_once")
def test_while_the_worker_is_busy_it_gets_all_there_is_room_for(
    make_spec: Any, make_sink: Any, make_request: Any, asked: Any, tmp_path: Path
) -> None:
    async def main() -> None:
        async with asked(make_spec()) as (pool, ask, until):
            worker = await until(elsewhere, PILE)
            held = make_sink()
            pool.submit([make_request("wait")], held, behind=PILE)
            followers = [make_sink() for _ in range(ROOM - 1)]
            for sink in followers:
                pool.submit([make_request("pid")], sink)
            assert not any(sink.report.done() for sink in followers)
            assert pool.free == 1
            assert await ask() == HERE
            (tmp_path / "go").touch()
            assert (await held.outcome()).body == b"wait!"
            assert {(await sink.outcome()).body for sink in followers} == {worker}

    asyncio.run(main())


@pytest.mark.parametrize(
    ("count", "behind"), [pytest.param(2, 0, id="no pile"), pytest.param(1, PILE, id="one executor")]
)
@pytest.mark.usefixtures("at_once")
def test_no_worker_is_started_without_need(make_spec: Any, asked: Any, count: int, behind: int) -> None:
    async def main() -> None:
        async with asked(make_spec(), count) as (pool, ask, _):
            for _ in range(20):
                assert await ask(behind=behind) == HERE
                await asyncio.sleep(0)
            assert pool.free == 1

    asyncio.run(main())


@pytest.mark.usefixtures("at_once")
def test_a_killed_worker_takes_its_batch_along_and_the_loop_goes_on(
    make_spec: Any, make_sink: Any, make_request: Any, asked: Any
) -> None:
    async def main() -> None:
        async with asked(make_spec()) as (pool, ask, until):
            worker = await until(elsewhere, PILE)
            begun, behind_it = make_sink(), make_sink()
            pool.submit([make_request("wait")], begun, behind=PILE)
            pool.submit([make_request("x")], behind_it, behind=PILE)
            os.kill(int(worker), signal.SIGKILL)
            assert isinstance(await begun.outcome(), ExecutorDied)
            assert await asyncio.wait_for(behind_it.given_back, 30)
            assert await ask() == HERE
            assert await until(elsewhere, PILE) != worker

    asyncio.run(main())


@pytest.mark.usefixtures("at_once")
def test_a_worker_that_is_not_needed_ends_and_comes_again(
    make_spec: Any, asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "UNUSED_S", 0.2)

    async def main() -> None:
        async with asked(make_spec()) as (_, _, until):
            worker = await until(elsewhere, PILE)
            while Path(f"/proc/{int(worker)}").exists():
                await asyncio.sleep(0.01)
            assert await until(elsewhere, PILE) != worker

    asyncio.run(main())


@pytest.mark.usefixtures("at_once")
def test_where_no_worker_can_be_loaded_all_stays_on_the_loop(
    make_spec: Any, asked: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fails_elsewhere = f"""
        import os
        class Handler:
            def initialize(self, context):
                assert os.getpid() == {os.getpid()}, "not here"
            def handle(self, data, context):
                return [str(os.getpid())] * len(data)
    """

    async def main() -> None:
        async with asked(make_spec(fails_elsewhere)) as (_, ask, until):
            await until(lambda where: "no worker process helps" in caplog.text, PILE)
            for _ in range(20):
                assert await ask(behind=PILE) == HERE
            assert caplog.text.count("no worker process helps") == 1

    asyncio.run(main())


@pytest.mark.usefixtures("at_once")
def test_a_worker_gets_no_batch_of_a_pool_that_is_left_with_one_executor(
    make_spec: Any, make_sink: Any, make_request: Any, asked: Any, tmp_path: Path
) -> None:
    async def main() -> None:
        async with asked(make_spec()) as (pool, ask, until):
            await until(elsewhere, PILE)
            held = make_sink()
            pool.submit([make_request("wait")], held, behind=PILE)
            await pool.resize(1)
            assert pool.free == 1
            assert await ask(behind=PILE) == HERE
            (tmp_path / "go").touch()
            assert (await held.outcome()).body == b"wait!"

    asyncio.run(main())


@pytest.mark.usefixtures("at_once")
def test_a_bug_at_the_start_of_a_worker_is_logged_once(
    make_spec: Any, asked: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(pool: ProcessPool, count: int) -> None:
        raise ValueError("a bug")

    async def main() -> None:
        async with asked(make_spec()) as (_, ask, _):
            monkeypatch.setattr(ProcessPool, "resize", broken)
            for _ in range(20):
                assert await ask(behind=PILE) == HERE
                await asyncio.sleep(0)
            assert caplog.text.count("no worker process helps") == 1

    asyncio.run(main())


@pytest.mark.usefixtures("at_once")
def test_a_pool_closed_while_its_worker_starts_leaves_none(make_spec: Any, asked: Any) -> None:
    async def main() -> None:
        async with asked(make_spec()) as (_, ask, _):
            await ask(behind=PILE)
            await asyncio.sleep(0.05)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
