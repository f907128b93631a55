"""How executors share the cores and the GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torchere.serving.execution.devices import available_cores, gpu_count, intra_op_threads


@pytest.mark.parametrize(
    ("cores", "executors", "expected"), [(8, 2, 4), (8, 3, 2), (2, 8, 1), (4, 0, 4), (1, 1, 1)]
)
def test_all_executors_together_fit_the_cores(cores: int, executors: int, expected: int) -> None:
    assert intra_op_threads(cores, executors) == expected


def test_the_quota_of_the_cgroup_counts(tmp_path: Path) -> None:
    cpu_max = tmp_path / "cpu.max"
    cpu_max.write_text("50000 100000\n")
    assert available_cores(cpu_max) == 1


@pytest.mark.parametrize("text", ["max 100000\n", "nonsense", ""])
def test_without_a_quota_the_affinity_counts(tmp_path: Path, text: str) -> None:
    cpu_max = tmp_path / "cpu.max"
    cpu_max.write_text(text)
    assert available_cores(cpu_max) == available_cores(tmp_path / "absent")


@pytest.mark.parametrize(("most", "expected"), [(None, 4), (2, 2), (9, 4), (0, 0)])
def test_no_more_gpus_are_used_than_there_are_and_the_operator_says(
    most: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert gpu_count(most) == expected
