"""Worker processes: real ones, killed and crashed as users' handlers do it."""

import asyncio
import itertools
import logging
import os
import signal
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pools import pool_in_service, until

from torchere.serving.errors import (
    DeadlineExceeded,
    ExecutorDied,
    HandlerFailed,
    LoadFailed,
    NoRoom,
)
from torchere.serving.types import InferRequest, Parameter
from torchere.serving.workers import executor, launch, messages, worker, worker_process
from torchere.serving.workers.devices import CoreShares
from torchere.serving.workers.executor import ExecutorState, LoadSpec
from torchere.serving.workers.heartbeat import HeartbeatSettings
from torchere.serving.workers.oom import OomWatch
from torchere.serving.workers.pool import WorkerPool


async def until_free(pool: Any) -> None:
    """Wait for a restart to be over."""

    async def restarted() -> None:
        while not pool.free:
            pool.freed.clear()
            await pool.freed.wait()

    await asyncio.wait_for(restarted(), 60)


def test_a_worker_answers_and_keeps_its_process(make_spec: Any, make_sink: Any, make_request: Any) -> None:
    async def main() -> None:
        async with pool_in_service(make_spec()) as pool:
            pids = set()
            for _ in range(2):
                sink = make_sink()
                sink.submit(pool, [make_request("pid")])
                assert pool.idle_ids() == ()
                pids.add((await sink.outcome()).body)
            assert pids == {str(pool.statuses()[0].pid).encode()}
            assert pids != {str(os.getpid()).encode()}

    asyncio.run(main())


def test_a_raising_handler_fails_its_request_and_lives_on(
    make_spec: Any, make_sink: Any, make_request: Any
) -> None:
    async def main() -> None:
        async with pool_in_service(make_spec()) as pool:
            bad, good = make_sink(), make_sink()
            bad.submit(pool, [make_request("raise")])
            outcome = await bad.outcome()
            assert isinstance(outcome, HandlerFailed)
            assert (outcome.message, outcome.detail) == ("Prediction failed", "ValueError: boom")
            good.submit(pool, [make_request("hi")])
            assert (await good.outcome()).body == b"hi!"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("word", "cause"), [("exit", "exited with code 7"), ("kill", "killed by signal 9 (SIGKILL)")]
)
def test_a_lost_worker_says_why_and_comes_back(
    make_spec: Any, make_sink: Any, make_request: Any, word: str, cause: str
) -> None:
    async def main() -> None:
        async with pool_in_service(make_spec()) as pool:
            lost, after = make_sink(), make_sink()
            lost.submit(pool, [make_request(word)])
            outcome = await lost.outcome()
            assert isinstance(outcome, ExecutorDied)
            assert (outcome.message, outcome.detail) == ("Worker died.", cause)
            await until_free(pool)
            assert pool.statuses()[0].last_failure == cause
            after.submit(pool, [make_request("hi")])
            assert (await after.outcome()).body == b"hi!"

    asyncio.run(main())


FORKING = """
    import multiprocessing, os, signal, time
    class Handler:
        def initialize(self, context): pass
        def handle(self, data, context):
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
            child.start()
            open("child", "w").write(str(child.pid))
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_how_long_a_worker_took_to_load_does_not_depend_on_the_wall_clock(
    make_spec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = itertools.count()
    put_back = SimpleNamespace(now=lambda zone: datetime.now(zone) - timedelta(hours=next(hours)))
    for module in (executor, worker):
        monkeypatch.setattr(module, "datetime", put_back)
    took_s: list[float] = []

    async def main() -> None:
        began_s = time.monotonic()
        async with pool_in_service(make_spec(), on_loaded=lambda _, load_s: took_s.append(load_s)) as pool:
            os.kill(pool.statuses()[0].pid, signal.SIGKILL)
            while len(took_s) < 2:
                await asyncio.sleep(0.01)
            assert min(took_s) > 0
            assert sum(took_s) <= time.monotonic() - began_s  # each from its own start

    asyncio.run(asyncio.wait_for(main(), 60))


TELLS_BESIDE = """
    import threading
    class Handler:
        def initialize(self, context):
            context.metrics.add_counter("Loaded", 1)
            threading.Timer(0.1, context.metrics.add_counter, ("Beside", 2)).start()
        def handle(self, data, context):
            return data
