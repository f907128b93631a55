import pytest
from autoscaling import FAST, READY_S, SATURATION, Autoscaler, Policy, Scaling, day, run, wanted


@pytest.mark.parametrize(
    ("replicas", "values", "expected"),
    [
        (4, [1.2] * 4, 6),
        (4, [0.2] * 4, 1),
        (4, [0.87] * 4, 4),  # within the tolerance
        (4, [1.6, 1.6, None, None], 4),  # enough are starting
        (4, [2.0, 2.0, 2.0, None], 8),
        (4, [0.2, 0.2, None, None], 3),  # the missing ones count as the target
        (3, [None] * 3, 3),
    ],
)
def test_replicas_follow_the_ratio_of_values_and_target(replicas, values, expected):
    assert wanted(replicas, values, 0.8) == expected


def test_scaling_down_waits_for_the_highest_wish_of_its_window():
    scaler = Autoscaler(Scaling("", 0.8, down_window_s=60, down=(Policy(60, percent=100),), least=1))
    assert scaler.decide(0, 10, [0.8] * 10) == 10
    assert scaler.decide(30, 10, [0.08] * 10) == 10
    assert scaler.decide(60, 10, [0.4] * 10) == 10
    assert scaler.decide(61, 10, [0.08] * 10) == 5


def test_a_policy_limits_the_change_within_its_period_and_the_larger_one_counts():
    scaler = Autoscaler(Scaling("", 0.5, up=(Policy(30, percent=100),), most=100))
    assert scaler.decide(0, 2, [2.0] * 2) == 4
    assert scaler.decide(15, 4, [2.0] * 4) == 4
    assert scaler.decide(31, 4, [2.0] * 4) == 8
    assert Autoscaler(Scaling("", 0.5, up=FAST)).decide(0, 2, [2.0] * 2) == 6


def test_a_day_has_the_same_requests_for_each_seed_and_twice_as_many_at_twice_the_peak():
    assert day(3, 100.0) == day(3, 100.0) != day(4, 100.0)
    assert sum(day(3, 200.0)) == pytest.approx(2 * sum(day(3, 100.0)), rel=0.01)


def test_more_pods_come_with_the_load_and_go_after_it():
    traffic = [20] * 600 + [200] * 1200 + [20] * 1800
    found = run(SATURATION, traffic)
    assert found.offered == sum(traffic)
    assert found.most >= 5
    assert 0 < found.refused < 200 * (READY_S + 60)
    assert found.pod_s < 0.6 * found.most * len(traffic)
