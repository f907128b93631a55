"""What is sent to a worker ahead."""

import pytest

from torchere.serving.execution.send_ahead import ahead_of_threads, depth


@pytest.mark.parametrize(
    ("mean_run_s", "batches"), [(0.0, 8), (0.0005, 8), (0.0015, 5), (0.0019, 4), (0.002, 1), (1.0, 1)]
)
def test_the_quicker_a_worker_is_the_more_it_gets(mean_run_s: float, batches: int) -> None:
    assert depth(mean_run_s) == batches


@pytest.mark.parametrize(
    ("mean_wall_s", "batches"), [(0.0005, 3), (0.009, 3), (0.01, 0), (1.0, 0), (float("inf"), 0)]
)
def test_threads_have_a_batch_each_in_their_inbox_while_they_are_quick(
    mean_wall_s: float, batches: int
) -> None:
    assert ahead_of_threads(3, mean_wall_s) == batches