"""


@pytest.mark.parametrize("shares_weights", [True, False], ids=["lanes", "alone"])
def test_metrics_that_a_handler_reports_while_no_request_comes_are_recorded(
    make_spec: Any, shares_weights: bool
) -> None:
    found: list[tuple[str, float]] = []

    async def main() -> None:
        spec = make_spec(TELLS_BESIDE, shares_weights=shares_weights)
        async with pool_in_service(
            spec,
            heartbeat=HeartbeatSettings(ask_every_s=0.1, suspect_after_s=20, dead_after_s=30),
            on_metrics=lambda samples: found.extend((sample.name, sample.value) for sample in samples),
        ):
            while len(found) < 2:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 60))
    assert found == [("Loaded", 1.0), ("Beside", 2.0)]


def test_a_worker_is_lost_at_once_also_when_a_process_that_it_forked_lives_on(
    make_spec: Any, make_sink: Any, make_request: Any, tmp_path: Path
) -> None:
    async def main() -> None:
        async with pool_in_service(make_spec(FORKING), response_timeout_s=10.0) as pool:
            sink = make_sink()
            sink.submit(pool, [make_request("a")])
            assert isinstance(await sink.outcome(), ExecutorDied)

    try:
        asyncio.run(main())
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


def test_the_neighbour_of_a_lost_worker_does_not_notice(
    make_spec: Any, make_sink: Any, make_request: Any
) -> None:
    async def main() -> None:
        async with pool_in_service(make_spec(), count=2) as pool:
            lost, neighbour = make_sink(), make_sink()
            lost.submit(pool, [make_request("exit")])
            neighbour.submit(pool, [make_request("hi")])
            assert (await neighbour.outcome()).body == b"hi!"
            assert isinstance(await lost.outcome(), ExecutorDied)
            assert pool.in_service == 1

    asyncio.run(main())


@pytest.mark.parametrize("error", [DeadlineExceeded, ExecutorDied])
def test_a_hung_worker_is_replaced_after_its_response_timeout(
    make_spec: Any,
    make_sink: Any,
    make_request: Any,
    caplog: pytest.LogCaptureFixture,
    error: type[Exception],
) -> None:
    caplog.set_level(logging.INFO)

    async def main() -> None:
        settings: dict[str, Any] = {"response_timeout_s": 0.3, "hangs_as_deaths": error is ExecutorDied}
        async with pool_in_service(make_spec(), **settings) as pool:
            hung, after = make_sink(), make_sink()
            pid = pool.statuses()[0].pid
            hung.submit(pool, [make_request("wait")])
            assert isinstance(await hung.outcome(), error)
            assert pool.free == 0
            await until_free(pool)
            assert pool.statuses()[0].pid != pid
            after.submit(pool, [make_request("hi")])
            assert (await after.outcome()).body == b"hi!"

    asyncio.run(main())
    for words in (  # of TorchServe's log, which scripts wait for
        *("Backend worker did not respond in given time", "Worker disconnected", "Retry worker: "),
        *("Auto recovery start timestamp: ", "Auto recovery succeeded, reset recoveryStartTS"),
    ):
        assert words in caplog.text


@pytest.mark.parametrize("way", ["waits", "blocks"])
def test_a_coroutine_that_hangs_costs_its_process_only_if_it_does_not_end_when_cancelled(
    make_spec: Any, make_sink: Any, make_request: Any, way: str
) -> None:
    source = """
        import asyncio, time
        from torchere.handlers import send_intermediate_predict_response
        class Handler:
            def initialize(self, context): pass
            async def handle(self, data, context):
                body = bytes(data[0]["body"])
                if body == b"waits": await asyncio.Event().wait()
                if body == b"blocks": time.sleep(60)
                for _ in range(60 if body == b"stream" else 0):
                    send_intermediate_predict_response(["part"], context.request_ids, "", 200, context)
                    await asyncio.sleep(0.05)
                return ["end"]
    """

    async def main() -> None:
        async with pool_in_service(make_spec(source, at_once=8), response_timeout_s=1.0) as pool:
            stream, hung = make_sink(), make_sink()
            pid = pool.statuses()[0].pid
            stream.submit(pool, [make_request("stream")])
            hung.submit(pool, [make_request(way)])
            assert isinstance(await hung.outcome(), DeadlineExceeded)
            if way == "waits":
                assert (await stream.outcome()).body == b"end"
                assert pool.free == 8
            else:
                assert isinstance(await stream.outcome(), (DeadlineExceeded, ExecutorDied))
                while not is_replaced(pool, pid):
                    await asyncio.sleep(0.02)
            assert pool.statuses()[0].losses == (0 if way == "waits" else 1)

    asyncio.run(main())


def test_a_worker_that_is_to_end_lets_the_process_it_has_replaced_finish_its_runs(
    make_spec: Any, make_sink: Any, make_request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
        import asyncio, os, time
        from torchere.handlers import send_intermediate_predict_response
        class Handler:
            def initialize(self, context):
                while os.path.exists("serving") and not os.path.exists("go"): time.sleep(0.05)
            async def handle(self, data, context):
                while not os.path.exists("go"):
                    await asyncio.sleep(0.05 if bytes(data[0]["body"]) == b"stream" else 3600)
                    send_intermediate_predict_response(["part"], context.request_ids, "", 200, context)
                return ["end"]
    """
    monkeypatch.setattr(worker, "CANCEL_GRACE_S", 0.1)

    async def main() -> None:
        spec = make_spec(source, at_once=8)
        async with pool_in_service(spec, count=2) as pool:
            Path(spec.archive_dir, "serving").touch()  # a process that loads from now on waits for "go"
            first, (stream, hung) = pool._workers[0], (make_sink(), make_sink())
            for sink, word in ((stream, "stream"), (hung, "hang")):
                sink.submit(pool, [make_request(word)], executor_id=first.first_id)
            await until(lambda: stream.parts)
            first._hung(first._process, hung.run)
            await until(lambda: first._ending and not first.in_service)
            scaling = asyncio.ensure_future(pool.resize(1))
            await until(lambda: pool.size == 1)
            Path(spec.archive_dir, "go").touch()
            assert (await stream.outcome()).body == b"end"
            await scaling
            assert first not in pool._workers

    asyncio.run(main())


def test_coroutines_that_hang_are_answered_after_their_own_response_timeout(
    make_spec: Any, make_sink: Any, make_request: Any
) -> None:
    source = """
        import asyncio
        class Handler:
            def initialize(self, context): pass
            async def handle(self, data, context): await asyncio.Event().wait()
    """

    async def main() -> None:
        async with pool_in_service(make_spec(source, at_once=8), response_timeout_s=1.0) as pool:
            hung = [make_sink() for _ in range(6)]
            for sink in hung:
                sink.submit(pool, [make_request("waits")])
            for outcome in await asyncio.wait_for(asyncio.gather(*(one.outcome() for one in hung)), 4):
                assert isinstance(outcome, DeadlineExceeded)
            await until_free(pool)
            assert pool.statuses()[0].losses == 0

    asyncio.run(main())


@pytest.mark.parametrize("at_once", [1, 8])
def test_a_part_that_is_too_long_fails_its_request_and_its_worker_lives_on(
    make_spec: Any, make_sink: Any, make_request: Any, at_once: int
) -> None:
    source = """
        class Handler:
            def initialize(self, context): pass
            def handle(self, data, context):
                context.send_partial(0, bytes(int(data[0]["body"])))
                return ["end"]
    """

    async def main() -> None:
        async with pool_in_service(make_spec(source, at_once=at_once)) as pool:
            failed, answered = make_sink(), make_sink()
            failed.submit(pool, [make_request("18000000")])
            outcome = await failed.outcome()
            assert isinstance(outcome, HandlerFailed)
            assert "a part of the answer has 18000000 bytes, expected at most 17" in outcome.detail
            assert "max_response_size=6553500" in outcome.detail
            most = int(outcome.detail.partition("at most ")[2].partition(";")[0])
            answered.submit(pool, [make_request(str(most))])
            assert (await answered.outcome()).body == b"end"
            assert [len(part.body) for _, part in answered.parts] == [most]
            assert pool.statuses()[0].losses == 0

    asyncio.run(main())


