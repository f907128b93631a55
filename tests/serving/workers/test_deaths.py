"""Workers that are killed at random moments, with runs inside: each run has exactly one outcome.

`TORCHERE_KILLS=1000 pytest tests/serving/workers/test_deaths.py` runs the long version.
"""

import asyncio
import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import psutil
import pytest
from pools import fork_launcher, new_pool, pool_in_service, until

from torchere.serving.errors import ExecutorDied
from torchere.serving.types import InferRequest, InferResponse, Parameter
from torchere.serving.workers import loss as restart
from torchere.serving.workers.executor import BatchReport
from torchere.serving.workers.pool import WorkerPool
from torchere.serving.workers.run import Run

DEATHS = int(os.environ.get("TORCHERE_KILLS", "100"))
WORKERS = 4  # that die and come back side by side

QUICK = """
    import time
    class Handler:
        def initialize(self, context): pass
        def handle(self, data, context):
            if context.request_ids[0].endswith("s"):
                context.send_partial(0, b"part")
            time.sleep(0.002)
            return [row["body"] for row in data]
"""


class Ledger:
    """What each run that was submitted has ended with."""

    def __init__(self) -> None:
        self.ends: dict[int, list[str]] = {}
        self._requests: dict[Run, int] = {}

    def submit(self, pool: WorkerPool, number: int) -> None:
        """Submit run `number`, whose answer is its number."""
        body = (Parameter("body", b"%d" % number),)
        suffix = "s" if number % 3 == 0 else ""
        requests = [InferRequest(f"{number}{suffix}", body)] * 2
        run = Run(requests, self, time.monotonic())
        self._requests[run] = number
        self.ends[number] = []
        pool.submit(run)

    def run_part(self, run: Run, index: int, part: InferResponse) -> None:
        assert not self.ends[self._requests[run]], "a part behind the end"

    def run_done(self, run: Run, report: BatchReport) -> None:
        number = self._requests[run]
        self.ends[number].append(self._kind(number, report.outcomes))

    def run_returned(self, run: Run) -> None:
        self.ends[self._requests[run]].append("given back")

    @staticmethod
    def _kind(number: int, outcomes: Sequence[Any]) -> str:
        assert len(outcomes) == 2
        if all(isinstance(outcome, ExecutorDied) for outcome in outcomes):
            return "lost"
        assert all(outcome.body == b"%d" % number for outcome in outcomes)
        return "answered"

    @property
    def open(self) -> int:
        """How many runs have not ended."""
        return sum(not ends for ends in self.ends.values())


class Pools:
    """Pools of one worker each, by kind: two lanes, or one process of one lane."""

    def __init__(self, make_spec: Any, shares_weights: bool) -> None:
        self.ledger = Ledger()
        self._lanes = 2 if shares_weights else 1
        self._numbers = itertools.count(1)
        self.launcher = fork_launcher()
        spec = make_spec(QUICK, shares_weights=shares_weights, batch_size=2)
        self.pools = [new_pool(spec, self.launcher, max_retry_timeout_s=1e9) for _ in range(WORKERS)]

    async def start(self) -> None:
        async def up(pool: WorkerPool) -> None:
            await pool.resize(self._lanes)
            await pool.warm_up()

        await asyncio.gather(*map(up, self.pools))

    def fill(self) -> None:
        """Submit as many runs as there is room for."""
        for pool in self.pools:
            while pool.free or pool.ahead:
                self.ledger.submit(pool, next(self._numbers))

    async def settle(self) -> None:
        """Wait until each run has ended and each worker serves."""
        await until(lambda: not self.ledger.open and all(pool.in_service for pool in self.pools), 30)

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self.pools))
        await self.launcher.close()
        await asyncio.sleep(0)


@pytest.mark.timeout(600 + DEATHS)
@pytest.mark.parametrize("shares_weights", [True, False], ids=["lanes", "alone"])
def test_each_run_inside_workers_that_are_killed_ends_once(
    make_spec: Any, monkeypatch: pytest.MonkeyPatch, shares_weights: bool
) -> None:
    monkeypatch.setattr(restart, "BACKOFF_S", (0.0,))

    async def main() -> None:
        all_pools, chance = Pools(make_spec, shares_weights), random.Random(7)
        await all_pools.start()
        killed: set[int] = set()
        while len(killed) < DEATHS:
            all_pools.fill()
            await asyncio.sleep(chance.random() * 0.01)
            all_pools.fill()
            pool = chance.choice(all_pools.pools)
            pid = pool.statuses()[0].pid
            if pool.in_service and pid not in killed:
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)
        await all_pools.settle()
        all_pools.fill()
        await all_pools.close()
        ends = all_pools.ledger.ends.values()
        assert {len(each) for each in ends} == {1}
        kinds = Counter(each[0] for each in ends)
        assert min(kinds["answered"], kinds["lost"], kinds["given back"]) > 0, kinds

    asyncio.run(main())


STARTS_ANOTHER = """
    import subprocess
    class Handler:
        def initialize(self, context): pass
        def handle(self, data, context):
            return [str(subprocess.Popen(["sleep", "600"]).pid)] * len(data)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_processes_that_a_lost_worker_has_started_are_ended(
    make_spec: Any, make_sink: Any, make_request: Any, number: int
) -> None:
    async def main() -> None:
        async with pool_in_service(make_spec(STARTS_ANOTHER)) as pool:
            sink = make_sink()
            sink.submit(pool, [make_request("start")])
            child = psutil.Process(int((await sink.outcome()).body))
            assert child.is_running()
            os.kill(pool.statuses()[0].pid, number)
            await until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 20)

    asyncio.run(main())


def test_a_crash_while_further_lanes_of_a_restarted_process_warm_up_is_a_crash(
    make_spec: Any, make_sink: Any, make_request: Any
) -> None:
    source = """
        import os, signal, time
        class Handler:
            def initialize(self, context): pass
            def warmup_data(self): return [{}]
            def handle(self, data, context):
                if data[0]:
                    signal.raise_signal(signal.SIGSEGV)  # by this thread: it does not go on
                if not hasattr(self, "number"):
                    for self.number in range(9):
                        try:
                            os.close(os.open(str(self.number), os.O_CREAT | os.O_EXCL))
                            break
                        except FileExistsError:
                            pass
                while self.number == 3:  # the second lane of the second process
                    time.sleep(0.01)
                return ["warm"] * len(data)
    """
    lost: list[str] = []

    async def main() -> None:
        spec = make_spec(source, shares_weights=True)
        async with pool_in_service(spec, count=2, on_lost=lost.append) as pool:
            for losses in range(2):
                await until(lambda losses=losses: len(lost) == losses and pool.free)  # type: ignore[misc]
                sink = make_sink()
                sink.submit(pool, [make_request("crash")])
                outcome = await sink.outcome()
                assert (outcome.detail, outcome.crashed) == ("killed by signal 11 (SIGSEGV)", True)

    asyncio.run(main())
    assert lost == ["signal", "signal"]
