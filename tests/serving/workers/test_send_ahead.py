"""What is sent to a worker ahead."""

import pytest

from torchere.serving.workers.send_ahead import inside_a_lane


@pytest.mark.parametrize(
    ("mean_run_s", "batches"), [(0.0, 8), (0.0005, 8), (0.0015, 5), (0.0019, 4), (0.002, 1), (1.0, 1)]
)
@pytest.mark.parametrize("lanes", [1, 3])
def test_the_quicker_a_lane_is_the_more_it_gets(mean_run_s: float, batches: int, lanes: int) -> None:
    assert inside_a_lane(mean_run_s, lanes) == (2 if lanes > 1 and mean_run_s == 0.002 else batches)


@pytest.mark.parametrize(("mean_run_s", "batches"), [(0.009, 2), (0.01, 1), (float("inf"), 1)])
def test_lanes_that_share_a_socket_have_a_batch_each_ahead_for_longer(
    mean_run_s: float, batches: int
) -> None:
    assert inside_a_lane(mean_run_s, 2) == batches
    assert inside_a_lane(mean_run_s, 1) == 1
