import os

import pytest
from core_shares import Figures, Point, main, median, verdict
from harness import cgroup
from harness.errors import Unavailable


def test_the_defaults_are_compared_with_the_best_point_of_the_grid_and_not_with_their_pinned_selves():
    medians = {
        Point(): Figures(96.0, 48.0, 0.001, 2.0),
        Point(1, 1): Figures(80.0, 50.0, 0.0, 1.6),
        Point(2, 2): Figures(100.0, 40.0, 0.0, 2.0),
        Point(is_pinned=True): Figures(500.0, 500.0, 0.0, 1.0),
    }
    assert verdict(medians) == (pytest.approx(0.96), pytest.approx(0.96), True)
    medians[Point()] = Figures(96.0, 48.0, 0.02, 2.0)
    assert verdict(medians)[2] is False


def test_the_median_is_of_each_figure():
    rounds = [Figures(1.0, 9.0, 0.0, 2.0), Figures(3.0, 7.0, 0.2, 2.0), Figures(2.0, 8.0, 0.1, 2.0)]
    assert median(rounds) == Figures(2.0, 8.0, 0.1, 2.0)


def test_where_no_group_can_be_made_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Unavailable, match="needs root"), cgroup.cpu_group(2.0):
        pass
    assert main([]) == 2
    assert capsys.readouterr().out == "not measured: a control group needs root and unshare (util-linux)\n"
