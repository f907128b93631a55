import pytest
from saturation import CALM, Run, judge, p99_by_second


def run_of(gauge, answers=()):
    return Run(100.0, 10.0, list(answers), 0, list(enumerate(gauge)))


def test_the_p99_of_a_second_is_known_at_its_end():
    answers = [(0.5, 10.0), (1.2, 20.0), (1.9, 30.0)]
    assert p99_by_second(answers) == [(1.0, 10.0), (2.0, pytest.approx(30.0, abs=0.5))]


def test_a_gauge_that_warns_first_and_calms_down_is_good():
    verdict = judge(run_of([0.5, 1.5, 1.5, 1.5, 0.2, 0.2, 0.2], [(3.5, 400.0)]))
    assert (verdict.saturated_s, verdict.slow_s, verdict.good) == (1, 4.0, True)


def test_a_gauge_may_warn_of_what_does_not_come():
    assert judge(run_of([1.5, 1.5, 0.0, 0.0, 0.0], [(1.0, 10.0)])).good


@pytest.mark.parametrize(
    ("gauge", "answers"),
    [
        ([0.5, 0.5, 0.5], [(0.5, 400.0)]),  # it never warned
        ([0.5, 0.5, 1.8, 1.8, 0.1, 0.1, 0.1], [(0.5, 400.0)]),  # too late
        ([1.5, 1.5, 1.5], [(2.0, 400.0)]),  # it did not calm down
    ],
)
def test_other_gauges_are_no_signal(gauge, answers):
    verdict = judge(run_of(gauge, answers))
    assert not verdict.good
    assert verdict.slow_s is not None
    assert verdict.saturated_s is None or verdict.slow_s < verdict.saturated_s or verdict.end >= CALM
