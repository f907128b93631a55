"""The reconciler with executors that load when the test says so."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from fakes import AwaitedRequest

from torchere.serving.batching.batcher import Batcher
from torchere.serving.config.server_settings import BatchSettings, ModelSettings
from torchere.serving.errors import CutOff, LoadFailed, Unavailable
from torchere.serving.registry.reconciler import Reconciler
from torchere.serving.registry.version import Origin, Version, VersionState
from torchere.serving.store.package import StoredArchive
from torchere.serving.types import InferResponse, ModelKey
from torchere.serving.workers.executor import BatchReport
from torchere.serving.workers.run import Run


class PuppetPool:
    """Executors whose loading waits for `gate`, and fails with `failure` when it is set."""

    def __init__(self) -> None:
        self.size = 0
        self.in_service = 0
        self.free = 0
        self.ahead = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.calls: list[str] = []

    async def resize(self, count: int) -> None:
        self.calls.append(f"resize {count}")
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        self.size = count

    async def warm_up(self) -> None:
        self.calls.append("warm up")
        self.in_service = self.free = self.size

    def statuses(self) -> tuple[Any, ...]:
        return ()

    def outage(self) -> None:
        return None

    def submit(self, run: Run) -> None:
        self.free -= 1
        self.run = run

    async def close(self) -> None:
        self.calls.append("close")
        self.size = self.in_service = self.free = 0


class Stage:
    """One version with a puppet pool under a reconciler."""

    def __init__(self, executors: int = 1) -> None:
        self.gone: list[ModelKey] = []
        self.pool = PuppetPool()
        batcher = Batcher(
            BatchSettings(),
            self.pool,  # type: ignore[arg-type]
            observer=self,  # type: ignore[arg-type]
            now=time.monotonic,
            refusal="no worker",
        )
        origin = Origin(StoredArchive("m.mar", Path("/nowhere")), "h.py", "python", "process", False)
        settings = ModelSettings().scaled(executors, executors)
        self.version = Version(ModelKey("m", "1"), origin, settings, self.pool, batcher, observer=self)  # type: ignore[arg-type]
        self.reconciler = Reconciler(drain_timeout_s=5.0, on_gone=self._gone)

    def batches_running(self, *_: object) -> None:
        """Nothing is counted here."""

    def batch_finished(self, *_: object) -> None:
        """Nothing is counted here."""

    async def begin_to_resize(self, target: int) -> None:
        """Want so many executors, and return while the pool makes them: it waits at its gate."""
        self.pool.gate.clear()
        self.version.target = target
        self.reconciler.wake(self.version)
        before = len(self.pool.calls)
        while f"resize {target}" not in self.pool.calls[before:]:
            await asyncio.sleep(0)

    async def _gone(self, version: Version) -> None:
        self.gone.append(version.key)

    async def settle(self) -> VersionState:
        """Wake the reconciler and wait until it has nothing to do."""
        self.reconciler.wake(self.version)
        await asyncio.wait_for(self.version.settled.wait(), 5)
        return self.version.state


def test_a_version_is_loaded_warmed_and_ready() -> None:
    async def main() -> None:
        stage = Stage(executors=2)
        assert await stage.settle() is VersionState.READY
        assert stage.pool.calls == ["resize 2", "warm up"]

    asyncio.run(main())


def test_a_version_without_wanted_executors_loads_nothing() -> None:
    async def main() -> None:
        stage = Stage(executors=0)
        assert await stage.settle() is VersionState.NEW
        assert stage.pool.calls == []

    asyncio.run(main())


def test_a_version_that_does_not_load_keeps_the_cause_and_answers_who_waits() -> None:
    async def main() -> None:
        stage = Stage()
        stage.pool.failure = LoadFailed("Failed to start", "no weights")
        waiting = AwaitedRequest("a", 0.0)
        stage.version.batcher.submit(waiting)
        assert await stage.settle() is VersionState.FAILED
        assert stage.version.failure_text == "no weights"
        error = (await asyncio.gather(waiting.future, return_exceptions=True))[0]
        assert isinstance(error, Unavailable)

    asyncio.run(main())


def test_what_an_executor_runs_already_when_another_does_not_load_is_answered_first() -> None:
    async def main() -> None:
        stage = Stage()
        stage.pool.in_service = stage.pool.free = 1
        running = AwaitedRequest("a", 0.0)
        stage.version.batcher.submit(running)
        await asyncio.sleep(0)
        stage.pool.failure = LoadFailed("Failed to start", "no memory for a second one")
        stage.reconciler.wake(stage.version)
        for _ in range(10):
            await asyncio.sleep(0)
        assert "close" not in stage.pool.calls
        stage.pool.run.done(BatchReport([InferResponse(b"whole")]))
        assert await running.body() == b"whole"
        assert await stage.settle() is VersionState.FAILED

    asyncio.run(main())


def test_what_still_runs_when_another_executor_does_not_load_is_unavailable_before_its_worker_ends() -> None:
    async def main() -> None:
        stage = Stage()
        stage.reconciler = Reconciler(drain_timeout_s=0.01, on_gone=stage._gone)
        stage.pool.in_service = stage.pool.free = 1
        running = AwaitedRequest("a", 0.0)
        stage.version.batcher.submit(running)
        await asyncio.sleep(0)
        waiting = AwaitedRequest("b", 0.0)
        stage.version.batcher.submit(waiting)
        stage.pool.failure = LoadFailed("Failed to start", "no memory for a second one")
        assert await stage.settle() is VersionState.FAILED
        assert type(waiting.future.exception()) is Unavailable  # it has not run
        error = running.future.exception()
        assert isinstance(error, CutOff)
        assert "was unloaded before the request was answered" in error.message

    asyncio.run(main())


def test_who_waited_when_one_executor_got_ready_and_the_next_did_not_is_answered_by_the_first() -> None:
    async def main() -> None:
        stage = Stage(executors=2)
        waiting = AwaitedRequest("a", 0.0)
        stage.version.batcher.submit(waiting)

        async def warm_up_half() -> None:
            stage.pool.in_service = stage.pool.free = 1
            raise LoadFailed("Failed to start", "no memory for a second one")

        stage.pool.warm_up = warm_up_half  # type: ignore[method-assign]
        stage.reconciler.wake(stage.version)
        while not hasattr(stage.pool, "run"):
            await asyncio.sleep(0)
        stage.pool.run.done(BatchReport([InferResponse(b"whole")]))
        assert await waiting.body() == b"whole"
        assert await stage.settle() is VersionState.FAILED

    asyncio.run(asyncio.wait_for(main(), 5))


def test_a_load_that_fails_in_a_way_nobody_foresaw_is_a_failed_load_and_not_a_load_for_ever() -> None:
    async def main() -> None:
        stage = Stage()
        stage.pool.failure = OSError(24, "Too many open files")
        assert await stage.settle() is VersionState.FAILED
        assert "Too many open files" in stage.version.failure_text

    asyncio.run(main())


def test_a_failed_version_is_tried_again_only_when_asked() -> None:
    async def main() -> None:
        stage = Stage()
        stage.pool.failure = LoadFailed("Failed to start", "no weights")
        await stage.settle()
        stage.pool.failure = None
        assert await stage.settle() is VersionState.FAILED
        stage.version.retry = True
        assert await stage.settle() is VersionState.READY
        assert stage.version.failure_text == ""

    asyncio.run(main())


def test_scaling_to_nothing_unloads_and_scaling_up_loads_again() -> None:
    async def main() -> None:
        stage = Stage()
        await stage.settle()
        stage.version.target = 0
        assert await stage.settle() is VersionState.NEW
        assert stage.pool.calls[-1] == "close"
        stage.version.target = 3
        assert await stage.settle() is VersionState.READY
        assert stage.pool.size == 3

    asyncio.run(main())


def test_a_resize_that_fails_is_not_tried_in_a_loop() -> None:
    async def main() -> None:
        stage = Stage()
        await stage.settle()
        stage.pool.failure = LoadFailed("Failed to start", "out of memory")
        stage.version.target = 5
        assert await stage.settle() is VersionState.READY
        assert (stage.version.target, stage.version.failure_text) == (1, "out of memory")
        assert stage.pool.calls.count("resize 5") == 1

    asyncio.run(main())


def test_a_version_whose_executors_gave_up_and_do_not_load_again_has_failed_until_it_is_scaled() -> None:
    async def main() -> None:
        stage = Stage()
        await stage.settle()
        stage.version.retry = True
        stage.pool.failure = LoadFailed("Failed to start", "no memory")
        await stage.begin_to_resize(1)
        stage.pool.size = stage.pool.in_service = stage.pool.free = 0  # those that gave up are dropped
        waiting = AwaitedRequest("a", 0.0)
        stage.version.batcher.submit(waiting)
        stage.pool.gate.set()
        assert await stage.settle() is VersionState.FAILED
        assert (stage.version.target, stage.version.failure_text) == (1, "no memory")
        assert isinstance(waiting.future.exception(), Unavailable)
        stage.pool.failure = None
        stage.version.retry = True
        assert await stage.settle() is VersionState.READY
        assert (stage.pool.in_service, stage.version.failure) == (1, None)

    asyncio.run(main())


@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_wish_for_the_executors_that_are_there_forgets_the_resize_that_failed(meanwhile: bool) -> None:
    async def main() -> None:
        stage = Stage()
        await stage.settle()
        stage.pool.failure = LoadFailed("Failed to start", "out of memory")
        await stage.begin_to_resize(5)
        if not meanwhile:
            stage.pool.gate.set()
            await stage.version.settled.wait()
            assert stage.version.failure is not None
        stage.version.target = 1
        stage.pool.gate.set()
        assert await stage.settle() is VersionState.READY
        assert (stage.version.failure, stage.version.failure_text) == (None, "")

    asyncio.run(main())


def test_what_is_wanted_while_a_resize_fails_is_not_forgotten() -> None:
    async def main() -> None:
        stage = Stage()
        await stage.settle()
        stage.pool.failure = LoadFailed("Failed to start", "out of memory")
        await stage.begin_to_resize(5)
        stage.version.target = 0
        stage.pool.gate.set()
        assert await stage.settle() is VersionState.NEW
        assert (stage.version.target, stage.pool.size) == (0, 0)

    asyncio.run(main())


def test_a_resize_that_fails_in_a_way_nobody_foresaw_is_told() -> None:
    async def main() -> None:
        stage = Stage()
        await stage.settle()
        stage.pool.failure = OSError(24, "Too many open files")
        stage.version.target = 5
        assert await stage.settle() is VersionState.READY
        assert stage.version.target == 1
        assert "Too many open files" in stage.version.failure_text

    asyncio.run(main())


def test_a_version_that_is_unregistered_while_more_executors_start_does_not_wait_for_them() -> None:
    async def main() -> None:
        stage = Stage()
        await stage.settle()
        await stage.begin_to_resize(2)
        stage.version.wanted = False
        assert await stage.settle() is VersionState.GONE
        assert stage.pool.calls[-1] == "close"

    asyncio.run(main())


@pytest.mark.parametrize("loaded", [0, 1])
@pytest.mark.parametrize("wanted_again", [0, 2])
def test_scaling_to_nothing_does_not_wait_for_executors_that_load(loaded: int, wanted_again: int) -> None:
    async def main() -> None:
        stage = Stage(executors=loaded)
        await stage.settle()
        await stage.begin_to_resize(3)
        stage.pool.free = 0  # what one may run runs
        waiting = AwaitedRequest("a", 0.0)
        if not loaded:
            stage.version.batcher.submit(waiting)
        stage.version.target = 0
        stage.reconciler.wake(stage.version)
        stage.version.target = wanted_again
        stage.reconciler.wake(stage.version)
        for _ in range(20):
            await asyncio.sleep(0)
        given_up = "close" in stage.pool.calls
        stage.pool.gate.set()
        expected = VersionState.READY if wanted_again else VersionState.NEW
        assert await stage.settle() is expected
        assert given_up
        assert (stage.pool.size, stage.version.failure) == (wanted_again, None)
        if not loaded:
            error = (await asyncio.gather(waiting.future, return_exceptions=True))[0]
            assert isinstance(error, Unavailable)

    asyncio.run(asyncio.wait_for(main(), 5))


def test_executors_that_are_taken_away_finish_although_the_version_is_unregistered_meanwhile() -> None:
    async def main() -> None:
        stage = Stage(executors=2)
        await stage.settle()
        running = AwaitedRequest("a", 0.0)
        stage.version.batcher.submit(running)
        await stage.begin_to_resize(1)
        stage.version.wanted = False
        stage.reconciler.wake(stage.version)
        for _ in range(20):
            await asyncio.sleep(0)
        assert (stage.version.state, stage.pool.calls[-1]) == (VersionState.DRAINING, "resize 1")
        stage.pool.run.done(BatchReport([InferResponse(b"whole")]))
        assert await running.body() == b"whole"
        assert await stage.settle() is VersionState.GONE

    asyncio.run(main())


@pytest.mark.parametrize("stops", [False, True])
def test_executors_that_are_taken_away_have_the_time_of_a_drain_and_none_when_the_server_stops(
    stops: bool,
) -> None:
    async def main() -> None:
        stage = Stage(executors=2)
        if not stops:
            stage.reconciler = Reconciler(drain_timeout_s=0.01, on_gone=stage._gone)
        await stage.settle()
        running = AwaitedRequest("a", 0.0)
        stage.version.batcher.submit(running)
        await stage.begin_to_resize(1)
        if stops:
            stage.reconciler.hurry()
        stage.version.wanted = False
        stage.reconciler.wake(stage.version)
        await asyncio.wait_for(stage.version.settled.wait(), 2)
        assert isinstance(running.future.exception(), CutOff)
        assert (stage.version.state, stage.pool.calls[-1]) == (VersionState.GONE, "close")

    asyncio.run(main())


def test_what_still_waits_when_a_version_is_scaled_to_nothing_is_answered() -> None:
    async def main() -> None:
        stage = Stage()
        stage.reconciler = Reconciler(drain_timeout_s=0.01, on_gone=stage._gone)
        await stage.settle()
        stage.pool.free = 0  # busy
        waiting = AwaitedRequest("a", 0.0)
        stage.version.batcher.submit(waiting)
        stage.version.target = 0
        assert await stage.settle() is VersionState.NEW
        error = (await asyncio.gather(waiting.future, return_exceptions=True))[0]
        assert isinstance(error, Unavailable)

    asyncio.run(main())


def test_what_still_runs_when_the_drain_is_over_is_answered_as_unavailable_before_its_worker_ends() -> None:
    async def main() -> None:
        stage = Stage()
        stage.reconciler = Reconciler(drain_timeout_s=0.01, on_gone=stage._gone)
        await stage.settle()
        running = AwaitedRequest("a", 0.0)
        stage.version.batcher.submit(running)
        assert stage.pool.run.requests == [running]
        stage.version.wanted = False
        assert await stage.settle() is VersionState.GONE
        error = running.future.exception()
        assert isinstance(error, Unavailable)
        assert "was unloaded before the request was answered" in error.message

    asyncio.run(main())


def test_an_unwanted_version_drains_unloads_and_is_gone() -> None:
    async def main() -> None:
        stage = Stage()
        await stage.settle()
        stage.version.wanted = False
        assert await stage.settle() is VersionState.GONE
        assert (stage.gone, stage.pool.calls[-1]) == ([ModelKey("m", "1")], "close")

    asyncio.run(main())


def test_a_version_that_is_unregistered_while_it_loads_is_gone_at_once_and_that_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        stage = Stage()
        stage.pool.gate.clear()
        stage.reconciler.wake(stage.version)
        while "resize 1" not in stage.pool.calls:
            await asyncio.sleep(0)
        stage.version.wanted = False
        assert await stage.settle() is VersionState.GONE

    with caplog.at_level("INFO"):
        asyncio.run(main())
    said = [(each.levelname, each.getMessage()) for each in caplog.records]
    assert ("INFO", "Model m was unregistered: It was loading.") in said
    assert "ERROR" not in dict(said)
