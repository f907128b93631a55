"""What is sent to a worker ahead."""

import pytest

from torchere.serving.execution.send_ahead import depth


@pytest.mark.parametrize(
    ("mean_run_s", "batches"), [(0.0, 8), (0.0005, 8), (0.0015, 5), (0.0019, 4), (0.002, 1), (1.0, 1)]
)
def test_the_quicker_a_worker_is_the_more_it_gets(mean_run_s: float, batches: int) -> None:
    assert depth(mean_run_s) == batches
