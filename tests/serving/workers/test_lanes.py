"""Lanes: threads of one worker process over one copy of the weights, as real processes."""

import asyncio
import logging
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from pools import pool_in_service, until

from torchere.serving.errors import Cancelled, DeadlineExceeded, ExecutorDied, LoadFailed
from torchere.serving.workers import lanes, loss, worker
from torchere.serving.workers.executor import ExecutorState, LoadSpec
from torchere.serving.workers.heartbeat import HeartbeatSettings

HANDLER = """
    import os, signal, threading, time

    class Handler:
        def initialize(self, context):
            if os.path.exists("refuse"):
                raise RuntimeError("refused")
            while os.path.exists("slow"):
                time.sleep(0.005)
            self.folder = context.system_properties["model_dir"]

        def handle(self, data, context):
            word = bytes(data[0]["body"]).decode()
            if word == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if word.startswith("until "):
                open(word[6:] + ".begun", "w").close()
                while not os.path.exists(word[6:]):
                    time.sleep(0.005)
            if word == "hang":
                time.sleep(3600)
            if word == "thread":
                return [f"{os.getpid()} {threading.current_thread().name}"] * len(data)
            if word == "mark":
                open("marked", "w").close()
            return [word + "!"] * len(data)
"""


@pytest.fixture
def lanes_spec(make_spec: Any) -> Any:
    def make(source: str = HANDLER, **changes: Any) -> LoadSpec:
        spec: LoadSpec = make_spec(source, shares_weights=True, **changes)
        return spec

    return make


def test_lanes_answer_side_by_side_in_one_process(lanes_spec: Any, make_sink: Any, make_request: Any) -> None:
    async def main() -> None:
        async with pool_in_service(lanes_spec(), 2) as pool:
            assert {status.pid for status in pool.statuses()} != {os.getpid()}
            assert len({status.pid for status in pool.statuses()}) == 1
            assert [status.executor_id for status in pool.statuses()] == [9000, 9001]
            folder = Path(pool._spec.archive_dir)
            slow, quick = make_sink(), make_sink()
            slow.submit(pool, [make_request("until gate")])
            assert (pool.free, pool.in_service) == (1, 2)
            quick.submit(pool, [make_request("hi")])
            assert (await quick.outcome()).body == b"hi!"
            assert not slow.report.done()
            (folder / "gate").touch()
            assert (await slow.outcome()).body == b"until gate!"
            assert pool.free == 2

    asyncio.run(main())


def test_a_crash_answers_the_runs_that_lanes_had_begun_and_gives_the_others_back(
    lanes_spec: Any, make_sink: Any, make_request: Any
) -> None:
    async def main() -> None:
        async with pool_in_service(lanes_spec(batch_size=2), 2) as pool:
            folder = Path(pool._spec.archive_dir)
            first, second, behind = make_sink(), make_sink(), make_sink()
            first.submit(pool, [make_request("until a")] * 2)
            second.submit(pool, [make_request("until b")] * 2)
            await until(lambda: (folder / "a.begun").exists() and (folder / "b.begun").exists())
            assert (pool.free, pool.ahead) == (0, 1)
            behind.submit(pool, [make_request("hi")] * 2)
            os.kill(pool.statuses()[0].pid, signal.SIGKILL)
            for begun in (first, second):
                outcome = await begun.outcome()
                assert isinstance(outcome, ExecutorDied)
                assert outcome.detail == "killed by signal 9 (SIGKILL)"
            assert await asyncio.wait_for(behind.given_back, 30)
            await until(lambda: pool.in_service == 2)
            assert [status.losses for status in pool.statuses()] == [1, 1]

    asyncio.run(main())


def test_a_lane_that_hangs_is_answered_its_worker_replaced_and_its_neighbour_finishes(
    lanes_spec: Any, make_sink: Any, make_request: Any
) -> None:
    async def main() -> None:
        async with pool_in_service(lanes_spec(), 2, response_timeout_s=2.0) as pool:
            folder = Path(pool._spec.archive_dir)
            before = pool.statuses()[0].pid
            hung, neighbour, after = make_sink(), make_sink(), make_sink()
            hung.submit(pool, [make_request("hang")])
            await asyncio.sleep(1)
            neighbour.submit(pool, [make_request("until gate")])
            assert isinstance(await hung.outcome(), DeadlineExceeded)
            assert not neighbour.report.done()
            await until(lambda: pool.in_service == 2 and pool.statuses()[0].pid != before)
            assert [status.executor_id for status in pool.statuses()] == [9000, 9001]
            assert pool.statuses()[0].last_failure == "no answer within response_timeout=2 s"
            after.submit(pool, [make_request("hi")])
            assert (await after.outcome()).body == b"hi!"
            (folder / "gate").touch()
            outcome = await neighbour.outcome()
            assert isinstance(outcome, DeadlineExceeded | ExecutorDied) or outcome.body == b"until gate!"
            await until(lambda: not Path(f"/proc/{before}").exists())

    asyncio.run(main())


