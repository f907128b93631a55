"""The bound on the silence of a client or a worker: counted from its last word, with one timer."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from torchere.serving.batching.request import Request
from torchere.serving.io import watchdog as silence
from torchere.serving.io.watchdog import Silence, Upload, within
from torchere.serving.workers import lanes
from torchere.serving.workers.executor import BatchReport, LoadSpec
from torchere.serving.workers.lanes import LanePage
from torchere.serving.workers.run import Run
from torchere.serving.workers.worker_process import ProcessEvents, WorkerProcess
from torchere.serving.workers.worker_settings import WorkerSettings

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
        watched.loop.call_later(TIMEOUT_S / 2, watched.silence.watch)
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


@pytest.mark.parametrize("is_expected", [True, False], ids=["now", "later"])
def test_a_lower_time_out_counts_for_a_silence_that_has_begun_and_for_the_next(is_expected: bool) -> None:
    async def main() -> float:
        loop, fired = asyncio.get_running_loop(), asyncio.Event()
        patient = Upload(60, 0, fired.set)
        patient.watch()
        if not is_expected:
            patient.over()
        patient.hurry(TIMEOUT_S)
        began_s = loop.time()
        if not is_expected:
            patient.watch()
        await asyncio.wait_for(fired.wait(), 10)
        return loop.time() - began_s

    assert asyncio.run(main()) >= TIMEOUT_S - TICK_S


@pytest.mark.parametrize(("size", "is_slow"), [(400, True), (600, False)])
def test_a_lower_time_out_of_an_upload_leaves_its_least_rate(size: int, is_slow: bool) -> None:
    async def main() -> bool:
        fired = asyncio.Event()
        upload = Upload(60, 1000, fired.set)  # bytes a second
        upload.arrived(1)
        upload.hurry(0.5)
        upload._counts_since_s -= 0.5  # as if the time were over
        upload.arrived(size)
        upload.stop()
        return fired.is_set()

    assert asyncio.run(main()) is is_slow


def test_while_the_loop_stands_still_nobody_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "LATE_S", TIMEOUT_S)

    async def main() -> None:
        watched = Watched()
        time.sleep(3 * TIMEOUT_S)  # which is what a process that was stopped looks like
        assert await asyncio.wait_for(watched.fired, 10) >= 4 * TIMEOUT_S - TICK_S

    asyncio.run(main())


class SilentWorker:
    """A worker process that never says a word, and one run inside it."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.loop = asyncio.get_running_loop()
        self.overdue: asyncio.Future[Run] = self.loop.create_future()
        self.hung = False

    async def __aenter__(self) -> SilentWorker:
        pairs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET), socket.socketpair()
        (lanes_socket, *self._ends), (control, other_end) = pairs
        self._ends.append(other_end)
        descriptor = lanes.create(1)
        self._launched = SimpleNamespace(
            pid=1,
            lanes=lanes_socket,
            control=control,
            page=LanePage(descriptor, 1),
            output=asyncio.StreamReader(),
            exit_code=self.loop.create_future(),
            is_shared=False,
        )
        os.close(descriptor)
        events = ProcessEvents(
            serving=self.unexpected,
            pong=self.unexpected,
            done=self.unexpected,
            hung=self._hangs,
            gone=self.unexpected,
        )
        stand_in: Any = self  # of the launcher, and of the owner of the run
        settings = WorkerSettings(
            LoadSpec("m", "1.0", "/nowhere", "h.py"),
            response_timeout_s=self._timeout_s,
            startup_timeout_s=60.0,
            max_retry_timeout_s=60.0,
            launcher=stand_in,
            on_free=self.unexpected,
            on_loaded=self.unexpected,
            on_metrics=self.unexpected,
        )
        self.process = WorkerProcess(settings, 9000, events)
        await self.process.start()
        self.process._open_lanes(1)
        (self._lane,) = self.process._lanes
        self.process.serving = 1
        self.began_s = self.loop.time()
        self.process.submit(Run([Request("id", 0.0)], stand_in))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self.process._control is not None and self.process._output is not None
        self._lane.frames.close()
        self.process._control.close()
        self._launched.lanes.close()
        self._launched.output.feed_eof()
        await self.process._output
        for end in self._ends:
            end.close()
        self._launched.page.close()
        if self.process._watch is not None:
            self.process._watch.cancel()

    async def launch(self, requests: int) -> Any:
        """See `Launcher`."""
        return self._launched

    def unexpected(self, *said: object) -> None:
        """It says nothing."""
        raise AssertionError(said)

    def run_done(self, run: Run, report: BatchReport) -> None:
        """See `RunOwner`."""
        raise AssertionError(report)

    def _hangs(self, run: Run) -> None:
        self.hung = True
        self.overdue.set_result(run)


def test_while_the_loop_stands_still_no_run_is_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "LATE_S", TIMEOUT_S)

    async def main() -> None:
        async with SilentWorker(TIMEOUT_S) as worker:
            time.sleep(3 * TIMEOUT_S)
            await asyncio.wait_for(worker.overdue, 10)
            assert worker.loop.time() - worker.began_s >= 4 * TIMEOUT_S - TICK_S
            assert worker.hung

    asyncio.run(main())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("timeout_s", [0.0, 0.0004])
def test_a_run_is_overdue_however_short_its_time_out(run: Any, timeout_s: float) -> None:
    async def main() -> None:
        async with SilentWorker(timeout_s) as worker:
            await asyncio.wait_for(worker.overdue, 10)

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
        silent = asyncio.Event()
        Silence(TIMEOUT_S, silent.set).watch()
        for _ in range(6):
            time.sleep(3 * TIMEOUT_S)
            await asyncio.sleep(0)
        assert silent.is_set()

    run(main())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_loop_that_is_always_late_ends_a_silent_run_all_the_same(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silence, "LATE_S", TIMEOUT_S / 2)

    async def main() -> None:
        async with SilentWorker(TIMEOUT_S) as worker:
            for _ in range(6):
                time.sleep(3 * TIMEOUT_S)
                await asyncio.sleep(0)
            assert worker.overdue.done()

    run(main())


@pytest.mark.parametrize("outcome", [1, OSError("no fork")])
def test_a_cancellation_at_the_moment_of_the_result_is_not_lost(outcome: int | OSError) -> None:
    async def main() -> None:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(within(future, 60.0))
        await asyncio.sleep(0)
        if isinstance(outcome, OSError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
        await asyncio.sleep(0)  # the result is there, and the one who waits has not run yet
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())


def test_a_result_in_time_is_returned_and_a_late_one_is_a_timeout() -> None:
    async def main() -> None:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        future.set_result(1)
        assert await within(future, 60.0) == 1
        late: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        with pytest.raises(asyncio.TimeoutError):
            await within(late, 0.001)
        assert late.cancelled()

    asyncio.run(main())
