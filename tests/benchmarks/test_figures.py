"""The arithmetic of the benchmarks: medians, ratios within a round, goals."""

import pytest
from harness.figures import Goal, Spread, judge, spread

FASTER = Goal("faster", "rps", 1.5, against=("slow", "slower"))
SOONER = Goal("sooner", "p50", 0.5, more_is_better=False, against=("slow", "slower"))


def test_a_spread_is_the_median_and_both_ends_of_what_was_measured():
    assert spread([3.0, None, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)


def test_nothing_measured_has_no_spread():
    assert spread([None, None]) is None
    assert spread([]) is None


def test_a_ratio_is_taken_within_each_round():
    samples = {"torchere": {"rps": [100.0, 10.0, 30.0]}, "slow": {"rps": [50.0, 5.0, 10.0]}}
    assert judge(FASTER, samples).spread == Spread(2.0, 2.0, 3.0, 3)


def test_the_best_peer_of_each_round_is_what_counts():
    samples = {
        "torchere": {"rps": [100.0, 100.0]},
        "slow": {"rps": [50.0, 20.0]},
        "slower": {"rps": [10.0, 80.0]},
    }
    verdict = judge(FASTER, samples)
    assert verdict.spread == Spread(1.625, 1.25, 2.0, 2)
    assert verdict.best_peer == "slower"  # by its median, 45 to 35
    assert verdict.met is True


def test_where_less_is_better_the_best_peer_is_the_least():
    samples = {"torchere": {"p50": [1.0]}, "slow": {"p50": [4.0]}, "slower": {"p50": [8.0]}}
    verdict = judge(SOONER, samples)
    assert verdict.spread == Spread(0.25, 0.25, 0.25, 1)
    assert verdict.best_peer == "slow"
    assert verdict.met is True


def test_a_round_that_one_side_lost_gives_no_ratio():
    samples = {"torchere": {"rps": [100.0, None, 90.0]}, "slow": {"rps": [None, 10.0, 90.0]}}
    verdict = judge(FASTER, samples)
    assert verdict.spread == Spread(1.0, 1.0, 1.0, 1)
    assert verdict.met is False


def test_a_goal_without_its_peers_is_neither_met_nor_missed():
    verdict = judge(FASTER, {"torchere": {"rps": [100.0]}})
    assert verdict.spread is None
    assert verdict.met is None


def test_a_goal_against_nobody_is_about_the_value_itself():
    goal = Goal("soon back", "back_s", 0.5, more_is_better=False)
    assert judge(goal, {"torchere": {"back_s": [0.6, 0.4, 0.5]}}).met is True


def test_a_goal_may_compare_two_figures_of_one_contender():
    goal = Goal("goodput", "goodput", 0.9, True, ("torchere",), "torchere", "peak")
    verdict = judge(goal, {"torchere": {"goodput": [95.0], "peak": [100.0]}})
    assert verdict.spread is not None
    assert verdict.spread.median == pytest.approx(0.95)