def test_a_worker_that_gives_up_is_failed_and_says_so(
    make_spec: Any, make_sink: Any, make_request: Any
) -> None:
    async def main() -> None:
        async with pool_in_service(make_spec(), max_retry_timeout_s=-1.0) as pool:
            lost = make_sink()
            pool.freed.clear()
            lost.submit(pool, [make_request("exit")])
            assert isinstance(await lost.outcome(), ExecutorDied)
            await asyncio.wait_for(pool.freed.wait(), 30)
            assert pool.statuses()[0].state is ExecutorState.FAILED
            assert pool.free == 0

    asyncio.run(main())


def test_a_worker_that_served_since_its_last_loss_begins_to_count_anew(
    make_spec: Any, make_sink: Any, make_request: Any
) -> None:
    now_s = [0.0]

    async def main() -> None:
        async with pool_in_service(make_spec(), now=lambda: now_s[0]) as pool:
            for _ in range(2):
                lost, after = make_sink(), make_sink()
                lost.submit(pool, [make_request("exit")])
                assert isinstance(await lost.outcome(), ExecutorDied)
                await until_free(pool)
                after.submit(pool, [make_request("hi")])
                assert (await after.outcome()).body == b"hi!"
                now_s[0] += 3600.0  # far more than `max_retry_timeout_s`

    asyncio.run(main())


def is_replaced(pool: WorkerPool, pid: int) -> bool:
    return pool.in_service > 0 and pool.statuses()[0].pid != pid


def test_an_idle_worker_in_good_health_comes_back_however_often_it_is_lost(make_spec: Any) -> None:
    now_s = [0.0]

    async def main() -> None:
        async with pool_in_service(make_spec(), now=lambda: now_s[0]) as pool:
            for _ in range(2):
                pid = pool.statuses()[0].pid
                os.kill(pid, signal.SIGSEGV)
                await until(partial(is_replaced, pool, pid))
                now_s[0] += 3600.0  # far more than `max_retry_timeout_s`, without a single request

    asyncio.run(main())


def test_a_worker_that_is_interrupted_ends_by_the_signal(make_spec: Any) -> None:
    # It would inherit it from a shell that runs the tests in the background, where SIGINT is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    async def main() -> None:
        async with pool_in_service(make_spec()) as pool:
            os.kill(pool.statuses()[0].pid, signal.SIGINT)
            await until(lambda: pool.statuses()[0].losses and pool.in_service)
            assert pool.statuses()[0].last_failure == "killed by signal 2 (SIGINT)"

    try:
        asyncio.run(main())
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_outage_lasts_from_the_loss_of_the_last_worker_until_one_is_back(make_spec: Any) -> None:
    now_s = [100.0]

    async def main() -> None:
        async with pool_in_service(make_spec(), count=2, now=lambda: now_s[0]) as pool:
            os.kill(pool.statuses()[0].pid, signal.SIGKILL)
            await until(lambda: pool.in_service == 1)
            assert pool.outage() is None
            await until(lambda: pool.in_service == 2)
            now_s[0] = 101.0
            for status in pool.statuses():
                os.kill(status.pid, signal.SIGKILL)
            await until(lambda: pool.in_service == 0)
            outage = pool.outage()
            assert outage is not None and outage.since_s == 101.0
            await until(lambda: pool.in_service == 2)
            assert pool.outage() is None

    asyncio.run(main())


def test_nothing_is_sent_ahead_where_all_that_waits_is_counted(
    make_spec: Any, make_sink: Any, make_request: Any
) -> None:
    async def main() -> None:
        async with pool_in_service(make_spec(), sends_ahead=False) as pool:
            for _ in range(50):
                quick = make_sink()
                quick.submit(pool, [make_request("hi")])
                assert pool.free == 0
                await quick.outcome()

    asyncio.run(main())


COUNTS_ITS_THREADS = """
    import threading
    class Handler:
        def initialize(self, context):
            assert threading.current_thread() is threading.main_thread()
        def handle(self, data, context):
            assert threading.current_thread() is threading.main_thread()
            score = int(open("/proc/self/oom_score_adj").read())
            return [f"{threading.active_count()} {score}"] * len(data)
"""


def test_the_one_lane_of_a_worker_is_its_main_and_only_thread_and_it_is_killed_before_the_server(
    make_spec: Any, make_sink: Any, make_request: Any
) -> None:
    async def main() -> None:
        async with pool_in_service(make_spec(COUNTS_ITS_THREADS)) as pool:
            sink = make_sink()
            sink.submit(pool, [make_request("x")])
            threads, score = (await sink.outcome()).body.split()
            assert threads == b"1"
            assert int(score) > int(Path("/proc/self/oom_score_adj").read_text())

    asyncio.run(main())


def test_batches_sent_ahead_to_a_lost_worker_are_given_back(
    make_spec: Any, make_sink: Any, make_request: Any
) -> None:
    async def main() -> None:
        async with pool_in_service(make_spec()) as pool:
            while pool.ahead < 2:  # a quick worker earns the right to have batches sent ahead
                quick = make_sink()
                quick.submit(pool, [make_request("hi")])
                await quick.outcome()
            lost, ahead = make_sink(), make_sink()
            lost.submit(pool, [make_request("kill")])
            ahead.submit(pool, [make_request("hi")])
            assert isinstance(await lost.outcome(), ExecutorDied)
            assert await asyncio.wait_for(ahead.given_back, 30)
            assert not ahead.report.done()

    asyncio.run(main())


def test_the_first_worker_that_is_warm_is_told_of(check_first_warm: Any) -> None:
    asyncio.run(check_first_warm())


