"""GPUs are counted as torch counts them, without torch."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchere.serving.workers import devices as gpus

OF_CUDA = ["libc10.so", "libc10_cuda.so"]
OF_ROCM = ["libc10.so", "libc10_hip.so"]
OF_CPU = ["libc10.so"]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a machine: libraries of torch, GPUs by its driver, what CUDA may show, what torch answers."""

    def make(
        libraries: Sequence[str],
        driver: int | None,
        visible: str | None,
        nodes: bool = True,
        of_torch: str = "",
    ) -> None:
        def count(target: Any) -> int:
            target._obj.value = driver
            return 0

        library = SimpleNamespace(
            nvmlInit_v2=lambda: 9 if driver is None else 0,
            nvmlDeviceGetCount_v2=count,
            nvmlShutdown=lambda: 0,
        )
        monkeypatch.setattr(gpus, "_torch_libraries", lambda: list(libraries))
        monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
        monkeypatch.setattr(gpus, "glob", lambda pattern: [pattern] if nodes else [])
        monkeypatch.setattr(gpus, "ASK_TORCH", (sys.executable, "-c", f"print({of_torch!r})"))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return make


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, 4), ("", 0), ("2", 1), ("0, 3", 2), ("3,1,0,2", 4), ("0,4,1", 1), ("7", 0), ("1,1", 0)],
)
def test_cuda_shows_what_its_variable_names_of_what_the_driver_counts(
    machine: Any, visible: str | None, expected: int
) -> None:
    machine(OF_CUDA, 4, visible)
    assert gpus.visible_gpus() == expected


@pytest.mark.parametrize("visible", [None, "0,1"])
def test_a_torch_for_cpus_uses_no_gpu(machine: Any, visible: str | None) -> None:
    machine(OF_CPU, 4, visible)
    assert gpus.visible_gpus() == 0


def test_a_torch_for_gpus_on_a_machine_without_any_finds_none_without_asking(machine: Any) -> None:
    machine(OF_CUDA, None, None, nodes=False, of_torch="3")
    assert gpus.visible_gpus() == 0


@pytest.mark.parametrize(
    ("libraries", "driver", "visible"),
    [
        pytest.param(OF_ROCM, None, None, id="ROCm"),
        pytest.param(OF_CUDA, 4, "GPU-5f0c", id="by UUID"),
        pytest.param(OF_CUDA, 4, "MIG-0", id="an instance of a GPU"),
        pytest.param(OF_CUDA, None, None, id="a driver that does not answer"),
        pytest.param([], 4, None, id="another layout of torch"),
    ],
)
def test_otherwise_torch_is_asked(
    machine: Any, libraries: Sequence[str], driver: int | None, visible: str | None
) -> None:
    machine(libraries, driver, visible, of_torch="a warning\n3")
    assert gpus.visible_gpus() == 3


def test_a_torch_that_says_nothing_counts_as_none_with_an_error(
    machine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    machine(OF_ROCM, None, None, of_torch="")
    assert gpus.visible_gpus() == 0
    assert "the server uses none" in caplog.text


def test_the_installed_torch_counts_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for visible in (None, "", "0", "0,0"):
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible
        assert gpus.visible_gpus() == torch.cuda.device_count()


def test_other_kinds_of_gpus_are_counted_by_torch(machine: Any, caplog: pytest.LogCaptureFixture) -> None:
    machine(OF_CPU, None, None, of_torch="2")
    assert gpus.gpu_count(None, "xpu") == 2
    assert gpus.gpu_count(1, "xpu") == 1
    assert gpus.gpu_count(3, "xpu") == 2
    assert "number_of_gpu=3, and torch.xpu shows 2 GPUs" in caplog.text


def test_torch_counts_the_gpus_of_a_kind_that_this_machine_has() -> None:
    assert gpus.gpu_count(None, "xpu") == torch.xpu.device_count()
