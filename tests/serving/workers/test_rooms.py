"""Versions that share a worker process: real ones, of TorchScript under a built-in handler."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import logging
import os
import signal
import socket
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from pools import fork_launcher, new_pool, until

from torchere.serving.errors import DeadlineExceeded, ExecutorDied, LoadFailed
from torchere.serving.types import InferRequest, ModelKey, Parameter
from torchere.serving.workers import rooms
from torchere.serving.workers.executor import ExecutorState, LoadSpec
from torchere.serving.workers.launch import LaunchedProcess
from torchere.serving.workers.loss import Loss, LossKind
from torchere.serving.workers.oom import OomWatch
from torchere.serving.workers.pool import WorkerPool
from torchere.serving.workers.rooms import RoomLauncher


class Plain(torch.nn.Module):
    """Multiplies, and does not end when its input is negative."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while bool((x < 0).any()):
            x = x - 1
        return x * self.factor


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x + self.count


class Stuck(torch.nn.Module):
    """Does not end to load."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 1

    @torch.jit.export
    def __getstate__(self):
        return (1, self.training)

    @torch.jit.export
    def __setstate__(self, state: tuple[int, bool]) -> None:
        self.training = state[1]
        self.number = state[0]
        x = torch.ones(1)
        while bool((x > 0).any()):
            x = x + 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class House:
    """A room launcher, and pools whose versions it takes in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.forks = fork_launcher()
        self.launcher = RoomLauncher(self.forks)
        self.pools: dict[str, WorkerPool] = {}
        self._ids = itertools.count(9000)

    def spec(self, name: str, module: torch.nn.Module, **changes: Any) -> LoadSpec:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        torch.jit.script(module.eval()).save(str(folder / "net.pt"))
        manifest = {"model": {"modelName": name, "serializedFile": "net.pt"}}
        return LoadSpec(
            name,
            "1.0",
            str(folder),
            "base_handler",
            manifest=manifest,
            envelope="body",
            shares_weights=True,
            **changes,
        )

    async def move_in(
        self, name: str, module: torch.nn.Module | None = None, count: int = 1, **changes: Any
    ) -> WorkerPool:
        spec = self.spec(name, module or Plain(2))
        launcher = self.launcher.of(ModelKey(name, "1.0"))
        pool = new_pool(spec, launcher, next_id=self._ids.__next__, **changes)
        self.pools[name] = pool
        await pool.resize(count)
        await pool.warm_up()
        return pool

    async def move_out(self, name: str) -> None:
        await self.pools.pop(name).close()


@pytest.fixture
def in_house(tmp_path: Path) -> Callable[[Callable[[House], Any]], None]:
    """Runs a test with a house, and closes all that is in it."""

    def run(test: Callable[[House], Any]) -> None:
        async def main() -> None:
            house = House(tmp_path)
            try:
                await asyncio.wait_for(test(house), 55)
            finally:
                for name in list(house.pools):
                    await house.move_out(name)
                await house.launcher.close()
                await house.forks.close()

        asyncio.run(main())

    return run


def numbers(*values: float) -> InferRequest:
    return InferRequest("r", (Parameter("body", json.dumps(values).encode(), "application/json"),))


def pid_of(pool: WorkerPool) -> int:
    return pool.statuses()[0].pid


async def ask(pool: WorkerPool, make_sink: Any, *values: float) -> Any:
    sink = make_sink()
    sink.submit(pool, [numbers(*values)])
    outcome = await sink.outcome()
    return json.loads(outcome.body) if hasattr(outcome, "body") else outcome


def test_two_versions_answer_from_one_process(in_house: Any, make_sink: Any) -> None:
    async def test(house: House) -> None:
        one, two = await house.move_in("one", Plain(2)), await house.move_in("two", Plain(3), count=2)
        assert pid_of(one) == pid_of(two) != os.getpid()
        assert await ask(one, make_sink, 1, 2) == [2, 4]
        assert await ask(two, make_sink, 1, 2) == [3, 6]

    in_house(test)


