"""When a tiny model's batches are more than the event loop should run."""

import pytest

from torchere.serving.execution.demand import HIGH_SHARE, LOW_SHARE, WINDOW_S, Demand

START_S = 1000.0
STEP_S = 0.01


def fed(share: float, *, piled_every: int = 1, for_s: float = 3 * WINDOW_S) -> tuple[Demand, list[bool]]:
    """A model whose batches come every `STEP_S` and take `share` of a core."""
    demand, said = Demand(), []
    for number in range(int(for_s / STEP_S)):
        is_piled = number % piled_every == 0
        said.append(demand.add(START_S + number * STEP_S, share * STEP_S, is_piled=is_piled))
    return demand, said


def test_batches_that_pile_up_and_keep_a_core_busy_are_too_much_once_a_window() -> None:
    _, said = fed(2 * HIGH_SHARE)
    assert sum(said) == 2
    assert not any(said[: int(WINDOW_S / STEP_S)])


@pytest.mark.parametrize(
    ("share", "piled_every"),
    [
        pytest.param(HIGH_SHARE / 2, 1, id="little work"),
        pytest.param(2 * HIGH_SHARE, 3, id="few piles"),
        pytest.param(2 * HIGH_SHARE, 10**9, id="hardly any"),
    ],
)
def test_little_work_and_batches_that_seldom_pile_up_are_not_too_much(share: float, piled_every: int) -> None:
    assert not any(fed(share, piled_every=piled_every)[1])


def test_a_burst_after_a_long_pause_is_not_too_much() -> None:
    demand, _ = fed(LOW_SHARE)
    said = [demand.add(START_S + 1000 + number * 1e-4, 1e-4, is_piled=True) for number in range(1000)]
    assert not any(said)


@pytest.mark.parametrize(("share", "is_low"), [(2 * LOW_SHARE, False), (LOW_SHARE / 2, True)])
def test_only_windows_under_the_low_share_count_as_little_to_do(share: float, is_low: bool) -> None:
    low_for_s = fed(share, for_s=20.0)[0].low_for_s(START_S + 20)
    assert (low_for_s > 20) if is_low else (low_for_s <= 2 * WINDOW_S)


def test_little_to_do_counts_from_the_last_busy_window_on() -> None:
    demand, _ = fed(2 * LOW_SHARE, piled_every=10**9)
    busy_until_s = START_S + 3 * WINDOW_S
    assert demand.low_for_s(busy_until_s + 60) == pytest.approx(60, abs=2 * WINDOW_S)
