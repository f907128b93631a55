"""The arithmetic of `benchmarks/old_and_new.py`: intervals of a median, verdicts, the order of pairs."""

import pytest
from harness.pairs import NEW, OLD, Interval, Wanted, interval, middle, ratios, turns, verdict


def test_nine_values_give_the_second_and_the_eighth():
    found = interval([9.0, 1.0, 5.0, 3.0, 7.0, 2.0, 8.0, 4.0, 6.0])
    assert (found.low, found.median, found.high) == (2.0, 5.0, 8.0)
    assert found.coverage == pytest.approx(1 - 2 * 10 / 512)  # at most one of nine below the median


def test_the_interval_is_the_narrowest_that_covers_enough():
    values = [float(value) for value in range(1, 22)]
    narrow, wide = interval(values), interval(values, level=0.99)
    assert 0.9 <= narrow.coverage < wide.coverage
    assert wide.low < narrow.low < narrow.median < narrow.high < wide.high


def test_few_values_give_their_ends_and_say_how_little_that_covers():
    assert interval([2.0, 1.0, 3.0]) == Interval(2.0, 1.0, 3.0, 0.75)
    assert interval([2.0]) == Interval(2.0, 2.0, 2.0, 0.0)


def test_no_values_have_no_interval():
    with pytest.raises(ValueError, match="no values"):
        interval([])


def test_a_pair_that_one_side_lost_gives_no_ratio():
    assert ratios([4.0, None, 9.0, 1.0], [2.0, 5.0, None, 0.0]) == [2.0]


@pytest.mark.parametrize(
    ("low", "median", "high", "more_is_better", "said"),
    [
        (1.0, 1.1, 1.2, True, "reached"),
        (0.8, 0.9, 0.99, True, "MISSED"),
        (0.9, 1.05, 1.2, True, "open, median reaches"),
        (0.8, 0.95, 1.2, True, "open, median misses"),
        (0.8, 0.9, 1.0, False, "reached"),
        (1.1, 1.2, 1.3, False, "MISSED"),
        (0.9, 0.95, 1.3, False, "open, median reaches"),
    ],
)
def test_a_goal_is_decided_by_the_whole_interval(low, median, high, more_is_better, said):
    assert verdict(Interval(median, low, high, 0.96), 1.0, more_is_better=more_is_better) == said


def test_too_few_pairs_decide_nothing():
    assert verdict(Interval(3.0, 2.0, 4.0, 0.75), 1.0, more_is_better=True) == "open, median reaches"


def test_the_old_tree_is_first_in_every_other_pair_and_the_peers_last():
    names = [OLD, NEW, "peer"]
    assert [turns(names, number) for number in range(3)] == [names, [NEW, OLD, "peer"], names]


def test_a_goal_may_be_lower_where_bodies_travel_inside_frames():
    goal = Wanted("row", "rps", "peer", 1.1, inline=1.0)
    assert (goal.limit(inline=False), goal.limit(inline=True)) == (1.1, 1.0)
    assert Wanted("row", "rps", "peer", 1.1).limit(inline=True) == 1.1


def test_the_middle_is_of_what_was_measured():
    assert middle({"rps": [3.0, None, 1.0]}, "rps") == 2.0
    assert middle({}, "rps") is None
