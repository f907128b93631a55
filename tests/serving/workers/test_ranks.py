"""Workers of several processes: what their ranks see, and that they are one worker to the pool."""

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from pools import fork_launcher, new_pool, pool_in_service, until

from torchere.handlers.tensors import TENSOR_TYPE
from torchere.serving.errors import ExecutorDied, HandlerFailed, InvalidRequest, LoadFailed
from torchere.serving.types import InferRequest, Parameter
from torchere.serving.workers import loss as restart
from torchere.serving.workers.messages import Ping, encode_frame

# Every rank adds its number plus one, so that three ranks add 6.
HANDLER = """
    import logging, os, signal, time
    import torch
    import torch.distributed as dist

    class Handler:
        def initialize(self, context):
            self.rank = int(os.environ["RANK"])
            self.config = context.model_yaml_config
            if self.rank == self.config.get("fails"):
                raise ValueError("rank has no weights")
            if self.config.get("waits"):
                open(f"loads-{self.rank}", "w").close()
                while not os.path.exists("go"):
                    time.sleep(0.005)
            dist.init_process_group("gloo")
            assert (dist.get_rank(), dist.get_world_size()) == (self.rank, 3)
            print("rank", self.rank, "of", 3)
            logging.getLogger("mine").info("loaded")

        def handle(self, data, context):
            word, _, rank = bytes(data[0]["body"]).decode().partition(" ")
            mine = rank and int(rank) == self.rank
            if word == "raise" and mine:
                raise ValueError("boom")
            if word == "exit" and mine:
                os._exit(7)
            if word == "crash" and mine:
                os.kill(os.getpid(), signal.SIGSEGV)
            if word == "end" and mine:
                raise SystemExit(3)
            if word == "all":
                raise ValueError("all ranks do")
            if word == "wait":
                open(f"waits-{self.rank}", "w").close()
                while not os.path.exists("go"):
                    time.sleep(0.005)
            total = torch.tensor([float(self.rank + 1) * len(data)])
            dist.all_reduce(total)
            if self.rank:
                return None  # what other ranks return does not matter
            context.send_partial(0, b"part,") if word == "stream" else None
            return [f"{word} {total.item():g}"] * len(data)
"""

# Its ranks do not meet in a batch; the rank that the first request names takes longer than others may wait.
SLOW = """
    import os, time
    from torchere.serving.workers import ranks

    class Handler:
        def initialize(self, context):
            ranks.STEP_GRACE_S = 0.3

        def handle(self, data, context):
            if bytes(data[0]["body"]).decode() == os.environ["RANK"]:
                time.sleep(1.5)
            return ["good"] * len(data)
"""


