"""A pool whose handlers attack their worker; `pythonpath` of pytest's configuration leads here."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
from pools import pool_in_service, until

from torchere.serving.types import InferRequest, InferResponse, Parameter
from torchere.serving.workers.executor import LoadSpec
from torchere.serving.workers.heartbeat import HeartbeatSettings
from torchere.serving.workers.pool import WorkerPool
from torchere.serving.workers.run import Run

TICK_S = 0.01
# Of the loop between two ticks, whatever a worker does. What it computes does not depend on other processes;
# a loop that waits for a worker stands for as long as the worker hangs.
MOST_COMPUTED_S = 1.0
MOST_BLOCKED_S = 20.0
DATA, CONTROL = "sockets()[0]", "sockets()[2]"
HANGS: dict[str, Any] = {"response_timeout_s": 0.5}  # for runs that are not answered
MOST_GROWTH_BYTES = 200 * 2**20

# Runs the source in its request. `sockets` finds the data socket, the socket that passes those of lanes, and
# the control socket as any handler can: they are the first among the descriptors, in this order.
OBEDIENT = """
    import ctypes, os, signal, socket, struct, sys, threading, time

    def sockets():
        found = []
        for name in sorted(map(int, os.listdir("/proc/self/fd"))):
            try:
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    found.append(name)
            except OSError:
                pass
        return found

    def frame(message):
        import msgspec
        payload = msgspec.msgpack.encode(message)
        return struct.pack(">I", len(payload)) + payload

    def write(descriptor, content):
        while content:
            content = content[os.write(descriptor, content):]

    def page():
        for line in open("/proc/self/maps"):
            if "torchere-lanes" in line:
                start, end = (int(one, 16) for one in line.split()[0].split("-"))
                return start, end - start, line.split()[0]

    class Handler:
        def initialize(self, context):
            pass

        def handle(self, data, context):
            for row in data:
                source = bytes(row["body"])
                if not source.startswith(b"#large"):
                    exec(source.decode(), globals() | {"context": context})
            return ["done"] * len(data)
"""


class Ledger:
    """Counts the outcomes of every run that was submitted."""

    def __init__(self) -> None:
        self.ended: dict[Any, list[Any]] = {}
        self.changed = asyncio.Event()

    def run_part(self, run: Any, index: int, part: InferResponse) -> None:
        return None

    def run_done(self, run: Any, report: Any) -> None:
        self.ended[run].append(report)
        self.changed.set()

    def run_returned(self, run: Any) -> None:
        self.ended[run].append(None)
        self.changed.set()

    def submit(self, pool: WorkerPool, requests: list[InferRequest]) -> Any:
        run = Run(requests, self, time.monotonic())
        self.ended[run] = []
        pool.submit(run)
        return run

    async def report(self, run: Any) -> Any:
        """What the run ended with; None: it was given back."""

        async def ended() -> None:
            while not self.ended[run]:
                self.changed.clear()
                await self.changed.wait()

        await asyncio.wait_for(ended(), 30)
        return self.ended[run][0]


class Rig:
    """A pool, its ledger, and the longest that the loop computed and stood still between two ticks."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.ledger = Ledger()
        self.computed_s = 0.0
        self.blocked_s = 0.0

    async def tick(self) -> None:
        while True:
            before_s, computed_s = time.monotonic(), time.thread_time()
            await asyncio.sleep(TICK_S)
            self.blocked_s = max(self.blocked_s, time.monotonic() - before_s - TICK_S)
            self.computed_s = max(self.computed_s, time.thread_time() - computed_s)

    @property
    def loop_went_on(self) -> bool:
        """Whether nothing has held up the loop."""
        return self.computed_s < MOST_COMPUTED_S and self.blocked_s < MOST_BLOCKED_S

    async def run(self, *sources: str | bytes) -> Any:
        """The outcome of the first request of a batch; None: the batch was given back."""
        report = await self.ledger.report(self.submit(*sources))
        return None if report is None else report.outcomes[0]

    def submit(self, *sources: str | bytes) -> Any:
        bodies = [source.encode() if isinstance(source, str) else source for source in sources]
        return self.ledger.submit(
            self.pool, [InferRequest("a", (Parameter("body", body),)) for body in bodies]
        )

    @property
    def pid(self) -> int:
        pid: int = self.pool.statuses()[0].pid
        return pid

    async def attack(self, *sources: str) -> None:
        """Run each source, and have the worker answer again behind it."""
        for source in sources:
            await until(lambda: self.pool.free, 40)  # a signal may end the worker behind its answer
            await self.run(source)
            await self.answers_again()
            assert self.loop_went_on, source

    async def answers_again(self) -> None:
        """Wait until the worker is in service, and have it answer."""
        for _ in range(5):
            await until(lambda: self.pool.free, 40)
            outcome = await self.run("pass")
            if isinstance(outcome, InferResponse):
                assert outcome.body == b"done"
                return
        raise AssertionError(f"the worker does not come back: {outcome}")


@asynccontextmanager
async def rig_of(spec: LoadSpec, count: int = 1, **changes: Any) -> AsyncIterator[Rig]:
    """A pool in service; its end checks the ledger, the loop and the memory of this process."""
    settings: dict[str, Any] = {
        "response_timeout_s": 20.0,
        "max_retry_timeout_s": 1000.0,
        "heartbeat": HeartbeatSettings(1.0, 2.0, 4.0),
    }
    async with pool_in_service(spec, count, **{**settings, **changes}) as pool:
        rig = Rig(pool)
        before = psutil.Process().memory_info().rss
        ticking = asyncio.ensure_future(rig.tick())
        try:
            yield rig
        finally:
            ticking.cancel()
        assert psutil.Process().memory_info().rss - before < MOST_GROWTH_BYTES
        assert rig.loop_went_on