LEAVES_A_CHILD = """
    import subprocess
    class Handler:
        def initialize(self, context):
            # It keeps the pipe of the worker's output open, and is not ended with the worker's group.
            subprocess.Popen(["sleep", "6"], start_new_session=True)
        def handle(self, data, context):
            return ["ok"] * len(data)
"""


def test_a_dead_worker_is_out_of_service_before_it_is_known_how_it_ended(
    make_spec: Any, make_sink: Any, make_request: Any
) -> None:
    async def main() -> None:
        async with pool_in_service(make_spec(LEAVES_A_CHILD)) as pool:
            os.kill(pool.statuses()[0].pid, signal.SIGKILL)
            while pool.in_service:
                await asyncio.sleep(0.01)
            assert pool.statuses()[0].losses == 0  # its child is waited for
            assert (pool.free, pool.idle_ids()) == (0, ())
            await until_free(pool)
            sink = make_sink()
            sink.submit(pool, [make_request("x")])
            assert (await sink.outcome()).body == b"ok"

    asyncio.run(main())


@pytest.mark.parametrize("error", [ValueError("over 2 GiB"), MemoryError()])
def test_a_batch_that_cannot_be_sent_is_refused_and_nothing_else_changes(
    make_spec: Any, make_sink: Any, make_request: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*message: object) -> bytes:
        raise error

    async def main() -> None:
        async with pool_in_service(make_spec()) as pool:
            before = pool.free
            large, sink = make_sink(), make_sink()
            with monkeypatch.context() as patch:
                patch.setattr(messages, "encode_run", refuse)
                large.submit(pool, [make_request("large")])
            assert not large.report.done()  # whoever submits is told later: he is not done yet
            assert isinstance(await large.outcome(), NoRoom)
            assert pool.free == before
            sink.submit(pool, [make_request("hi")])
            assert (await sink.outcome()).body == b"hi!"

    asyncio.run(main())


def test_a_worker_that_cannot_be_talked_to_is_a_failed_load(
    make_spec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(make_protocol: object, pipe: Any) -> None:
        pipe.close()
        raise OSError(24, "Too many open files")

    async def main() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "connect_read_pipe", refuse)
        with pytest.raises(LoadFailed) as failure:
            async with pool_in_service(make_spec()):
                pass
        assert "could not be started" in failure.value.detail

    asyncio.run(main())


