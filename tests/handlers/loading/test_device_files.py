"""The lists of device files agree: where a GPU is found, a strict sandbox opens its files."""

from __future__ import annotations

from fnmatch import fnmatch

import pytest

from torchere.handlers.loading.device_files import CUDA, GPUS, OPENED


@pytest.mark.parametrize(
    "file", ["/dev/nvidia0", "/dev/dxg", "/dev/nvmap", "/dev/kfd", "/dev/dri/renderD128"]
)
def test_a_file_by_which_a_gpu_is_found_may_be_opened(file: str) -> None:
    assert any(fnmatch(file, pattern) for pattern in GPUS)
    assert any(fnmatch(file, pattern) or file.startswith(f"{pattern}/") for pattern in OPENED)


def test_every_gpu_of_cuda_is_a_gpu() -> None:
    assert set(CUDA) < set(GPUS)