def test_versions_that_come_at_once_share_one_process(in_house: Any, make_sink: Any) -> None:
    async def test(house: House) -> None:
        pools = await asyncio.gather(*(house.move_in(f"m{number}") for number in range(8)))
        assert len({pid_of(pool) for pool in pools}) == 1
        assert await asyncio.gather(*(ask(pool, make_sink, 4) for pool in pools)) == [[8]] * 8

    in_house(test)


def test_a_version_that_is_unloaded_leaves_and_the_other_goes_on(in_house: Any, make_sink: Any) -> None:
    async def test(house: House) -> None:
        one, two = await house.move_in("one"), await house.move_in("two")
        pid = pid_of(one)
        weights = str(house.folder / "two" / "net.pt")
        await house.move_out("two")
        assert weights not in Path(f"/proc/{pid}/maps").read_text()
        assert await ask(one, make_sink, 1) == [2]
        assert (pid_of(one), one.statuses()[0].losses) == (pid, 0)
        assert two.statuses() == ()

    in_house(test)


def test_the_process_ends_with_its_last_version(in_house: Any) -> None:
    async def test(house: House) -> None:
        pid = pid_of(await house.move_in("one"))
        await house.move_out("one")
        await until(lambda: not psutil.pid_exists(pid))
        assert pid_of(await house.move_in("one")) != pid

    in_house(test)


def test_a_crash_takes_all_versions_and_all_come_back_into_one_process(in_house: Any, make_sink: Any) -> None:
    async def test(house: House) -> None:
        one, two = await house.move_in("one"), await house.move_in("two")
        pid = pid_of(one)
        begun, sink = make_sink(), make_sink()
        begun.submit(one, [numbers(-1)])
        await until(lambda: begun.run.page.begun(1) != {})
        os.kill(pid, signal.SIGSEGV)
        outcome = await begun.outcome()
        assert isinstance(outcome, ExecutorDied)
        assert outcome.crashed
        assert "signal 11" in outcome.detail
        await until(lambda: one.free == two.free == 1)
        assert pid_of(one) == pid_of(two) != pid
        assert [pool.statuses()[0].losses for pool in (one, two)] == [1, 1]
        assert begun.run.shares_process  # so that the quarantine convicts nothing for it
        sink.submit(two, [numbers(5)])
        assert json.loads((await sink.outcome()).body) == [10]

    in_house(test)


def test_a_room_that_was_lost_twice_splits(in_house: Any, make_sink: Any) -> None:
    async def test(house: House) -> None:
        one, two = await house.move_in("one"), await house.move_in("two")
        for losses in (1, 2):
            os.kill(pid_of(one), signal.SIGKILL)
            await until(lambda: one.statuses()[0].losses == two.statuses()[0].losses == losses)  # noqa: B023
            await until(lambda: one.free == two.free == 1)
        assert pid_of(one) != pid_of(two)
        sink = make_sink()
        sink.submit(one, [numbers(1)])
        assert json.loads((await sink.outcome()).body) == [2]
        assert not sink.run.shares_process  # so that the quarantine may convict
        assert pid_of(await house.move_in("three")) not in {pid_of(one), pid_of(two)}

    in_house(test)


def test_a_hung_lane_ends_the_room_and_its_mates_come_back(in_house: Any, make_sink: Any) -> None:
    async def test(house: House) -> None:
        one, two = await house.move_in("one", response_timeout_s=1.0), await house.move_in("two")
        pid = pid_of(two)
        assert isinstance(await ask(one, make_sink, -1), DeadlineExceeded)
        await until(lambda: two.statuses()[0].losses == 1 and one.free == two.free == 1)
        assert pid_of(one) == pid_of(two) != pid
        cause = two.statuses()[0].last_failure
        assert "response_timeout" in cause
        assert "model one version 1.0" in cause
        assert await ask(two, make_sink, 1) == [2]

    in_house(test)


def test_a_hung_lane_beside_others_of_its_version_moves_to_a_new_room(in_house: Any, make_sink: Any) -> None:
    async def test(house: House) -> None:
        one = await house.move_in("one", count=2, response_timeout_s=1.0)
        two = await house.move_in("two")
        pid = pid_of(two)
        hung = make_sink()
        hung.submit(one, [numbers(-1)])
        assert isinstance(await hung.outcome(), DeadlineExceeded)
        await until(lambda: two.statuses()[0].losses == 1 and one.free == 2 and two.free == 1)
        assert pid_of(one) == pid_of(two) != pid

    in_house(test)