def test_a_lane_that_hangs_is_found_beside_busy_neighbours(
    lanes_spec: Any, make_sink: Any, make_request: Any
) -> None:
    async def main() -> None:
        async with pool_in_service(lanes_spec(), 2, response_timeout_s=1.0) as pool:
            hung = make_sink()
            hung.submit(pool, [make_request("hang")])
            began_s = time.monotonic()
            while not hung.report.done():
                assert time.monotonic() - began_s < 20
                if pool.free:
                    neighbour = make_sink()
                    neighbour.submit(pool, [make_request("hi")])
                    # It is given back when its worker is replaced before it begins.
                    ends = (neighbour.report, neighbour.given_back)
                    await asyncio.wait(ends, timeout=30, return_when=asyncio.FIRST_COMPLETED)
                else:
                    await asyncio.sleep(0.005)
            assert isinstance(await hung.outcome(), DeadlineExceeded)

    asyncio.run(main())


def test_a_model_that_hangs_again_and_again_is_given_up(
    lanes_spec: Any, make_sink: Any, make_request: Any
) -> None:
    async def main() -> None:
        changes = {"response_timeout_s": 0.2, "max_retry_timeout_s": 0.1}
        async with pool_in_service(lanes_spec(), 2, **changes) as pool:
            while pool.statuses()[0].state is not ExecutorState.FAILED:
                await until(lambda: pool.free or pool.statuses()[0].state is ExecutorState.FAILED)
                if pool.free:
                    hung = make_sink()
                    hung.submit(pool, [make_request("hang")])
                    await hung.report
            assert pool.in_service == 0

    asyncio.run(main())


