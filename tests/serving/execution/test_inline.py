"""When batches run on the event loop."""

import math

import pytest

from torchere.serving.execution.inline import (
    FIRST_TRIAL,
    LONGEST_QUICK_S,
    QUICK_S,
    QUICK_WALL_S,
    SLOW_CPU_S,
    SLOW_WALL_S,
    InlineChoice,
)


def after_quick_runs(count: int, allowed: bool = True) -> InlineChoice:
    choice = InlineChoice(allowed)
    for _ in range(count):
        choice.ran_in_thread(QUICK_S)
    return choice


def test_it_takes_some_quick_runs() -> None:
    assert not after_quick_runs(0).active
    assert not after_quick_runs(FIRST_TRIAL - 1).active
    assert after_quick_runs(FIRST_TRIAL).active


def test_a_model_that_is_too_slow_on_average_stays_in_threads() -> None:
    choice = after_quick_runs(FIRST_TRIAL)
    choice.ran_in_thread(2 * QUICK_S)
    assert not choice.active


def test_a_batch_of_many_quick_requests_may_take_longer() -> None:
    choice = InlineChoice(allowed=True)
    for _ in range(FIRST_TRIAL):
        choice.ran_in_thread(LONGEST_QUICK_S, requests=32)
    assert choice.active
    choice.ran_in_thread(2 * LONGEST_QUICK_S, requests=32)
    assert not choice.active


def test_a_longer_run_on_many_bytes_is_still_less_than_what_the_loop_does_with_them() -> None:
    few, shared, many = [InlineChoice(allowed=True) for _ in range(3)]
    for _ in range(FIRST_TRIAL):
        few.ran_in_thread(2 * QUICK_S, moved_bytes=2**10)
        shared.ran_in_thread(2 * QUICK_S, requests=2, moved_bytes=2**20)
        many.ran_in_thread(2 * QUICK_S, moved_bytes=2**21)
    assert (few.active, shared.active, many.active) == (False, False, True)


@pytest.mark.parametrize("odd", [3, FIRST_TRIAL - 1])
def test_the_odd_longer_run_does_not_count_when_the_others_are_quick(odd: int) -> None:
    choice = InlineChoice(allowed=True)
    for number in range(FIRST_TRIAL):
        choice.ran_in_thread(3 * QUICK_S if number == odd else QUICK_S / 4)
    assert choice.active


def test_a_run_on_the_loop_that_is_not_slow_changes_nothing() -> None:
    choice = after_quick_runs(FIRST_TRIAL)
    choice.ran_inline(SLOW_CPU_S, SLOW_WALL_S)
    assert choice.active


@pytest.mark.parametrize(("cpu_s", "wall_s"), [(SLOW_CPU_S * 1.1, 0.0), (0.0, SLOW_WALL_S * 1.1)])
def test_one_slow_run_on_the_loop_ends_it_and_the_next_trial_is_longer(cpu_s: float, wall_s: float) -> None:
    choice = after_quick_runs(FIRST_TRIAL)
    choice.ran_inline(cpu_s, wall_s)
    assert not choice.active
    for _ in range(FIRST_TRIAL):
        choice.ran_in_thread(QUICK_S)
    assert not choice.active
    for _ in range(FIRST_TRIAL):
        choice.ran_in_thread(QUICK_S)
    assert choice.active


def test_a_handler_with_code_of_its_own_never_runs_on_the_loop() -> None:
    assert not after_quick_runs(10 * FIRST_TRIAL, allowed=False).active


@pytest.mark.parametrize(
    ("runs", "cpu_s", "wall_s", "one_at_a_time"),
    [
        (FIRST_TRIAL, QUICK_S, QUICK_WALL_S / 2, True),
        (FIRST_TRIAL, QUICK_S, QUICK_WALL_S * 1.1, False),  # it waits for something else
        (FIRST_TRIAL, QUICK_S * 1.1, QUICK_WALL_S / 2, False),
        (FIRST_TRIAL - 1, QUICK_S, QUICK_WALL_S / 2, False),
    ],
)
def test_threads_are_in_each_others_way_when_next_to_nothing_runs_without_the_gil(
    runs: int, cpu_s: float, wall_s: float, one_at_a_time: bool
) -> None:
    choice = InlineChoice(allowed=False)
    for _ in range(runs):
        choice.ran_in_thread(cpu_s, wall_s)
    assert choice.one_at_a_time is one_at_a_time


def test_how_long_a_batch_is_in_a_thread_is_not_known_at_first_and_then_a_running_mean() -> None:
    choice = InlineChoice(allowed=True)
    assert choice.mean_wall_s == math.inf
    choice.ran_in_thread(0.0, 1.0)
    assert choice.mean_wall_s == 1.0
    choice.ran_in_thread(0.0, 2.0)
    assert choice.mean_wall_s == pytest.approx(1.1)


def test_what_waits_for_a_gpu_is_neither_for_the_loop_nor_for_one_thread_at_a_time() -> None:
    choice = InlineChoice(allowed=True, on_gpu=True)
    for _ in range(FIRST_TRIAL):
        choice.ran_in_thread(QUICK_S, QUICK_S)
    assert (choice.active, choice.one_at_a_time) == (False, False)