def test_a_version_that_does_not_load_costs_its_mates_nothing(in_house: Any, make_sink: Any) -> None:
    async def test(house: House) -> None:
        one = await house.move_in("one")
        pid = pid_of(one)
        spec = house.spec("broken", Plain(1))
        Path(spec.archive_dir, "net.pt").write_bytes(b"no TorchScript")
        broken = new_pool(spec, house.launcher.of(ModelKey("broken", "1.0")), next_id=lambda: 1)
        with pytest.raises(LoadFailed) as caught:
            await broken.resize(1)
        assert "TorchScript" in caught.value.detail
        assert await ask(one, make_sink, 1) == [2]
        assert (pid_of(one), one.statuses()[0].losses) == (pid, 0)

    in_house(test)


@pytest.mark.parametrize("way", ["hangs", "crashes"])
def test_a_first_load_goes_on_when_a_mate_ends_the_room(
    way: str, in_house: Any, make_sink: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(house: House) -> None:
        one = await house.move_in("one", response_timeout_s=1.0)
        pid, begun = pid_of(one), make_sink()
        if way == "hangs":
            begun.submit(one, [numbers(-1)])
            await until(lambda: begun.run.page.begun(1) != {})
        os.kill(pid, signal.SIGSTOP)
        moving = asyncio.ensure_future(house.move_in("two"))
        await until(lambda: "two" in house.pools and house.pools["two"].statuses()[0].pid == pid)
        if way == "crashes":
            os.kill(pid, signal.SIGSEGV)
            os.kill(pid, signal.SIGCONT)
        two = await moving
        await until(lambda: one.free == 1)
        assert await ask(two, make_sink, 1) == [2]
        assert (one.has_own_process, one.statuses()[0].losses) == (False, 1)
        # A crash may be that of the load, which is not to end a second room.
        assert (two.has_own_process, pid_of(one) != pid_of(two)) == (way == "crashes",) * 2
        assert "while it was loading" in two.statuses()[0].last_failure
        assert ("gets a process of its own" in caplog.text) is (way == "crashes")

    in_house(test)


def test_a_load_that_does_not_end_takes_no_newcomers_with_it(in_house: Any, make_sink: Any) -> None:
    async def test(house: House) -> None:
        pid = pid_of(await house.move_in("one"))
        with pytest.raises(LoadFailed) as caught:
            await house.move_in("stuck", Stuck(), startup_timeout_s=1.0)
        assert "startup_timeout" in caught.value.detail
        assert pid_of(await house.move_in("two", startup_timeout_s=20.0)) != pid

    in_house(test)


def test_a_model_that_changes_itself_gets_a_process_of_its_own(in_house: Any, make_sink: Any) -> None:
    async def test(house: House) -> None:
        one, counting = await house.move_in("one"), await house.move_in("counting", Counting())
        assert pid_of(one) != pid_of(counting)
        assert [await ask(counting, make_sink, 1) for _ in range(2)] == [[2], [3]]
        assert one.statuses()[0].losses == counting.statuses()[0].losses == 0
        assert counting.statuses()[0].state is ExecutorState.READY
        assert (one.has_own_process, counting.has_own_process) == (False, True)

    in_house(test)


def test_a_version_that_is_stopped_while_it_computes_without_end_ends_the_room_in_time(
    in_house: Any, make_sink: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rooms, "LEAVING_S", 0.2)

    async def test(house: House) -> None:
        one, two = await house.move_in("one"), await house.move_in("two")
        pid = pid_of(one)
        begun = make_sink()
        begun.submit(two, [numbers(-1)])
        await until(lambda: begun.run.page.begun(1) != {})
        used_s = psutil.Process(pid).cpu_times().user
        # A run that has begun may still be before its model, where it is given up when its version leaves.
        await until(lambda: psutil.Process(pid).cpu_times().user > used_s + 0.3)
        await house.move_out("two")
        await until(lambda: one.statuses()[0].losses == 1 and one.free == 1)
        assert pid_of(one) != pid
        assert "did not end" in one.statuses()[0].last_failure

    in_house(test)


def test_fifty_versions_that_come_and_go_leave_no_thread_and_no_descriptor(
    in_house: Any, make_sink: Any
) -> None:
    async def test(house: House) -> None:
        process = psutil.Process(pid_of(await house.move_in("stays")))
        here = psutil.Process()

        def counts() -> tuple[int, int, int]:
            return process.num_threads(), process.num_fds(), here.num_fds()

        async def cycle() -> None:
            comes = await house.move_in("comes")
            assert pid_of(comes) == process.pid
            assert await ask(comes, make_sink, 1) == [2]
            await house.move_out("comes")

        await cycle()
        first = counts()
        for _ in range(50):
            await cycle()
        # A thread ends a moment after the server is told that its version has left.
        await until(lambda: all(now <= then for now, then in zip(counts(), first, strict=True)))

    in_house(test)


def test_output_of_the_room_names_its_models_and_records_their_own(
    in_house: Any, make_sink: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(house: House) -> None:
        one, two = await house.move_in("one"), await house.move_in("two")
        with caplog.at_level(logging.INFO):
            outcome = await ask(two, make_sink, "no number")  # type: ignore[arg-type]
            assert isinstance(outcome, Exception)
            os.kill(pid_of(one), signal.SIGSEGV)  # faulthandler prints a trace, without a mark
            await until(lambda: any("Fatal Python error" in each.message for each in caplog.records))
        failed = next(each for each in caplog.records if "failed on" in each.message)
        printed = next(each for each in caplog.records if "Fatal Python error" in each.message)
        assert (vars(failed)["model"], vars(failed)["version"]) == ("two", "1.0")
        assert vars(printed)["model"] == "one,two"

    in_house(test)


def test_a_version_that_has_left_is_not_kept_alive_by_its_time_out(in_house: Any, make_sink: Any) -> None:
    async def test(house: House) -> None:
        pool = await house.move_in("one", response_timeout_s=1000.0)
        assert await ask(pool, make_sink, 1) == [2]
        process = weakref.ref(pool._workers[0]._process)
        del pool
        await house.move_out("one")
        await asyncio.sleep(0)
        gc.collect()
        assert process() is None

    in_house(test)


async def room_of_a_sleeper() -> tuple[rooms.Room, socket.socket, asyncio.Future[int]]:
    """A room whose process only sleeps, the process's end of the room socket, and its exit code."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = await asyncio.create_subprocess_exec("sleep", "60")
    exit_code = asyncio.ensure_future(process.wait())
    output = asyncio.StreamReader()
    output.feed_eof()
    return rooms.Room(LaunchedProcess(process.pid, output, exit_code, lambda: None), ours), theirs, exit_code


def test_the_silence_of_a_version_that_hangs_is_not_that_of_the_others() -> None:
    async def main() -> None:
        room, theirs, exit_code = await room_of_a_sleeper()
        with theirs:
            versions: list[Any] = [
                SimpleNamespace(key=ModelKey(name, "1.0"), room_lost=lambda: None)
                for name in ("slow", "healthy")
            ]
            slow, healthy = [await room.take_in(version, 1) for version in versions]
            slow.kill(Loss(LossKind.TIMEOUT, "no answer", silent_s=600.0))
            await exit_code
            assert healthy.loss(-signal.SIGKILL, OomWatch()).silent_s == 0
        for each in (slow, healthy):
            for end in (each.lanes, each.control, each.page):
                end.close()
        await room.end()

    asyncio.run(main())


def test_a_room_that_sends_no_message_is_killed_and_not_read_on() -> None:
    async def main() -> None:
        room, theirs, exit_code = await room_of_a_sleeper()
        with theirs:
            for _ in range(3):
                theirs.send(b"hello")
            assert await asyncio.wait_for(exit_code, 30) == -signal.SIGKILL
            assert room.is_closed
            assert "that is none" in room.loss(-signal.SIGKILL, OomWatch()).cause
        await room.end()

    asyncio.run(main())
