"""The bound on a worker's silence: counted from the last thing it said, with one timer."""

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from torchere.serving import silence
from torchere.serving.execution.inflight import InFlight
from torchere.serving.silence import Silence

TIMEOUT_S = 0.04
TICK_S = 0.002  # a loop's clock may be that coarse


class Watched:
    """A `Silence`, and when it was too long."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.began_s = self.loop.time()
        self.fired: asyncio.Future[float] = self.loop.create_future()
        self.silence = Silence(TIMEOUT_S, lambda: self.fired.set_result(self.loop.time() - self.began_s))
        self.silence.watch()

    async def until(self, after_s: float) -> None:
        """Wait for a moment that the test is about."""
        there = self.loop.create_future()
        self.loop.call_later(after_s, there.set_result, None)
        await there


def test_silence_is_told_after_the_time_out() -> None:
    async def main() -> float:
        watched = Watched()
        return await asyncio.wait_for(watched.fired, 10)

    assert asyncio.run(main()) >= TIMEOUT_S - TICK_S


def test_what_is_heard_begins_the_time_anew() -> None:
    async def main() -> float:
        watched = Watched()
        watched.loop.call_later(TIMEOUT_S / 2, watched.silence.broken)
        return await asyncio.wait_for(watched.fired, 10)

    assert asyncio.run(main()) >= 1.5 * TIMEOUT_S - TICK_S


@pytest.mark.parametrize("end", [Silence.over, Silence.stop])
def test_who_is_not_to_say_anything_may_be_silent(end: Callable[[Silence], None]) -> None:
    async def main() -> None:
        watched = Watched()
        end(watched.silence)
        await watched.until(2 * TIMEOUT_S)
        assert not watched.fired.done()

    asyncio.run(main())


def test_a_watch_that_begins_while_the_old_timer_runs_gets_its_whole_time() -> None:
    async def main() -> None:
        watched = Watched()
        watched.silence.over()
        await watched.until(TIMEOUT_S / 2)
        watched.began_s = watched.loop.time()
        watched.silence.watch()
        assert await asyncio.wait_for(watched.fired, 10) >= TIMEOUT_S - TICK_S

    asyncio.run(main())


def test_while_the_loop_stands_still_nobody_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "LATE_S", TIMEOUT_S)

    async def main() -> None:
        watched = Watched()
        time.sleep(3 * TIMEOUT_S)  # which is what a process that was stopped looks like
        assert await asyncio.wait_for(watched.fired, 10) >= 4 * TIMEOUT_S - TICK_S

    asyncio.run(main())


def test_while_the_loop_stands_still_no_batch_is_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "LATE_S", TIMEOUT_S)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        fired: asyncio.Future[InFlight] = loop.create_future()
        batch = InFlight([], SimpleNamespace())  # type: ignore[arg-type]  # nothing is told to it
        batch.watch(TIMEOUT_S, fired.set_result)
        time.sleep(3 * TIMEOUT_S)
        assert await asyncio.wait_for(fired, 10) is batch
        assert loop.time() - began_s >= 4 * TIMEOUT_S - TICK_S

    asyncio.run(main())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("left_s", [0.0, 0.0004])
def test_a_batch_is_overdue_however_little_of_its_time_was_left(run: Any, left_s: float) -> None:
    async def main() -> None:
        fired: asyncio.Future[InFlight] = asyncio.get_running_loop().create_future()
        batch = InFlight([], SimpleNamespace())  # type: ignore[arg-type]  # nothing is told to it
        batch.watch(left_s, fired.set_result)
        assert await asyncio.wait_for(fired, 10) is batch

    run(main())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_silence_is_told_however_short_the_time_out(run: Any) -> None:
    async def main() -> None:
        fired = asyncio.Event()
        Silence(0.0004, fired.set).watch()
        await asyncio.wait_for(fired.wait(), 10)

    run(main())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_loop_that_is_always_late_ends_silence_all_the_same(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silence, "LATE_S", TIMEOUT_S / 2)

    async def main() -> None:
        silent, overdue = asyncio.Event(), asyncio.Event()
        Silence(TIMEOUT_S, silent.set).watch()
        batch = InFlight([], SimpleNamespace())  # type: ignore[arg-type]  # nothing is told to it
        batch.watch(TIMEOUT_S, lambda _: overdue.set())
        for _ in range(6):
            time.sleep(3 * TIMEOUT_S)
            await asyncio.sleep(0)
        assert silent.is_set()
        assert overdue.is_set()

    run(main())
