from __future__ import annotations

import pytest
import torch

from torchere.handlers.devices import choose_device


def test_without_an_accelerator_it_is_the_cpu() -> None:
    assert choose_device(None) == ("cpu", torch.device("cpu"))


def test_a_gpu_that_is_not_there_falls_back_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert choose_device(0).map_location == "cpu"


def test_a_cuda_gpu_is_taken_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert choose_device(1) == ("cuda", torch.device("cuda:1"))
    assert choose_device(None).map_location == "cpu"


def test_tensor_cores_are_used_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch, "set_float32_matmul_precision", chosen.append)
    choose_device(0)
    assert chosen == ["high"]


def test_an_intel_gpu_needs_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert choose_device(0).map_location == "cpu"
    monkeypatch.setenv("TS_IPEX_GPU_ENABLE", "true")
    assert choose_device(0) == ("xpu", torch.device("xpu:0"))
