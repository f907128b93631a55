"""The restart rule as a table."""

import pytest

from torchere.serving.workers.loss import BACKOFF_S, restart_delay_s


@pytest.mark.parametrize(
    ("losses", "expected"), list(enumerate((0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144), start=1))
)
def test_the_first_restart_is_immediate_and_the_next_ones_back_off(losses: int, expected: int) -> None:
    assert restart_delay_s(losses, first_loss_s=0.0, now_s=1.0, max_retry_timeout_s=300.0) == expected


def test_the_back_off_stops_growing() -> None:
    assert restart_delay_s(1000, 0.0, 1.0, 300.0) == BACKOFF_S[-1]


def test_it_gives_up_when_the_recovery_window_is_over() -> None:
    assert restart_delay_s(9, 100.0, 400.0, 300.0) == BACKOFF_S[8]
    assert restart_delay_s(9, 100.0, 400.1, 300.0) is None


def test_a_window_of_zero_means_never_again() -> None:
    assert restart_delay_s(1, 5.0, 5.1, 0.0) is None
