"""The restart rule as a table."""

import pytest

from torchere.serving.workers.loss import (
    BACKOFF_S,
    HEALTHY_S,
    OUTSIDE_DELAY_S,
    Loss,
    LossKind,
    LossRow,
    loss_of_exit,
    loss_of_rank,
)

CRASH = loss_of_exit(-11)


def delays_of(losses: int) -> list[float | None]:
    """Return the delay after each of so many crashes at once."""
    row, delays = LossRow(max_retry_timeout_s=300.0), []
    for _ in range(losses):
        row.add(CRASH, 0.0, 0.0)
        delays.append(row.restart_delay_s(0.0))
    return delays


def test_the_first_restart_is_immediate_and_the_next_ones_back_off() -> None:
    assert delays_of(13) == [0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144]


def test_the_back_off_stops_growing() -> None:
    assert delays_of(1000)[-1] == BACKOFF_S[-1]


@pytest.mark.parametrize(("down_s", "delay_s"), [(300.0, 0.0), (300.1, None)])
def test_it_gives_up_when_the_recovery_window_is_over(down_s: float, delay_s: float | None) -> None:
    row = LossRow(max_retry_timeout_s=300.0)
    row.add(CRASH, 0.0, 0.0)
    assert row.restart_delay_s(down_s) == delay_s


def test_a_window_of_zero_means_never_again() -> None:
    row = LossRow(max_retry_timeout_s=0.0)
    row.add(CRASH, 0.0, 0.0)
    assert row.restart_delay_s(0.1) is None


def test_time_in_good_health_ends_a_row_of_losses() -> None:
    row = LossRow(max_retry_timeout_s=5.0)
    for loss_s in (0.0, 3600.0, 7200.0):
        row.add(CRASH, HEALTHY_S, loss_s)
        assert (row.losses, row.restart_delay_s(loss_s)) == (1, 0.0)


def test_a_short_time_in_service_is_no_part_of_the_recovery_window() -> None:
    row = LossRow(max_retry_timeout_s=5.0)
    row.add(CRASH, 0.0, 0.0)
    row.add(CRASH, 8.0, 8.5)  # longer in service than the window
    assert (row.losses, row.restart_delay_s(8.5)) == (2, 1.0)
    row.add(CRASH, 0.0, 13.1)
    assert row.restart_delay_s(13.1) is None


FROM_OUTSIDE = pytest.mark.parametrize("loss", [loss_of_exit(-9), loss_of_exit(-15), loss_of_exit(-9, True)])
BROKEN = Loss(LossKind.LOAD, "broken")


@FROM_OUTSIDE
def test_a_worker_that_is_killed_from_outside_is_always_restarted_and_soon(loss: Loss) -> None:
    row = LossRow(max_retry_timeout_s=5.0)
    delays = []
    for number in range(12):
        row.add(loss, 0.0, number * 100.0)
        delays.append(row.restart_delay_s(number * 100.0))
    assert delays == [0, 1, 1, 2, 3, 5, 5, 5, 5, 5, 5, 5]


@FROM_OUTSIDE
def test_kills_from_outside_are_not_held_against_a_worker_that_fails_by_itself(loss: Loss) -> None:
    row = LossRow(max_retry_timeout_s=5.0)
    for number in range(12):
        row.add(loss, 0.0, number * 100.0)
    row.add(BROKEN, 0.0, 1200.0)
    assert row.restart_delay_s(1200.0) == 0.0  # its first
    row.add(loss, 0.0, 1203.0)
    row.add(BROKEN, 0.0, 1300.0)
    assert row.restart_delay_s(1300.0) == 1.0  # its second: 3 s out of service by its own fault
    assert row.restart_delay_s(1302.1) is None


def test_max_restarts_is_the_breaker_for_losses_of_its_own() -> None:
    row = LossRow(max_retry_timeout_s=300.0, max_restarts=2)
    for at in range(2):
        row.add(CRASH, 0.0, float(at))
        assert row.restart_delay_s(float(at)) is not None
    row.add(loss_of_exit(-9), 0.0, 2.0)  # from outside
    assert row.restart_delay_s(2.0) is not None
    row.add(CRASH, 0.0, 3.0)
    assert row.restart_delay_s(3.0) is None
    row.end()
    row.add(CRASH, 0.0, 4.0)
    assert row.restart_delay_s(4.0) is not None


def test_a_machine_that_stays_away_is_waited_for_without_end() -> None:
    row = LossRow(max_retry_timeout_s=5.0, max_restarts=0)
    for at in range(100):
        loss = loss_of_rank(2, 1, "its machine does not answer", is_cut_off=True)
        assert (loss.kind, loss.crashed, loss.hints_at_memory) == (LossKind.CUT_OFF, False, False)
        row.add(loss, 0.0, at * 60.0)
        delay_s = row.restart_delay_s(at * 60.0)
        assert delay_s is not None
        assert delay_s <= OUTSIDE_DELAY_S
