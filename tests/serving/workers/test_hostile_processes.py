"""What hostile handlers do to their process: each run ends once, the worker comes back, the loop goes on."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from hostile_workers import CONTROL, DATA, HANGS, rig_of

from torchere.serving.errors import ExecutorDied, HandlerFailed
from torchere.serving.workers.loss import OUTSIDE_DELAY_S, RAISED, LossRow, loss_of_end

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
        async with rig_of(hostile(), **HANGS) as rig:
            for closed in ("[:1]", "[2:3]", "[:3]"):
                closing = f"[os.close(each) for each in sockets(){closed}]"
                await rig.attack(closing, f"{closing}; time.sleep(3600)")

    asyncio.run(main())


@pytest.mark.parametrize("direction", ["SHUT_RD", "SHUT_WR", "SHUT_RDWR"])
@pytest.mark.parametrize("target", [DATA, CONTROL], ids=["data", "control"])
def test_a_worker_that_shuts_a_socket_down_is_replaced(hostile: Any, target: str, direction: str) -> None:
    async def main() -> None:
        async with rig_of(hostile(), **HANGS) as rig:
            await rig.run(
                f"socket.socket(fileno=os.dup({target})).shutdown(socket.{direction}); time.sleep(3600)"
            )
            await rig.answers_again()

    asyncio.run(main())


def test_a_worker_that_reads_what_it_was_sent_ahead_itself_is_replaced(hostile: Any) -> None:
    async def main() -> None:
        async with rig_of(hostile(batch_size=2), **HANGS) as rig:
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
}
if sys.version_info < (3, 14):  # from then on the end of the stack is a RecursionError
    ENDS["sys.setrecursionlimit(10**9)\nf = lambda x: [*map(f, [x])]\nf(1)"] = "killed by signal 11 (SIGSEGV)"


def test_a_handler_that_ends_its_process_fails_its_run_and_the_worker_comes_back(hostile: Any) -> None:
    async def main() -> None:
        async with rig_of(hostile()) as rig:
            for source, cause in ENDS.items():
                outcome = await rig.run(source)
                assert isinstance(outcome, ExecutorDied), source
                assert outcome.detail == cause
                await rig.answers_again()

    asyncio.run(main())


RAISES = [
    "raise StopIteration",
    "f = lambda g: g(g)\nf(f)",
    "raise type('Own', (Exception,), {'__str__': lambda self: sys.exit(1)})",
]
MEANT_TO_END = {
    "sys.exit(3)": "SystemExit: 3",
    "sys.exit()": "SystemExit: ",
    "raise KeyboardInterrupt": "KeyboardInterrupt: ",
    "raise GeneratorExit": "GeneratorExit: ",
    "raise type('Own', (BaseException,), {'__str__': lambda self: sys.exit(1)})": "Own: ",
}


def test_a_worker_lives_on_whatever_error_its_handler_raises(hostile: Any) -> None:
    async def main() -> None:
        async with rig_of(hostile()) as rig:
            before = rig.pid
            for source in RAISES:
                assert isinstance(await rig.run(source), HandlerFailed), source
                await rig.answers_again()
                assert rig.pid == before

    asyncio.run(main())


def test_a_handler_that_means_to_end_its_process_gets_a_new_one_and_is_no_crash(hostile: Any) -> None:
    async def main() -> None:
        async with rig_of(hostile()) as rig:
            for source, error in MEANT_TO_END.items():
                before = rig.pid
                outcome = await rig.run(source)
                assert isinstance(outcome, ExecutorDied), source
                assert not outcome.crashed
                assert outcome.detail.startswith(f"its handler raised {error}")
                await rig.answers_again()
                assert rig.pid != before

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


def test_model_code_that_parses_the_command_line_finds_none(hostile: Any) -> None:
    source = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--size", type=int, default=3)
assert parser.parse_args().size == 3
"""

    async def main() -> None:
        async with rig_of(hostile()) as rig:
            assert (await rig.run(source)).body == b"done"

    asyncio.run(main())


def test_a_handler_that_ends_its_process_again_and_again_is_back_within_seconds() -> None:
    losses = LossRow(max_retry_timeout_s=60)
    for count in range(20):
        losses.add(loss_of_end(f"{RAISED} SystemExit: 3"), 0.0, 100.0 * count)
        delay_s = losses.restart_delay_s(100.0 * count)
        assert delay_s is not None
        assert delay_s <= OUTSIDE_DELAY_S
    assert delay_s  # it is no hot loop
