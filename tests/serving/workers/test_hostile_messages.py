"""What hostile handlers write: each run ends once, the worker comes back, and the loop goes on."""

import asyncio
import logging
import os
import signal
from typing import Any

import pytest
from hostile_workers import CONTROL, DATA, HANGS, OBEDIENT, rig_of
from pools import pool_in_service

from torchere.serving.errors import DeadlineExceeded, ExecutorDied, LoadFailed, ServingError

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
    "a large answer of less than nothing": "frame([13, 1, [], 0.0, 0.0, [], [0.0] * 3, '', [[0, -1]]])",
    "large answers beyond the limit": "frame([13, 1, [], 0.0, 0.0, [], [0.0] * 3, '', [[0, 2**30]] * 3])",
    "a slot that does not exist": "frame([13, 1, [[21, b'']], 0.0, 0.0, [], [0.0] * 3, '', [[0, 100]], 8])",
    "more than a slot has": "frame([13, 1, [[21, b'']], 0.0, 0.0, [], [0.0] * 3, '', [[0, 2**22 + 1]], 0])",
}


@pytest.mark.parametrize("target", [DATA, CONTROL], ids=["data", "control"])
@pytest.mark.parametrize("then", ["", "; time.sleep(3600)"], ids=["it answers", "it hangs"])
def test_garbage_on_a_socket_costs_the_worker_alone(hostile: Any, target: str, then: str) -> None:
    async def main() -> None:
        async with rig_of(hostile(), **HANGS) as rig:
            await rig.attack(*(f"write({target}, {garbage}){then}" for garbage in GARBAGE.values()))

    asyncio.run(main())


def test_a_report_for_a_run_that_it_was_not_given_is_ignored(hostile: Any) -> None:
    async def main() -> None:
        async with rig_of(hostile()) as rig:
            forged = "[13, {}, [[21, b'forged']], 0.0, 0.0, []]"
            runs = ", ".join(forged.format(run_id) for run_id in (0, -1, 17, 2**63))
            outcome = await rig.run(f"[write({DATA}, frame(each)) for each in [{runs}]]")
            assert outcome.body == b"done"
            await rig.answers_again()

    asyncio.run(main())


def test_two_reports_for_one_run_are_one(hostile: Any) -> None:
    async def main() -> None:
        async with rig_of(hostile()) as rig:
            forged = "frame([13, 1, [[21, b'forged']], 0.0, 0.0, []])"
            outcome = await rig.run(f"write({DATA}, {forged} * 1000)")
            assert outcome.body == b"forged"
            await rig.answers_again()

    asyncio.run(main())


@pytest.mark.parametrize("outcomes", ["[]", "[[21, b'one']] * 3", "[[21, b'one']] * 100000"])
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
        async with rig_of(hostile(), **HANGS) as rig:
            forged = f"frame([13, 1, [{failure}], 0.0, 0.0, [], [0.0] * 3, '', {said}]) + {then}"
            await rig.attack(f"write({DATA}, {forged}); time.sleep(3600)")
            await rig.answers_again()

    asyncio.run(main())


@pytest.mark.parametrize(
    "attack",
    [
        f"write({DATA}, struct.pack('>I', 2**30)); [write({DATA}, bytes(2**20)) for _ in range(1024)]",
        f"write({DATA}, frame([13, 1, [[21, b'']], 0.0, 0.0, [], [0.0] * 3, '', [[0, 2**30]]])); "
        f"[write({DATA}, bytes(2**20)) for _ in range(1024)]",
    ],
    ids=["a frame", "an answer"],
)
def test_a_worker_that_sends_a_gigabyte_is_not_read_to_its_end(hostile: Any, attack: str) -> None:
    async def main() -> None:
        async with rig_of(hostile()) as rig:
            outcome = await rig.run(attack)
            assert "expected at most" in f"{outcome} {outcome.detail}"
            await rig.answers_again()

    asyncio.run(main())


def test_times_that_are_no_times_harm_nothing(hostile: Any) -> None:
    async def main() -> None:
        async with rig_of(hostile()) as rig:
            for run_id, took_s in ((1, "float('nan')"), (3, "float('inf')"), (5, "-1e300")):
                forged = f"frame([13, {run_id}, [[21, b'x']], {took_s}, {took_s}, []])"
                assert (await rig.run(f"write({DATA}, {forged})")).body == b"x"
                await rig.answers_again()
                assert rig.pool.ahead >= 0

    asyncio.run(main())


def test_parts_of_runs_and_requests_that_do_not_exist_are_ignored(hostile: Any) -> None:
    async def main() -> None:
        async with rig_of(hostile()) as rig:
            parts = "[[12, 1, -1, [21, b'x']], [12, 1, 99, [21, b'x']], [12, 99, 0, [21, b'x']]]"
            outcome = await rig.run(f"[write({DATA}, frame(each)) for each in {parts} * 1000]")
            assert outcome.body == b"done"
            await rig.answers_again()

    asyncio.run(main())


def test_a_flood_of_forged_lanes_costs_little_memory(hostile: Any) -> None:
    async def main() -> None:
        async with rig_of(hostile(), **HANGS) as rig:
            await rig.run(f"write({CONTROL}, frame([15]) * 1_000_000); time.sleep(3600)")
            await rig.answers_again()

    asyncio.run(main())


FORGES_ITS_WARM_UP = f"""{OBEDIENT}
        def warmup_data(self):
            write({CONTROL}, frame([10]))
            time.sleep(0.5)
"""


@pytest.mark.parametrize("shares_weights", [True, False])
def test_a_worker_that_says_too_early_that_it_is_warm_does_not_load(
    make_spec: Any, *, shares_weights: bool
) -> None:
    async def main() -> None:
        with pytest.raises(LoadFailed) as failure:
            async with pool_in_service(make_spec(FORGES_ITS_WARM_UP, shares_weights=shares_weights)):
                pass
        assert "warm before they were" in failure.value.detail

    asyncio.run(main())


@pytest.mark.parametrize("line", [r"b'\n'", r"b'line\n'", r"b'no end'", r"b'\x1e' * 100 + b'\n'"])
def test_endless_output_does_not_keep_the_loop_from_others(
    hostile: Any, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)

    async def main() -> None:
        async with rig_of(hostile(), **HANGS) as rig:
            outcome = await rig.run(f"while True: os.write(1, {line} * (65536 // len({line})))")
            assert isinstance(outcome, DeadlineExceeded)
            await rig.answers_again()

    asyncio.run(main())


def test_a_stopped_worker_that_is_sent_large_batches_does_not_block_the_loop(hostile: Any) -> None:
    async def main() -> None:
        async with rig_of(hostile(batch_size=4), **HANGS) as rig:
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
