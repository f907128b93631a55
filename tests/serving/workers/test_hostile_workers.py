"""Handlers that attack their worker: each run ends once, the worker comes back, and the loop goes on."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from pools import pool_in_service, until

from torchere.serving.errors import DeadlineExceeded, ExecutorDied, HandlerFailed, ServingError
from torchere.serving.types import InferRequest, InferResponse, Parameter
from torchere.serving.workers import loss as restart
from torchere.serving.workers.executor import LoadSpec
from torchere.serving.workers.heartbeat import HeartbeatSettings
from torchere.serving.workers.pool import WorkerPool
from torchere.serving.workers.run import Run

TICK_S = 0.01
MOST_BLOCKED_S = 1.0  # by anything a worker does; the machines of tests are slow
MOST_GROWTH_BYTES = 200 * 2**20

# Runs the source in its request. `sockets` finds the data socket and the control socket as any handler can:
# they are the first among the descriptors of the process, in this order.
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
    """A pool, its ledger, and the longest time for which the loop stood still."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.ledger = Ledger()
        self.longest_s = 0.0

    async def tick(self) -> None:
        before_s = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            self.longest_s = max(self.longest_s, now_s - before_s - TICK_S)
            before_s = now_s

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
            await self.run(source)
            await self.answers_again()
            assert self.longest_s < MOST_BLOCKED_S, source

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
        "response_timeout_s": 1.5,
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
        assert rig.longest_s < MOST_BLOCKED_S