def test_what_other_lanes_finish_after_a_hang_does_not_end_the_row_of_losses(
    lanes_spec: Any, make_sink: Any, make_request: Any, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(loss, "BACKOFF_S", (1.0, 1.5))

    async def main() -> None:
        async with pool_in_service(lanes_spec(), 2, response_timeout_s=0.5) as pool:
            folder = Path(pool._spec.archive_dir)
            for losses in (1, 2):
                await until(lambda: pool.free == 2)
                gate = f"gate{losses}"
                hung, neighbour = make_sink(), make_sink()
                hung.submit(pool, [make_request("hang")])
                await asyncio.sleep(0.3)
                neighbour.submit(pool, [make_request(f"until {gate}")])
                await until(lambda: pool.statuses()[0].losses == losses)  # noqa: B023
                (folder / gate).touch()  # while the restart waits
                ends = (neighbour.report, neighbour.given_back)
                await asyncio.wait(ends, timeout=30, return_when=asyncio.FIRST_COMPLETED)

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    assert "in 1.5 seconds" in caplog.text


def test_a_request_that_is_cancelled_before_its_lane_begins_is_not_run(
    lanes_spec: Any, make_sink: Any, make_request: Any
) -> None:
    async def main() -> None:
        async with pool_in_service(lanes_spec(batch_size=2)) as pool:
            folder = Path(pool._spec.archive_dir)
            first, behind = make_sink(), make_sink()
            first.submit(pool, [make_request("until gate")] * 2)
            behind.submit(pool, [make_request("mark"), make_request("mark")])
            for index in range(2):
                behind.run.cancel(index)
            (folder / "gate").touch()
            report = await asyncio.wait_for(behind.report, 30)
            assert all(isinstance(outcome, Cancelled) for outcome in report.outcomes)
            assert not (folder / "marked").exists()

    asyncio.run(main())


STREAMS_FOR_EVER = """
    import os, time
    class Handler:
        def initialize(self, context):
            pass
        def handle(self, data, context):
            while True:
                context.send_partial(0, b"part")
                time.sleep(0.001)
"""


@pytest.mark.parametrize("shares_weights", [True, False])
def test_a_run_whose_clients_have_all_left_is_given_up_at_its_next_part(
    make_spec: Any, make_sink: Any, make_request: Any, shares_weights: bool
) -> None:
    async def main() -> None:
        async with pool_in_service(make_spec(STREAMS_FOR_EVER, shares_weights=shares_weights)) as pool:
            endless = make_sink()
            endless.submit(pool, [make_request("x")])
            await until(lambda: len(endless.parts) > 3)
            endless.run.cancel(0)
            assert isinstance(await endless.outcome(), Cancelled)
            assert pool.statuses()[0].losses == 0

    asyncio.run(main())


def test_lanes_are_added_and_ended_while_others_serve(
    lanes_spec: Any, make_sink: Any, make_request: Any
) -> None:
    async def main() -> None:
        async with pool_in_service(lanes_spec()) as pool:
            folder = Path(pool._spec.archive_dir)
            pid = pool.statuses()[0].pid
            busy = make_sink()
            busy.submit(pool, [make_request("until gate")])
            await pool.resize(3)
            await pool.warm_up()
            assert (pool.in_service, pool.free) == (3, 2)
            assert {status.pid for status in pool.statuses()} == {pid}
            await pool.resize(1)
            assert (pool.size, pool.in_service) == (1, 1)
            (folder / "gate").touch()
            assert (await busy.outcome()).body == b"until gate!"
            threads = Path(f"/proc/{pid}/task")
            for _ in range(4):
                after = make_sink()
                after.submit(pool, [make_request("thread")])
                assert (await after.outcome()).body.split()[0] == str(pid).encode()
            names = [(task / "comm").read_text() for task in threads.iterdir()]
            assert len(names) >= 2

    asyncio.run(main())


def test_lanes_that_are_added_while_their_process_gives_no_sign_of_life_are_loaded(lanes_spec: Any) -> None:
    async def main() -> None:
        async with pool_in_service(lanes_spec(), heartbeat=HeartbeatSettings(0.1, 0.2, 100.0)) as pool:
            pid = pool.statuses()[0].pid

            async def scale() -> None:
                await pool.resize(2)
                await pool.warm_up()

            os.kill(pid, signal.SIGSTOP)
            await until(lambda: pool.statuses()[0].state is ExecutorState.SUSPECT)
            scaling = asyncio.ensure_future(scale())
            await asyncio.sleep(0)
            os.kill(pid, signal.SIGCONT)
            await asyncio.wait_for(scaling, 60)
            await until(lambda: pool.statuses()[0].state is ExecutorState.READY)
            assert (pool.size, pool.in_service) == (2, 2)
            assert {(status.pid, status.losses) for status in pool.statuses()} == {(pid, 0)}

    asyncio.run(main())


REFUSES_TO_WARM_UP = """
    import os
    class Handler:
        def initialize(self, context):
            pass
        def warmup_data(self):
            return [{}]
        def handle(self, data, context):
            if not data[0] and os.path.exists("refuse"):
                raise RuntimeError("refused")
            return ["ok"] * len(data)
"""


def test_lanes_are_added_after_some_that_did_not_warm_up(lanes_spec: Any) -> None:
    async def main() -> None:
        async with pool_in_service(lanes_spec(REFUSES_TO_WARM_UP)) as pool:
            pid, refuse = pool.statuses()[0].pid, Path(pool._spec.archive_dir, "refuse")
            refuse.touch()
            await pool.resize(2)
            with pytest.raises(LoadFailed):
                await pool.warm_up()
            refuse.unlink()
            await pool.resize(2)
            await pool.warm_up()
            assert (pool.size, pool.in_service) == (2, 2)
            assert {(status.pid, status.losses) for status in pool.statuses()} == {(pid, 0)}

    asyncio.run(main())


WARMS_LATE = """
    import os, threading, time
    class Handler:
        def initialize(self, context):
            if os.path.exists("refuse"):
                raise RuntimeError("refused")
        def warmup_data(self):
            return [{}]
        def handle(self, data, context):
            if not data[0] and threading.current_thread().name == "lane-1":
                while os.path.exists("gate"):
                    time.sleep(0.005)
            return ["ok"] * len(data)
"""


async def restart_until_one_lane_is_warm(pool: Any, folder: Path) -> None:
    """Have a pool of two lanes restarted; the second one warms up while the file `gate` is there."""
    (folder / "gate").touch()
    os.kill(pool.statuses()[0].pid, signal.SIGKILL)
    await until(lambda: pool.statuses()[0].losses and pool.in_service == 1)


def test_lanes_that_are_added_while_a_restart_warms_up_are_loaded_after_it(lanes_spec: Any) -> None:
    async def main() -> None:
        async with pool_in_service(lanes_spec(WARMS_LATE), 2, startup_timeout_s=20.0) as pool:
            folder = Path(pool._spec.archive_dir)
            await restart_until_one_lane_is_warm(pool, folder)
            pid = pool.statuses()[0].pid
            scaling = asyncio.ensure_future(pool.resize(3))
            await asyncio.sleep(0)
            (folder / "gate").unlink()
            await asyncio.wait_for(scaling, 60)
            await pool.warm_up()
            await until(lambda: pool.in_service == 3)
            statuses = {(status.pid, status.state) for status in pool.statuses()}
            assert statuses == {(pid, ExecutorState.READY)}

    asyncio.run(main())


def test_lanes_that_are_added_during_a_restart_and_do_not_load_leave_those_that_serve(
    lanes_spec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "ENDING_GRACE_S", 0.05)

    async def main() -> None:
        async with pool_in_service(lanes_spec(WARMS_LATE), 2, startup_timeout_s=20.0) as pool:
            folder = Path(pool._spec.archive_dir)
            await restart_until_one_lane_is_warm(pool, folder)
            pid = pool.statuses()[0].pid
            await asyncio.wait_for(pool.resize(3), 10)
            (folder / "refuse").touch()
            (folder / "gate").unlink()
            await until(lambda: pool.size == 2)
            statuses = {(status.pid, status.state, status.losses) for status in pool.statuses()}
            assert statuses == {(pid, ExecutorState.READY, 1)}
            assert pool.in_service == 2

    asyncio.run(main())


def test_lanes_that_do_not_load_leave_those_that_serve(
    lanes_spec: Any, make_sink: Any, make_request: Any
) -> None:
    async def main() -> None:
        async with pool_in_service(lanes_spec()) as pool:
            folder = Path(pool._spec.archive_dir)
            (folder / "refuse").touch()
            with pytest.raises(LoadFailed) as failure:
                await pool.resize(2)
            assert "refused" in failure.value.detail
            assert (pool.size, pool.in_service) == (1, 1)
            (folder / "refuse").unlink()
            await pool.resize(2)
            await pool.warm_up()
            assert (pool.size, pool.in_service) == (2, 2)
            after = make_sink()
            after.submit(pool, [make_request("hi")])
            assert (await after.outcome()).body == b"hi!"

    asyncio.run(main())


def test_lanes_whose_load_is_given_up_leave_those_that_serve(
    lanes_spec: Any, make_sink: Any, make_request: Any
) -> None:
    async def main() -> None:
        async with pool_in_service(lanes_spec()) as pool:
            folder = Path(pool._spec.archive_dir)
            busy, after = make_sink(), make_sink()
            busy.submit(pool, [make_request("until gate")])
            (folder / "slow").touch()
            scaling = asyncio.ensure_future(pool.resize(2))
            await until(lambda: pool.size == 2)
            scaling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await scaling
            assert (pool.size, pool.in_service) == (1, 1)
            (folder / "slow").unlink()
            (folder / "gate").touch()
            assert (await busy.outcome()).body == b"until gate!"
            after.submit(pool, [make_request("hi")])
            assert (await after.outcome()).body == b"hi!"
            assert pool.statuses()[0].losses == 0

    asyncio.run(main())


def test_a_process_that_has_loaded_more_lanes_than_the_page_has_cells_is_replaced_when_it_is_lost(
    lanes_spec: Any,
) -> None:
    async def main() -> None:
        async with pool_in_service(lanes_spec()) as pool:
            pool._workers[0]._process._lanes_loaded = 3 * lanes.MAX_LANES  # after many scale-ups
            os.kill(pool.statuses()[0].pid, signal.SIGKILL)
            await until(lambda: pool.statuses()[0].losses and pool.free, 30)

    asyncio.run(main())


def test_an_exclusive_run_has_its_process_for_itself(
    lanes_spec: Any, make_sink: Any, make_request: Any
) -> None:
    async def main() -> None:
        async with pool_in_service(lanes_spec(), 2) as pool:
            folder = Path(pool._spec.archive_dir)
            busy, suspect, after = make_sink(), make_sink(), make_sink()
            busy.submit(pool, [make_request("until gate")])
            assert (pool.free, pool.empty) == (1, 0)
            (folder / "gate").touch()
            await busy.outcome()
            assert pool.empty == 1
            (folder / "gate").unlink()
            suspect.submit(pool, [make_request("until gate")], exclusive=True)
            assert (pool.free, pool.ahead, pool.empty) == (0, 0, 0)
            (folder / "gate").touch()
            await suspect.outcome()
            assert pool.free == 2
            after.submit(pool, [make_request("kill")], exclusive=True)
            assert isinstance(await after.outcome(), ExecutorDied)
            await until(lambda: pool.free == 2)

    asyncio.run(main())


SAYS_SOMETHING_AND_DIES = """
    import os, signal, threading
    class Handler:
        def initialize(self, context):
            pass
        def handle(self, data, context):
            process = os.getpid()
            # The report goes out first: the thread waits for the interpreter, which the lane has.
            threading.Timer(0.0005, os.kill, (process, signal.SIGKILL)).start()
            return ["last words"] * len(data)
"""


@pytest.mark.parametrize("shares_weights", [True, False])
def test_no_report_of_a_worker_that_dies_is_lost_and_no_run_is_answered_twice(
    make_spec: Any, make_sink: Any, make_request: Any, shares_weights: bool
) -> None:
    async def main() -> None:
        answered = 0
        async with pool_in_service(make_spec(SAYS_SOMETHING_AND_DIES, shares_weights=shares_weights)) as pool:
            for _ in range(60):
                await until(lambda: pool.free)
                sink = make_sink()
                sink.submit(pool, [make_request("x")])  # perhaps to a worker that dies just now
                ended = [sink.report, sink.given_back]
                await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED, timeout=30)
                assert sink.report.done() != sink.given_back.done()
                if sink.report.done():
                    answered += not isinstance(sink.report.result().outcomes[0], ExecutorDied)
        assert answered > 0

    asyncio.run(main())