def test_a_worker_whose_start_is_given_up_holds_up_no_end(
    make_spec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        connecting = asyncio.Event()

        async def hang(make_protocol: object, pipe: Any) -> None:
            connecting.set()
            with pipe:
                await asyncio.Event().wait()

        monkeypatch.setattr(asyncio.get_running_loop(), "connect_read_pipe", hang)
        async with pool_in_service(make_spec(), count=0) as pool:
            starting = asyncio.ensure_future(pool.resize(1))
            await connecting.wait()
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await asyncio.wait_for(pool.close(), 30)

    asyncio.run(main())


def test_a_request_that_expires_behind_another_is_never_run(
    make_spec: Any, make_sink: Any, make_request: Any
) -> None:
    async def main() -> None:
        async with pool_in_service(make_spec()) as pool:
            late = make_sink()
            expired = InferRequest("late", make_request("exit").parameters, (), time.monotonic() - 1)
            late.submit(pool, [expired])
            assert isinstance(await late.outcome(), DeadlineExceeded)
            assert pool.in_service == 1

    asyncio.run(main())


def test_scaling_down_lets_the_batch_inside_finish(
    make_spec: Callable[..., LoadSpec], make_sink: Any, make_request: Any
) -> None:
    async def main() -> None:
        spec = make_spec()
        async with pool_in_service(spec) as pool:
            waiting = make_sink()
            waiting.submit(pool, [make_request("wait")])
            shrinking = asyncio.ensure_future(pool.resize(0))
            await asyncio.sleep(0)
            assert not waiting.report.done()
            with open(f"{spec.archive_dir}/go", "w"):
                pass
            assert (await waiting.outcome()).body == b"wait!"
            await shrinking
            assert pool.statuses() == ()

    asyncio.run(main())


def test_a_worker_that_finishes_its_batch_while_the_pool_shrinks_ends_with_the_pool(
    make_spec: Callable[..., LoadSpec], make_sink: Any, make_request: Any
) -> None:
    async def main() -> None:
        spec = make_spec()
        async with pool_in_service(spec) as pool:
            waiting, pid = make_sink(), pool.statuses()[0].pid
            waiting.submit(pool, [make_request("wait")])
            shrinking = asyncio.ensure_future(pool.resize(0))
            await asyncio.sleep(0)
            shrinking.cancel()
            await asyncio.wait({shrinking})
            assert not waiting.report.done()
            await asyncio.wait_for(pool.close(), 30)
            assert isinstance(await waiting.outcome(), ExecutorDied)
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    asyncio.run(main())


def test_a_worker_that_crashes_after_a_cancelled_shrinking_answers_its_batch_and_is_forgotten(
    make_spec: Callable[..., LoadSpec], make_sink: Any, make_request: Any
) -> None:
    async def main() -> None:
        async with pool_in_service(make_spec()) as pool:
            waiting, pid = make_sink(), pool.statuses()[0].pid
            waiting.submit(pool, [make_request("wait")])
            await asyncio.sleep(0.2)  # it has begun
            shrinking = asyncio.ensure_future(pool.resize(0))
            await asyncio.sleep(0)
            shrinking.cancel()
            os.kill(pid, signal.SIGKILL)
            assert isinstance(await waiting.outcome(), ExecutorDied)
            await until(lambda: not pool._leaving)

    asyncio.run(main())


def test_what_a_handler_prints_is_logged_with_its_model(
    make_spec: Any, make_sink: Any, make_request: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with pool_in_service(make_spec()) as pool:
            sink = make_sink()
            sink.submit(pool, [make_request("print")])
            await sink.outcome()

    with caplog.at_level(logging.INFO, "torchere.worker"):
        asyncio.run(main())
    record = next(r for r in caplog.records if r.getMessage() == "said by the handler")
    assert (record.model, record.version, record.executor) == ("demo", "1.0", 9000)  # type: ignore[attr-defined]


UNDECODED = """
import os

os.environ["TS_DECODE_INPUT_REQUEST"] = "false"

def handle(data, context):
    return None if data is None else [type(data[0]["body"]).__name__]
"""


@pytest.mark.parametrize("shares_weights", [False, True])
def test_a_handler_gets_bytes_if_it_says_so_in_its_environment(
    make_spec: Any, make_sink: Any, shares_weights: bool
) -> None:
    async def main() -> None:
        async with pool_in_service(make_spec(UNDECODED, shares_weights=shares_weights)) as pool:
            sink = make_sink()
            sink.submit(pool, [InferRequest("r", (Parameter("body", b'{"a": 1}', "application/json"),))])
            assert (await sink.outcome()).body == b"bytearray"

    asyncio.run(main())


LOUD = """
import logging, sys

def handle(data, context):
    if data is None:
        return None
    logging.getLogger("loud").warning("logged")
    print(bytes(data[0]["body"]).decode(), flush=True)
    print("x" * 1_000_000, flush=True)  # more than a pipe holds: somebody has to read
    return ["ok"]
"""


@pytest.mark.parametrize(
    "fault", [b'\x1e{"level": 1e999, "logger": "x", "message": "", "exception": "", "extra": {}}', b"fault"]
)
def test_no_line_of_a_handler_ends_the_reading_of_its_output(
    make_spec: Any, make_sink: Any, caplog: pytest.LogCaptureFixture, fault: bytes
) -> None:
    class Faulty(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            if record.getMessage() == "fault":
                raise OverflowError("cannot convert float infinity to integer")
            return True

    async def main() -> None:
        async with pool_in_service(make_spec(LOUD), response_timeout_s=20.0) as pool:
            for _ in range(2):
                sink = make_sink()
                sink.submit(pool, [InferRequest("r", (Parameter("body", fault),))])
                assert (await sink.outcome()).body == b"ok"

    faulty = Faulty()
    worker_process.logger.addFilter(faulty)
    try:
        with caplog.at_level(logging.INFO):
            asyncio.run(main())
    finally:
        worker_process.logger.removeFilter(faulty)
    assert [record.name for record in caplog.records if record.getMessage() == "logged"] == ["loud"] * 2


@pytest.mark.parametrize(
    ("source", "limit_s", "cause"),
    [
        ("raise RuntimeError('no weights')", 60.0, "no weights"),
        ("import os; os._exit(3)", 60.0, "exited with code 3"),
        ("import time\nwhile True: time.sleep(0.1)", 0.5, "startup_timeout"),
    ],
    ids=["raises", "exits", "hangs"],
)
def test_a_handler_that_does_not_load_is_refused_with_its_cause(
    make_spec: Any, source: str, limit_s: float, cause: str
) -> None:
    async def main() -> None:
        with pytest.raises(
            LoadFailed, match=r"Failed to start workers for model demo version: 1\.0"
        ) as caught:
            async with pool_in_service(make_spec(source), startup_timeout_s=limit_s):
                pass
        assert cause in caught.value.detail

    asyncio.run(main())


def test_a_worker_whose_archive_was_cleaned_away_says_so(
    make_spec: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async def main() -> None:
        async with pool_in_service(make_spec()) as pool:
            tmp_path.rename(tmp_path_factory.mktemp("cleaned") / "away")
            os.kill(pool.statuses()[0].pid, signal.SIGKILL)
            await until(lambda: pool.statuses()[0].losses == 2)
            assert "the unpacked archive can't be used" in pool.statuses()[0].last_failure
            assert str(tmp_path) in pool.statuses()[0].last_failure

    asyncio.run(main())


READS_WEIGHTS = """
class Handler:
    def initialize(self, context):
        self.weights = open("w.pt").read()

    def handle(self, data, context):
        return [self.weights] * len(data)
"""


def test_a_worker_that_is_stopped_while_idle_loses_no_request_and_is_replaced(
    make_spec: Any, make_sink: Any, make_request: Any
) -> None:
    async def main() -> None:
        async with pool_in_service(make_spec(), heartbeat=HeartbeatSettings(0.1, 0.2, 0.5)) as pool:
            pid = pool.statuses()[0].pid
            os.kill(pid, signal.SIGSTOP)
            while pool.statuses()[0].state is ExecutorState.READY:
                await asyncio.sleep(0)
            assert (pool.free, pool.in_service) == (0, 0)  # before any client had to find out
            await until_free(pool)
            status = pool.statuses()[0]
            assert status.pid != pid
            assert status.losses == 1
            assert "no sign of life" in status.last_failure

    asyncio.run(main())


def test_a_worker_that_cannot_be_killed_does_not_hold_up_the_stop(
    make_spec: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one in a driver that hangs: no signal reaches it."""
    monkeypatch.setattr(worker_process, "ENDING_GRACE_S", 0.05)
    monkeypatch.setattr(worker_process, "KILLED_GRACE_S", 0.05)

    async def main() -> None:
        async with pool_in_service(make_spec()) as pool:
            worker = pool._workers[0]._process
            os.kill(worker.pid, signal.SIGSTOP)
            with monkeypatch.context() as patch:
                patch.setattr(launch.Launched, "kill", lambda *_: None)
                await asyncio.wait_for(pool.close(), 30)
            os.kill(worker.pid, signal.SIGKILL)
            await until(lambda: worker._reaper is not None)
            await asyncio.wait_for(worker._reaper, 30)  # or its pipe would be open when the loop is not

    asyncio.run(main())
    assert "does not end by SIGKILL" in caplog.text


def test_a_batch_sent_to_a_worker_that_had_stopped_before_is_given_back(
    make_spec: Any, make_sink: Any, make_request: Any
) -> None:
    async def main() -> None:
        async with pool_in_service(make_spec(), heartbeat=HeartbeatSettings(0.1, 100.0, 0.5)) as pool:
            os.kill(pool.statuses()[0].pid, signal.SIGSTOP)
            await until(lambda: pool._workers[0]._heartbeat._unanswered_ticks is not None)
            inside = make_sink()
            inside.submit(pool, [make_request("hi")])
            assert await asyncio.wait_for(inside.given_back, 30)
            assert not inside.report.done()

    asyncio.run(main())


def test_a_kill_of_the_kernel_for_memory_is_told_from_others(
    make_spec: Any, make_sink: Any, make_request: Any
) -> None:
    async def main() -> None:
        kills = [0]
        async with pool_in_service(make_spec(), oom=OomWatch(lambda: kills[0])) as pool:
            lost = make_sink()
            kills[0] = 1
            lost.submit(pool, [make_request("kill")])
            outcome = await lost.outcome()
            assert outcome.out_of_memory
            assert not outcome.crashed  # a neighbour may have taken the memory
            assert "out-of-memory killer" in outcome.detail
            await until_free(pool)

    asyncio.run(main())


def test_a_worker_that_crashes_between_load_and_warm_up_fails_at_once_and_leaves_nothing(
    make_spec: Any,
) -> None:
    async def main() -> None:
        async with pool_in_service(make_spec(), count=1) as pool:
            await pool.resize(2)
            pids = [status.pid for status in pool.statuses()]
            os.kill(pids[1], signal.SIGSEGV)
            await asyncio.shield(pool._workers[1]._process.lost)
            with pytest.raises(LoadFailed) as caught:
                await asyncio.wait_for(pool.warm_up(), 30)
            assert "SIGSEGV" in caught.value.detail
            assert [status.pid for status in pool.statuses()] == pids[:1]

    asyncio.run(main())


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("shares", [True, False], ids=["lanes", "alone"])
def test_an_executor_that_serves_keeps_its_run_when_the_warm_up_of_the_others_is_given_up(
    one_is_warm: Any, make_sink: Any, make_request: Any, shares: bool, killed: bool
) -> None:
    async def main() -> None:
        spec = one_is_warm(shares_weights=shares)
        async with pool_in_service(spec, count=0) as pool:
            await pool.resize(2)
            pool.freed.clear()
            warming = asyncio.ensure_future(pool.warm_up())
            await asyncio.wait_for(pool.freed.wait(), 60)
            sink = make_sink()
            sink.submit(pool, [make_request("wait")])
            await asyncio.sleep(0.2)  # it has begun
            warming.cancel()
            await asyncio.wait({warming}, timeout=30)
            assert not sink.report.done()
            if killed:
                os.kill(next(each.pid for each in pool.statuses() if each.state is ExecutorState.READY), 9)
                assert isinstance(await sink.outcome(), ExecutorDied)
            Path(spec.archive_dir, "go").touch()
            if not killed:
                assert (await sink.outcome()).body == b"warm"

    asyncio.run(main())


def test_a_worker_that_is_closed_while_its_next_process_warms_up_asks_it_for_no_sign_of_life(
    one_is_warm: Any,
) -> None:
    async def main() -> None:
        spec = one_is_warm(shares_weights=True)
        first, go = Path(spec.archive_dir, "first"), Path(spec.archive_dir, "go")
        go.touch()
        async with pool_in_service(spec, count=2) as pool:
            (closed,) = pool._workers
            first.unlink()
            go.unlink()
            os.kill(closed._process.pid, signal.SIGKILL)
            await until(lambda: closed._restarting and closed.in_service == 1)
            await pool.close()
            assert closed._heartbeat._timer is None

    asyncio.run(main())


KILLED_AT_FIRST = """
    import os, signal
    class Handler:
        def initialize(self, context):
            self.folder = context.system_properties["model_dir"]
            self.killed("load", {loads})
        def killed(self, step, times):
            for number in range(times):
                mark = os.path.join(self.folder, f"{{step}}{{number}}")
                if not os.path.exists(mark):
                    open(mark, "w").close()
                    os.kill(os.getpid(), signal.SIGKILL)
        def warmup_data(self):
            return [{{}}]
        def handle(self, data, context):
            self.killed("warm-up", {warm_ups})
            return ["here"] * len(data)
"""


@pytest.mark.parametrize(("loads", "warm_ups"), [(2, 0), (0, 2), (1, 1)])
def test_a_first_load_that_is_killed_from_outside_is_tried_again(
    loads: int, warm_ups: int, make_spec: Any, make_sink: Any, make_request: Any
) -> None:
    lost: list[str] = []

    async def main() -> None:
        spec = make_spec(KILLED_AT_FIRST.format(loads=loads, warm_ups=warm_ups))
        async with pool_in_service(spec, on_lost=lost.append) as pool:
            sink = make_sink()
            sink.submit(pool, [make_request("hi")])
            assert (await sink.outcome()).body == b"here"
            (status,) = pool.statuses()
            assert status.losses == 2
            assert status.last_failure == "killed by signal 9 (SIGKILL) while it was loading"

    asyncio.run(main())
    assert lost == ["signal", "signal"]


def test_a_first_load_that_is_killed_again_and_again_has_failed(make_spec: Any) -> None:
    async def main() -> None:
        with pytest.raises(LoadFailed) as caught:
            async with pool_in_service(make_spec(KILLED_AT_FIRST.format(loads=99, warm_ups=0))):
                pass
        assert caught.value.detail == "killed by signal 9 (SIGKILL) while it was loading"
        assert caught.value.out_of_memory

    asyncio.run(main())


def test_a_restart_that_is_killed_from_outside_is_no_failed_load(
    make_spec: Any, make_sink: Any, make_request: Any, tmp_path: Path
) -> None:
    lost: list[str] = []

    async def main() -> None:
        for number in range(3):
            (tmp_path / f"load{number}").touch()
        spec = make_spec(KILLED_AT_FIRST.format(loads=3, warm_ups=0))
        async with pool_in_service(spec, on_lost=lost.append, max_retry_timeout_s=0.0) as pool:
            for number in range(3):
                (tmp_path / f"load{number}").unlink()
            os.kill(pool.statuses()[0].pid, signal.SIGKILL)
            await until(lambda: len(lost) == 4 and pool.free)
            sink = make_sink()
            sink.submit(pool, [make_request("hi")])
            assert (await sink.outcome()).body == b"here"

    asyncio.run(main())
    assert lost == ["signal"] * 4


def test_a_process_that_is_not_to_blame_for_a_failed_restart_does_not_live_on(
    make_spec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "ENDING_GRACE_S", 0.05)
    pids: list[int] = []

    def refuse(launched: launch.Launched, count: int) -> list[Any]:
        monkeypatch.setattr(worker_process, "open_lanes", launch.open_lanes)
        pids.append(launched.pid)
        raise OSError(24, "Too many open files")

    async def main() -> None:
        async with pool_in_service(make_spec()) as pool:
            monkeypatch.setattr(worker_process, "open_lanes", refuse)
            os.kill(pool.statuses()[0].pid, signal.SIGKILL)
            await until(lambda: pids and pool.free)
            assert "its sockets could not be opened" in pool.statuses()[0].last_failure
            assert pool.statuses()[0].pid != pids[0]
            await until(lambda: not Path(f"/proc/{pids[0]}").exists(), 20)

    asyncio.run(main())


def test_an_executor_that_gave_up_is_tried_again_when_somebody_scales(
    make_spec: Any, make_sink: Any, make_request: Any
) -> None:
    async def main() -> None:
        async with pool_in_service(make_spec(), max_retry_timeout_s=-1.0) as pool:
            lost, after = make_sink(), make_sink()
            pool.freed.clear()
            lost.submit(pool, [make_request("exit")])
            await asyncio.wait_for(pool.freed.wait(), 30)
            assert pool.statuses()[0].state is ExecutorState.FAILED
            await pool.resize(1)
            await pool.warm_up()
            after.submit(pool, [make_request("hi")])
            assert (await after.outcome()).body == b"hi!"

    asyncio.run(main())


def test_workers_that_were_loaded_beside_one_that_was_not_serve(make_spec: Any) -> None:
    source = """
        import os
        class Handler:
            def initialize(self, context):
                for place in ("first", "second", "third"):
                    try:
                        return os.close(os.open(place, os.O_CREAT | os.O_EXCL))
                    except FileExistsError:
                        pass
                raise MemoryError("no place is left")
            def handle(self, data, context):
                return ["ok"]
    """

    async def main() -> None:
        async with pool_in_service(make_spec(source)) as pool:
            with pytest.raises(LoadFailed) as failure:
                await pool.resize(5)
            assert "no place is left" in failure.value.detail
            assert pool.in_service == pool.size == 3
            assert {status.state for status in pool.statuses()} == {ExecutorState.READY}

    asyncio.run(main())


def test_a_worker_that_loads_beside_one_that_does_not_serves_also_when_all_had_given_up(
    make_spec: Any, make_sink: Any, make_request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with pool_in_service(make_spec(), count=2, max_retry_timeout_s=-1.0) as pool:
            for _ in range(2):
                make_sink().submit(pool, [make_request("exit")])
            await until(lambda: all(status.state is ExecutorState.FAILED for status in pool.statuses()))
            launcher, launches = pool._settings.launcher, itertools.count(1)
            launch_first = launcher.launch

            async def refuse_second(requests: int) -> launch.Launched:
                if next(launches) == 2:
                    raise OSError(12, "Cannot allocate memory")
                return await launch_first(requests)

            monkeypatch.setattr(launcher, "launch", refuse_second)
            with pytest.raises(LoadFailed) as failure:
                await pool.resize(2)
            assert "Cannot allocate memory" in failure.value.detail
            assert pool.in_service == pool.size == 1

    asyncio.run(main())


@pytest.mark.parametrize("step", ["load", "warm-up"])
def test_lanes_that_were_being_added_when_their_process_was_replaced_are_lanes_of_the_next_one(
    make_spec: Any, make_sink: Any, make_request: Any, tmp_path: Path, step: str
) -> None:
    source = """
        import os, time
        class Handler:
            def initialize(self, context):
                self.is_third("load")
            def is_third(self, step):
                for number in range(9):
                    try:
                        os.close(os.open(f"{step}{number}", os.O_CREAT | os.O_EXCL))
                        break
                    except FileExistsError:
                        pass
                if (step, number) == ("STEP", 2):  # the lane that is added to the first process
                    self.wait_for("go")
                    raise MemoryError("no memory for it")
            def wait_for(self, name):
                while not os.path.exists(name):
                    time.sleep(0.005)
            def warmup_data(self):
                return [{}]
            def handle(self, data, context):
                if data[0]:
                    open(bytes(data[0]["body"]).decode(), "w").close()
                    self.wait_for("end")
                elif not hasattr(self, "warm"):
                    self.is_third("warm-up")
                    self.warm = True
                return ["whole"] * len(data)
    """.replace("STEP", step)

    async def main() -> None:
        async with pool_in_service(make_spec(source, shares_weights=True), count=2) as pool:
            hung, works = make_sink(), make_sink()
            for sink, word in ((hung, "hung"), (works, "works")):
                sink.submit(pool, [make_request(word)])
            await until(lambda: (tmp_path / "hung").exists() and (tmp_path / "works").exists())

            async def scale() -> None:
                await pool.resize(3)
                await pool.warm_up()

            scaling = asyncio.ensure_future(scale())
            await until((tmp_path / f"{step}2").exists)
            pool._workers[0]._hung(pool._workers[0]._process, hung.run)
            await until(lambda: pool.in_service == 3)
            (tmp_path / "go").touch()
            await scaling
            assert [status.state for status in pool.statuses()] == [ExecutorState.READY] * 3
            (tmp_path / "end").touch()
            assert (await works.outcome()).body == b"whole"

    asyncio.run(main())


def test_scaling_down_keeps_the_worker_that_serves_rather_than_one_that_was_lost(
    make_spec: Any, make_sink: Any, make_request: Any, tmp_path: Path
) -> None:
    source = """
        import os
        class Handler:
            def initialize(self, context):
                assert not os.path.exists("cold")
            def handle(self, data, context):
                return [str(os.getpid())]
    """

    async def main() -> None:
        async with pool_in_service(make_spec(source), count=2) as pool:
            (tmp_path / "cold").touch()
            lost, kept = (status.pid for status in pool.statuses())
            os.kill(lost, signal.SIGKILL)
            await until(lambda: pool.statuses()[0].losses)
            await pool.resize(1)
            sink = make_sink()
            assert pool.free
            sink.submit(pool, [make_request("pid")])
            assert (await sink.outcome()).body == str(kept).encode()

    asyncio.run(main())


def test_batches_sent_ahead_to_a_worker_that_has_lost_its_gpu_are_all_given_back(
    make_spec: Any, make_sink: Any, make_request: Any
) -> None:
    source = """
        import time, torch
        torch.cuda.is_initialized = lambda: True
        torch.cuda.device_count = torch.cuda.memory_reserved = lambda *_: 1
        torch.cuda.empty_cache = torch.cuda.synchronize = lambda *_: None
        def fail(*_):
            raise RuntimeError("CUDA error: device-side assert triggered")
        class Handler:
            def initialize(self, context): pass
            def handle(self, data, context):
                if bytes(data[0]["body"]) == b"assert":
                    torch.cuda.empty_cache = torch.cuda.synchronize = fail
                    time.sleep(0.2)
                    fail()
                return ["ok"]
    """

    async def main() -> None:
        async with pool_in_service(make_spec(source)) as pool:
            while pool.ahead < 3:
                quick = make_sink()
                quick.submit(pool, [make_request("x")])
                await quick.outcome()
            first, *ahead = (make_sink() for _ in range(3))
            first.submit(pool, [make_request("assert")])
            order: list[Any] = []
            for sink in ahead:
                sink.given_back.add_done_callback(order.append)
                sink.submit(pool, [make_request("x")])
            assert isinstance(await first.outcome(), HandlerFailed)
            assert await asyncio.wait_for(asyncio.gather(*(sink.given_back for sink in ahead)), 30)
            # The last one first: each goes to the front of the queue, where they shall be as they were.
            assert order == [sink.given_back for sink in reversed(ahead)]
            await until_free(pool)
            assert pool.statuses()[0].last_failure == "it lost its GPU, and ended"

    asyncio.run(main())


LOOKING_UP = """
    import torch
    class Handler:
        def initialize(self, context):
            self.device = torch.device("cuda", context.system_properties["gpu_id"])
            self.table = torch.arange(4, device=self.device)
        def handle(self, data, context):
            place = torch.tensor([int(data[0]["body"])], device=self.device)
            return [str(self.table[place].item())]
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device and -m gpu")
def test_a_forked_worker_computes_on_a_gpu_and_is_replaced_when_it_has_lost_it(
    make_spec: Any, make_sink: Any, make_request: Any
) -> None:
    async def main() -> None:
        async with pool_in_service(make_spec(LOOKING_UP, gpu_ids=(0,))) as pool:
            first = pool.statuses()[0].pid
            answers = []
            for place in ("3", "9"):  # which is out of range
                sink = make_sink()
                sink.submit(pool, [make_request(place)])
                answers.append(await sink.outcome())
            assert answers[0].body == b"3"
            assert isinstance(answers[1], HandlerFailed)
            while pool.statuses()[0].pid == first:
                pool.freed.clear()
                await asyncio.wait_for(pool.freed.wait(), 60)
            await until_free(pool)
            sink = make_sink()
            sink.submit(pool, [make_request("2")])
            assert (await sink.outcome()).body == b"2"

    asyncio.run(main())


THREADS = """
    import torch

    class Handler:
        def initialize(self, context):
            self.initialized = True
            if context.model_yaml_config.get("own"):
                torch.set_num_threads(5)

        def handle(self, data, context):
            return [str(torch.get_num_threads())] * len(data)
"""


async def threads_of(pool: Any, sink: Any, request: Any) -> bytes:
    sink.submit(pool, [request])
    return bytes((await sink.outcome()).body)


@pytest.mark.parametrize("shares_weights", [False, True])
def test_lanes_take_their_share_of_the_cores_before_each_run_without_a_restart(
    make_spec: Any, make_sink: Any, make_request: Any, shares_weights: bool
) -> None:
    async def main() -> None:
        cores = CoreShares(12)
        threads = cores.with_more(2)
        spec = make_spec(THREADS, intra_op_threads=threads, shares_weights=shares_weights)
        async with pool_in_service(spec, 2, cores=cores) as pool:
            assert [await threads_of(pool, make_sink(), make_request("x")) for _ in range(2)] == [b"6", b"6"]
            cores.take("another model", 2)
            assert [await threads_of(pool, make_sink(), make_request("x")) for _ in range(2)] == [b"3", b"3"]
            cores.take("another model", 0)
            await pool.resize(1)
            assert await threads_of(pool, make_sink(), make_request("x")) == b"12"
        assert cores.threads == 12

    asyncio.run(main())


def test_a_lane_that_runs_requests_side_by_side_takes_its_share_of_the_cores(
    make_spec: Any, make_sink: Any, make_request: Any
) -> None:
    async def main() -> None:
        cores = CoreShares(12)
        source = THREADS.replace("def handle", "async def handle")
        spec = make_spec(source, intra_op_threads=cores.with_more(1), at_once=4)
        async with pool_in_service(spec, 1, cores=cores) as pool:
            assert await threads_of(pool, make_sink(), make_request("x")) == b"12"
            cores.take("another model", 3)
            assert await threads_of(pool, make_sink(), make_request("x")) == b"3"

    asyncio.run(main())


def test_a_number_of_threads_that_a_handler_sets_itself_is_left_alone(
    make_spec: Any, make_sink: Any, make_request: Any
) -> None:
    async def main() -> None:
        cores = CoreShares(12)
        spec = make_spec(THREADS, model_config={"own": True}, intra_op_threads=12)
        async with pool_in_service(spec, 1, cores=cores) as pool:
            cores.take("another model", 2)
            sink = make_sink()
            sink.submit(pool, [make_request("x")])
            assert (await sink.outcome()).body == b"5"

    asyncio.run(main())