@pytest.fixture(params=[True, False], ids=["lanes", "alone"])
def hostile(request: pytest.FixtureRequest, make_spec: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the spec of a worker of either kind that runs what it is sent."""
    monkeypatch.setattr(restart, "BACKOFF_S", (0.0,))
    return lambda **changes: make_spec(OBEDIENT, shares_weights=request.param, **changes)


DATA, CONTROL = "sockets()[0]", "sockets()[1]"
TWO_GIBS = "struct.pack('>I', 2**31)"
GARBAGE = {
    "a length over the limit": r"b'\xff' * 1000",
    "frames that are no messages": r"b'\0\0\0\x05hello' * 100",
    "empty frames": r"b'\0\0\0\0' * 100000",
    "random bytes": "os.urandom(1000000)",
    "the header of 2 GiB": TWO_GIBS,
    "the beginning of 2 GiB": TWO_GIBS + " + bytes(1000)",
    "a pong nested too deeply": r"struct.pack('>I', 200004) + b'\x92\x0e' + b'\x91' * 200001 + b'\xc0'",
    "a retirement nested too deeply": r"struct.pack('>I', 200004) + b'\x92\x10' + b'\x91' * 200001 + b'\xc0'",
    "a report with a wrong type": "frame([13, 'x', [], 0.0, 0.0, []])",
    "a tag that does not exist": "frame([99])",
    "a large answer of less than nothing": "frame([13, 1, [], 0.0, 0.0, [], [0.0] * 3, False, [[0, -1]]])",
    "large answers beyond the limit": "frame([13, 1, [], 0.0, 0.0, [], [0.0] * 3, False, [[0, 2**30]] * 3])",
}


@pytest.mark.parametrize("target", [DATA, CONTROL], ids=["data", "control"])
@pytest.mark.parametrize("then", ["", "; time.sleep(3600)"], ids=["it answers", "it hangs"])
def test_garbage_on_a_socket_costs_the_worker_alone(hostile: Any, target: str, then: str) -> None:
    async def main() -> None:
        async with rig_of(hostile()) as rig:
            await rig.attack(*(f"write({target}, {garbage}){then}" for garbage in GARBAGE.values()))

    asyncio.run(main())


def test_a_report_for_a_run_that_it_was_not_given_is_ignored(hostile: Any) -> None:
    async def main() -> None:
        async with rig_of(hostile()) as rig:
            forged = "[13, {}, [[21, [b'forged']]], 0.0, 0.0, []]"
            runs = ", ".join(forged.format(run_id) for run_id in (0, -1, 17, 2**63))
            outcome = await rig.run(f"[write({DATA}, frame(each)) for each in [{runs}]]")
            assert outcome.body == b"done"
            await rig.answers_again()

    asyncio.run(main())


def test_two_reports_for_one_run_are_one(hostile: Any) -> None:
    async def main() -> None:
        async with rig_of(hostile()) as rig:
            forged = "frame([13, 1, [[21, [b'forged']]], 0.0, 0.0, []])"
            outcome = await rig.run(f"write({DATA}, {forged} * 1000)")
            assert outcome.body == b"forged"
            await rig.answers_again()

    asyncio.run(main())


@pytest.mark.parametrize("outcomes", ["[]", "[[21, [b'one']]] * 3", "[[21, [b'one']]] * 100000"])
def test_a_wrong_number_of_outcomes_fails_the_run(hostile: Any, outcomes: str) -> None:
    async def main() -> None:
        async with rig_of(hostile(batch_size=2)) as rig:
            run = rig.submit(f"write({DATA}, frame([13, 1, {outcomes}, 0.0, 0.0, []]))", "pass")
            report = await rig.ledger.report(run)
            assert [type(outcome) for outcome in report.outcomes] == [ExecutorDied] * 2
            await rig.answers_again()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("said", "then"),
    [("[[1, 5]]", "b'hello'"), ("[[0, 5]]", "b'hello'"), ("[[0, 10**9]]", "b'hello'")],
    ids=["of no outcome", "of a failure", "that do not come"],
)
def test_forged_large_answers_cost_the_worker_alone(hostile: Any, said: str, then: str) -> None:
    failure = "[20, 'handler_failed', 'no', '', 503]"

    async def main() -> None:
        async with rig_of(hostile()) as rig:
            forged = f"frame([13, 1, [{failure}], 0.0, 0.0, [], [0.0] * 3, False, {said}]) + {then}"
            await rig.attack(f"write({DATA}, {forged}); time.sleep(3600)")
            await rig.answers_again()

    asyncio.run(main())


def test_times_that_are_no_times_harm_nothing(hostile: Any) -> None:
    async def main() -> None:
        async with rig_of(hostile()) as rig:
            for run_id, took_s in ((1, "float('nan')"), (3, "float('inf')"), (5, "-1e300")):
                forged = f"frame([13, {run_id}, [[21, [b'x']]], {took_s}, {took_s}, []])"
                assert (await rig.run(f"write({DATA}, {forged})")).body == b"x"
                await rig.answers_again()
                assert rig.pool.ahead >= 0

    asyncio.run(main())


def test_parts_of_runs_and_requests_that_do_not_exist_are_ignored(hostile: Any) -> None:
    async def main() -> None:
        async with rig_of(hostile()) as rig:
            parts = "[[12, 1, -1, [b'x']], [12, 1, 99, [b'x']], [12, 99, 0, [b'x']]]"
            outcome = await rig.run(f"[write({DATA}, frame(each)) for each in {parts} * 1000]")
            assert outcome.body == b"done"
            await rig.answers_again()

    asyncio.run(main())


def test_a_flood_of_forged_lanes_costs_little_memory(hostile: Any) -> None:
    async def main() -> None:
        async with rig_of(hostile()) as rig:
            await rig.run(f"write({CONTROL}, frame([15]) * 1_000_000); time.sleep(3600)")
            await rig.answers_again()

    asyncio.run(main())


@pytest.mark.parametrize("line", [r"b'\n'", r"b'line\n'", r"b'no end'", r"b'\x1e' * 100 + b'\n'"])
def test_endless_output_does_not_keep_the_loop_from_others(
    hostile: Any, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)

    async def main() -> None:
        async with rig_of(hostile()) as rig:
            outcome = await rig.run(f"while True: os.write(1, {line} * (65536 // len({line})))")
            assert isinstance(outcome, DeadlineExceeded)
            await rig.answers_again()

    asyncio.run(main())


def test_a_stopped_worker_that_is_sent_large_batches_does_not_block_the_loop(hostile: Any) -> None:
    async def main() -> None:
        async with rig_of(hostile(batch_size=4)) as rig:
            await rig.answers_again()
            os.kill(rig.pid, signal.SIGSTOP)
            large = b"#large" + bytes(16 * 2**20)
            runs = []
            while rig.pool.free or rig.pool.ahead:
                runs.append(rig.submit(*[large] * 4))
                await asyncio.sleep(0)
            assert len(runs) >= 2
            for run in runs:
                report = await rig.ledger.report(run)
                assert report is None or isinstance(report.outcomes[0], ServingError)
            await rig.answers_again()

    asyncio.run(main())


SPOIL = {
    "it is truncated": "os.ftruncate(descriptor, 0)",
    "it grows": "os.ftruncate(descriptor, 2**40)",
    "a hole is punched": "libc.fallocate(descriptor, 3, ctypes.c_long(0), ctypes.c_long(size))",
    "it is filled": r"os.pwrite(descriptor, b'\xff' * size, 0)",
    "its pages are removed": "libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), 9)",
    "it is unmapped": "libc.munmap(ctypes.c_void_p(start), ctypes.c_size_t(size))",
}


SPOIL_THE_PAGE = """
start, size, name = page()
libc = ctypes.CDLL(None)
try:
    descriptor = os.open("/proc/self/map_files/" + name, os.O_RDWR)
except PermissionError:
    descriptor = -1
try:
    {}
except OSError:
    pass
"""


def test_a_page_that_is_spoilt_costs_the_worker_alone(hostile: Any) -> None:
    async def main() -> None:
        async with rig_of(hostile()) as rig:
            for how in SPOIL.values():
                await rig.attack(SPOIL_THE_PAGE.format(how), "os.kill(os.getpid(), 9)")

    asyncio.run(main())


FORK = "child = ctypes.CDLL(None).fork()\nif child == 0:\n    time.sleep(100); os._exit(0)\n"
FORK_AND_TELL = FORK + "open('child', 'w').write(str(child))\n"


def test_a_child_that_keeps_the_sockets_open_does_not_keep_the_worker_from_coming_back(
    hostile: Any, tmp_path: Path
) -> None:
    async def main() -> None:
        async with rig_of(hostile()) as rig:
            # Through the C library: none of Python's hooks close the sockets in the child.
            outcome = await rig.run(FORK_AND_TELL + "os.kill(os.getpid(), 9)")
            try:
                assert isinstance(outcome, ExecutorDied)
                assert outcome.detail == "killed by signal 9 (SIGKILL)"
                await rig.answers_again()
            finally:
                os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)

    asyncio.run(main())


def test_a_worker_that_closes_its_sockets_is_replaced(hostile: Any) -> None:
    async def main() -> None:
        async with rig_of(hostile()) as rig:
            for closed in ("[:1]", "[1:2]", "[:2]"):
                closing = f"[os.close(each) for each in sockets(){closed}]"
                await rig.attack(closing, f"{closing}; time.sleep(3600)")

    asyncio.run(main())


@pytest.mark.parametrize("direction", ["SHUT_RD", "SHUT_WR", "SHUT_RDWR"])
@pytest.mark.parametrize("target", [DATA, CONTROL], ids=["data", "control"])
def test_a_worker_that_shuts_a_socket_down_is_replaced(hostile: Any, target: str, direction: str) -> None:
    async def main() -> None:
        async with rig_of(hostile()) as rig:
            await rig.run(
                f"socket.socket(fileno=os.dup({target})).shutdown(socket.{direction}); time.sleep(3600)"
            )
            await rig.answers_again()

    asyncio.run(main())


def test_a_worker_that_reads_what_it_was_sent_ahead_itself_is_replaced(hostile: Any) -> None:
    async def main() -> None:
        async with rig_of(hostile(batch_size=2)) as rig:
            await rig.answers_again()
            first = rig.submit(f"socket.socket(fileno=os.dup({DATA})).recv(1)", "pass")
            behind = rig.submit("pass", "pass")
            for run in (first, behind):
                await rig.ledger.report(run)
            await rig.answers_again()

    asyncio.run(main())


ENDS = {
    "os._exit(5)": "exited with code 5",
    "os._exit(0)": "exited with code 0",
    "ctypes.string_at(0)": "killed by signal 11 (SIGSEGV)",
    "os.abort()": "killed by signal 6 (SIGABRT)",
    "sys.setrecursionlimit(10**9)\nf = lambda x: [*map(f, [x])]\nf(1)": "killed by signal 11 (SIGSEGV)",
}


def test_a_handler_that_ends_its_process_fails_its_run_and_the_worker_comes_back(hostile: Any) -> None:
    async def main() -> None:
        async with rig_of(hostile(), response_timeout_s=20.0) as rig:
            for source, cause in ENDS.items():
                outcome = await rig.run(source)
                assert isinstance(outcome, ExecutorDied), source
                assert outcome.detail == cause
                await rig.answers_again()

    asyncio.run(main())


RAISES = [
    "sys.exit(3)",
    "raise SystemExit",
    "raise KeyboardInterrupt",
    "raise GeneratorExit",
    "f = lambda g: g(g)\nf(f)",
    "raise type('Own', (BaseException,), {'__str__': lambda self: sys.exit(1)})",
]


def test_whatever_a_handler_raises_its_worker_lives_on(hostile: Any) -> None:
    async def main() -> None:
        async with rig_of(hostile()) as rig:
            before = rig.pid
            for source in RAISES:
                assert isinstance(await rig.run(source), HandlerFailed), source
                await rig.answers_again()
                assert rig.pid == before

    asyncio.run(main())


def test_a_signal_ends_at_most_the_worker(hostile: Any) -> None:
    async def main() -> None:
        async with rig_of(hostile()) as rig:
            for number in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGPIPE"):
                signalled = f"os.kill(os.getpid(), signal.{number})"
                await rig.attack(signalled, f"{signalled}; time.sleep(0.3)")

    asyncio.run(main())


def test_a_worker_without_a_descriptor_left_answers(hostile: Any) -> None:
    source = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
held = globals().setdefault("held", [])
sys.modules["held"] = held
try:
    while True:
        held.append(os.dup(0))
except OSError:
    pass
"""

    async def main() -> None:
        async with rig_of(hostile()) as rig:
            assert (await rig.run(source)).body == b"done"
            await rig.answers_again()

    asyncio.run(main())