def test_sockets_that_exceed_the_limit_of_open_files_fail_the_load_and_leave_nothing(make_spec: Any) -> None:
    import resource

    def sent(count: int) -> list[socket.socket]:
        pairs = [socket.socketpair() for _ in range(count)]
        socket.send_fds(server, [b"L"], [theirs.fileno() for _, theirs in pairs])
        for _, theirs in pairs:
            theirs.close()
        return [ours for ours, _ in pairs]

    limits, spec = resource.getrlimit(resource.RLIMIT_NOFILE), make_spec()
    server, worker_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with server, worker_end:
        left = sent(lanes.LANES_A_MESSAGE) + sent(2)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 2, limits[1]))
        try:
            with pytest.raises(LoadFailed) as error:
                lanes.receive_lanes(worker_end, len(left), spec)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert error.value.detail == "too many open files"
        assert {ours.recv(1) for ours in left} == {b""}  # both ends are closed
        left += sent(1)
        (theirs,) = lanes.receive_lanes(worker_end, 1, spec)  # and no message of before is left
        theirs.sendall(b"x")
        assert left[-1].recv(1) == b"x"
        for each in (theirs, *left):
            each.close()


def test_the_page_tells_which_requests_are_cancelled_and_what_lanes_have_begun() -> None:
    descriptor = lanes.create(4)
    try:
        server, worker = lanes.LanePage(descriptor, 4), lanes.LanePage(descriptor, 4)
    finally:
        os.close(descriptor)
    worker.mark(0, 17, 1.5)
    worker.mark(2, 18, 2.5)
    assert server.begun(3) == {17: 1.5, 18: 2.5}
    server.cancel(5, 1)
    assert worker.cancelled(5, 3) == [1]
    assert not worker.all_cancelled(5, 2)
    server.cancel(5, 0)
    assert worker.all_cancelled(5, 2)
    server.hold(5, held=True)
    assert worker.is_held(5)
    assert not worker.is_held(6)
    assert worker.threads == 0
    server.prepare(5, threads=3)
    assert worker.threads == 3
    assert not worker.is_held(5)
    assert worker.cancelled(5, 3) == []


def test_a_worker_cannot_take_the_page_away() -> None:
    descriptor = lanes.create(1)
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)
