"""The estimate of how long an answer takes."""

import pytest

from torchere.serving.batching.service_time import ServiceTime


def after(*runs_s: float) -> ServiceTime:
    service = ServiceTime()
    for run_s in runs_s:
        service.observe(run_s)
    return service


def test_before_anything_ran_everything_is_worth_a_try() -> None:
    assert ServiceTime().answer_s(batches_before=100, executors=1) == 0.0


def test_the_estimate_follows_what_runs_take() -> None:
    assert after(0.1).mean_s == pytest.approx(0.1)
    assert after(0.1, 0.2).mean_s == pytest.approx(0.11)


def test_batches_in_front_are_shared_by_the_executors() -> None:
    service = after(0.1)
    assert service.answer_s(0, 2) == pytest.approx(0.125)
    assert service.answer_s(4, 2) == pytest.approx(0.375)
    assert service.answer_s(4, 0) == pytest.approx(0.625)


def test_an_estimate_that_turns_everybody_away_does_not_last() -> None:
    service = after(10.0)
    for _ in range(100):
        service.dropped()
    assert service.answer_s(0, 1) < 0.1