@pytest.fixture
def make_group(make_spec: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes the spec of a group of three ranks, whose losses are followed by restarts at once."""
    monkeypatch.setattr(restart, "BACKOFF_S", (0.0,))
    return lambda source=HANDLER, **changes: make_spec(
        source, **{"ranks": 3, "devices": 3, "parallel_type": "tp", **changes}
    )


def ranks_of(pool: Any) -> list[int]:
    """The process ids of a worker, that of rank 0 first."""
    first = pool.statuses()[0].pid
    return [first, *(child.pid for child in psutil.Process(first).children())]


def cause_of(pool: Any) -> str:
    cause: str = pool.statuses()[0].last_failure
    return cause


async def ended(pids: list[int]) -> None:
    """Wait until none of the processes is there; those that are left have no parent that waits for them."""
    await until(lambda: not any(psutil.pid_exists(pid) and is_alive(pid) for pid in pids), 20)


async def waiting_in(pool: Any, sink: Any, spec: Any, request: Any) -> None:
    """Submit a batch that waits, and return when all ranks are inside it."""
    sink.submit(pool, [request])
    await until(lambda: all(os.path.exists(f"{spec.archive_dir}/waits-{rank}") for rank in range(3)))


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_all_ranks_run_a_batch_and_rank_0_answers(make_group, make_sink, make_request) -> None:
    async def main() -> None:
        async with pool_in_service(make_group(batch_size=4)) as pool:
            pids = ranks_of(pool)
            assert len(pids) == 3
            one, two = make_sink(), make_sink()
            one.submit(pool, [make_request("sum")])
            assert (await one.outcome()).body == b"sum 6"
            two.submit(pool, [make_request("stream"), make_request("stream")])
            report = await asyncio.wait_for(two.report, 30)
            assert [outcome.body for outcome in report.outcomes] == [b"stream 12"] * 2
            assert [(index, part.body) for index, part in two.parts] == [(0, b"part,")]
        await ended(pids)

    asyncio.run(main())


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such policy")
def test_ranks_on_a_cpu_do_not_preempt_each_other(make_group) -> None:
    async def main() -> None:
        async with pool_in_service(make_group()) as pool:
            threads = [each.id for pid in ranks_of(pool) for each in psutil.Process(pid).threads()]
            assert {os.sched_getscheduler(thread) for thread in threads} == {os.SCHED_BATCH}
            assert os.sched_getscheduler(0) == os.SCHED_OTHER

    asyncio.run(main())


def test_what_the_ranks_listen_at_is_on_loopback_only(make_group) -> None:
    async def main() -> None:
        async with pool_in_service(make_group()) as pool:
            for pid in ranks_of(pool):
                for connection in psutil.Process(pid).net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN:
                        assert connection.laddr.ip == "127.0.0.1"

    asyncio.run(main())


def test_with_pp_only_rank_0_gets_the_requests(make_group, make_sink, make_request) -> None:
    source = """
        import os
        class Handler:
            def initialize(self, context): self.rank = int(os.environ["RANK"])
            def handle(self, data, context):
                open(f"ran-{self.rank}", "w").close()
                return [os.environ["WORLD_SIZE"]] * len(data)
    """

    async def main() -> None:
        spec = make_group(source, parallel_type="pp")
        async with pool_in_service(spec) as pool:
            sink = make_sink()
            sink.submit(pool, [make_request("any")])
            assert (await sink.outcome()).body == b"3"
            assert sorted(name for name in os.listdir(spec.archive_dir) if "ran-" in name) == ["ran-0"]

    asyncio.run(main())


def test_requests_that_are_late_or_cancelled_are_run_by_no_rank(make_group, make_sink, make_request) -> None:
    async def main() -> None:
        spec = make_group(batch_size=3)
        async with pool_in_service(spec) as pool:
            sink = make_sink()
            await waiting_in(pool, make_sink(), spec, make_request("wait"))
            late = make_request("sum")
            late = type(late)(late.request_id, late.parameters, deadline_s=0.001)
            sink.submit(pool, [late, make_request("sum"), make_request("sum")])
            sink.run.cancel(2)
            Path(spec.archive_dir, "go").touch()
            report = await asyncio.wait_for(sink.report, 30)
            assert report.outcomes[1].body == b"sum 6"  # of one request: 18 would be of three
            assert [report.outcomes[at].code for at in (0, 2)] == ["deadline_exceeded", "cancelled"]
            last = make_sink()
            last.submit(pool, [make_request("sum")])
            assert (await last.outcome()).body == b"sum 6"

    asyncio.run(main())


def test_an_exception_of_all_ranks_is_the_answer_and_they_go_on(make_group, make_sink, make_request) -> None:
    async def main() -> None:
        async with pool_in_service(make_group()) as pool:
            pids = ranks_of(pool)
            bad, good = make_sink(), make_sink()
            bad.submit(pool, [make_request("all")])
            outcome = await bad.outcome()
            assert isinstance(outcome, HandlerFailed)
            assert "all ranks do" in outcome.detail
            good.submit(pool, [make_request("sum")])
            assert (await good.outcome()).body == b"sum 6"
            assert ranks_of(pool) == pids

    asyncio.run(main())


@pytest.mark.parametrize("slow", ["0", "1"])
def test_a_request_that_is_invalid_ends_neither_its_batch_nor_the_group(
    make_group, make_sink, make_request, slow
) -> None:
    async def main() -> None:
        tensor = Parameter("body", b"abc", f"{TENSOR_TYPE}; datatype=BYTES; shape=2")
        async with pool_in_service(make_group(SLOW, ranks=2, devices=2, batch_size=2)) as pool:
            pids = ranks_of(pool)
            sink, again = make_sink(), make_sink()
            sink.submit(pool, [make_request(slow), InferRequest("broken", (tensor,))])
            report = await asyncio.wait_for(sink.report, 30)
            assert isinstance(report.outcomes[1], InvalidRequest)
            assert report.outcomes[0].body == b"good"
            again.submit(pool, [make_request("none")])
            assert (await again.outcome()).body == b"good"
            assert ranks_of(pool) == pids

    asyncio.run(main())


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_fails_alone_ends_the_group_which_comes_back(
    make_group, make_sink, make_request, rank
) -> None:
    async def main() -> None:
        async with pool_in_service(make_group()) as pool:
            pids = ranks_of(pool)
            sink = make_sink()
            sink.submit(pool, [make_request(f"raise {rank}")])
            assert isinstance(await sink.outcome(), HandlerFailed if rank == 0 else ExecutorDied)
            await until(lambda: pool.in_service and pool.statuses()[0].pid != pids[0])
            expected = "rank 2: failed in a batch" if rank else "its ranks are out of step"
            assert expected in cause_of(pool)
            again = make_sink()
            again.submit(pool, [make_request("sum")])
            assert (await again.outcome()).body == b"sum 6"
        await ended(pids)

    asyncio.run(main())


@pytest.mark.parametrize(
    "case",
    [
        ("exit", ExecutorDied, "rank 1: exited with code 7"),
        ("crash", ExecutorDied, "rank 1: killed by signal 11 (SIGSEGV)"),
        # Such a rank replies before it ends: the collective of rank 0 may fail before the end is noticed.
        ("end", (ExecutorDied, HandlerFailed), "its handler raised SystemExit"),
    ],
)
def test_a_rank_that_ends_in_a_batch_ends_the_group_with_its_cause(
    make_group, make_sink, make_request, case
) -> None:
    word, outcomes, cause = case

    async def main() -> None:
        async with pool_in_service(make_group()) as pool:
            pids = ranks_of(pool)
            sink = make_sink()
            sink.submit(pool, [make_request(f"{word} 1")])
            assert isinstance(await sink.outcome(), outcomes)
            await until(lambda: pool.in_service and pool.statuses()[0].pid != pids[0])
            assert cause in cause_of(pool)
        await ended(pids)

    asyncio.run(main())


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_is_killed_while_idle_ends_the_group_and_is_no_evidence(make_group, rank) -> None:
    async def main() -> None:
        losses: list[str] = []
        async with pool_in_service(make_group(), on_lost=losses.append) as pool:
            pids = ranks_of(pool)
            os.kill(pids[rank], signal.SIGKILL)
            await until(lambda: pool.in_service and pool.statuses()[0].pid != pids[0])
            assert losses == ["signal"]
            assert cause_of(pool) == f"rank {rank}: killed by signal 9 (SIGKILL)"
        await ended(pids)

    asyncio.run(main())


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_is_killed_in_a_batch_ends_it_once(make_group, make_sink, make_request, rank) -> None:
    async def main() -> None:
        spec = make_group()
        async with pool_in_service(spec) as pool:
            pids = ranks_of(pool)
            sink = make_sink()
            await waiting_in(pool, sink, spec, make_request("wait"))
            os.kill(pids[rank], signal.SIGKILL)
            assert isinstance(await sink.outcome(), ExecutorDied)
            await until(lambda: pool.in_service and pool.statuses()[0].pid != pids[0])
            again = make_sink()
            again.submit(pool, [make_request("sum")])
            assert (await again.outcome()).body == b"sum 6"
        await ended(pids)

    asyncio.run(main())


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_is_killed_while_it_loads_is_started_again_with_the_others(make_group, rank) -> None:
    async def main() -> None:
        spec = make_group(model_config={"waits": True})
        launcher = fork_launcher()
        pool: Any = new_pool(spec, launcher)
        loading = asyncio.ensure_future(pool.resize(1))
        await until(lambda: os.path.exists(f"{spec.archive_dir}/loads-2"))
        pids = ranks_of(pool)
        os.kill(pids[rank], signal.SIGKILL)
        await ended(pids)
        open(f"{spec.archive_dir}/go", "w").close()
        await asyncio.wait_for(loading, 60)
        await pool.warm_up()
        assert pool.in_service == 1
        assert pool.statuses()[0].pid != pids[0]
        await pool.close()
        await launcher.close()

    asyncio.run(main())


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_is_killed_while_its_worker_drains_ends_the_drain(
    make_group, make_sink, make_request, caplog, rank
) -> None:
    async def main() -> None:
        spec = make_group()
        async with pool_in_service(spec) as pool:
            pids = ranks_of(pool)
            sink = make_sink()
            await waiting_in(pool, sink, spec, make_request("wait"))
            draining = asyncio.ensure_future(pool.resize(0))
            await asyncio.sleep(0)
            os.kill(pids[rank], signal.SIGKILL)
            assert isinstance(await sink.outcome(), ExecutorDied)
            await asyncio.wait_for(draining, 30)
        await ended(pids)

    asyncio.run(main())
    assert f"was lost while it drained: rank {rank}: killed by signal 9 (SIGKILL)" in caplog.text


def test_a_rank_that_is_stopped_while_idle_is_missed_and_named(make_group, caplog) -> None:
    async def main() -> None:
        from torchere.serving.workers.heartbeat import HeartbeatSettings

        quick = HeartbeatSettings(ask_every_s=0.2, suspect_after_s=0.6, dead_after_s=4.0)
        async with pool_in_service(make_group(), heartbeat=quick) as pool:
            pids = ranks_of(pool)
            os.kill(pids[2], signal.SIGSTOP)
            await until(lambda: not pool.in_service)
            await until(lambda: pool.in_service and pool.statuses()[0].pid != pids[0])
        await ended(pids)

    asyncio.run(main())
    assert "no sign of life from rank 2" in caplog.text


def test_a_rank_that_is_stopped_in_a_batch_is_ended_by_the_response_time_out(
    make_group, make_sink, make_request
) -> None:
    async def main() -> None:
        async with pool_in_service(make_group(), response_timeout_s=2.0) as pool:
            pids = ranks_of(pool)
            os.kill(pids[1], signal.SIGSTOP)
            sink = make_sink()
            sink.submit(pool, [make_request("sum")])
            assert (await sink.outcome()).code == "deadline_exceeded"
            await until(lambda: pool.in_service and pool.statuses()[0].pid != pids[0])
        await ended(pids)

    asyncio.run(main())


def test_a_rank_that_does_not_load_fails_the_load_with_its_number(make_group) -> None:
    async def main() -> None:
        with pytest.raises(LoadFailed) as error:
            async with pool_in_service(make_group(model_config={"fails": 2})):
                pass
        assert "rank 2: handler handler.py raised ValueError: rank has no weights" in error.value.detail

    asyncio.run(main())


RANK = """
import os, socket, sys
from torchere.serving.workers.executor import LoadSpec
from torchere.serving.workers.rank import serve_rank

spec = LoadSpec("demo", "1.0", ".", "handler.py", ranks=2)
serve_rank(os.getppid(), spec, 1, socket.socket(fileno=int(sys.argv[1])), None)
"""


@pytest.mark.parametrize("buffering", ["", "1"])
def test_lines_of_ranks_are_whole_and_at_once_and_records_name_them(
    make_group, monkeypatch, caplog, buffering
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", buffering)
    caplog.set_level("INFO")

    def lines(text: str) -> list[Any]:
        return [record for record in caplog.records if record.getMessage().startswith(text)]

    async def main() -> None:
        async with pool_in_service(make_group()):
            await until(lambda: len(lines("rank")) == 3 and len(lines("loaded")) == 3)

    asyncio.run(main())
    assert sorted(record.getMessage() for record in lines("rank")) == [
        f"rank {rank} of 3" for rank in range(3)
    ]
    assert sorted(record.rank for record in lines("loaded")) == ["0", "1", "2"]


def test_a_rank_whose_rank_0_is_gone_ends_without_a_traceback(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", RANK, str(theirs.fileno())]
    rank = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, cwd=tmp_path)
    theirs.close()
    ours.sendall(encode_frame(Ping()))
    assert select.select([ours], [], [], 60)[0]
    ours.close()  # with its answer unread: the rank's end is reset
    assert rank.communicate(timeout=60) == (None, b"")
    assert rank.returncode == 0
