from __future__ import annotations

import pytest
import torch

from torchere.handlers.devices import choose_device, gpu_is_usable, own_stream, to_device

CPU = torch.device("cpu")


def test_without_an_accelerator_it_is_the_cpu() -> None:
    assert choose_device(None) == ("cpu", torch.device("cpu"))


def test_a_gpu_that_is_not_there_falls_back_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert choose_device(0).map_location == "cpu"


def test_a_cuda_gpu_is_taken_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert choose_device(1) == ("cuda", torch.device("cuda:1"))
    assert choose_device(None).map_location == "cpu"


def test_tensor_cores_are_used_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (8 if gpu else 7, 0))
    monkeypatch.setattr(torch, "set_float32_matmul_precision", chosen.append)
    choose_device(0)
    assert chosen == []
    choose_device(1)
    assert chosen == ["high"]


def test_an_intel_gpu_needs_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert choose_device(0).map_location == "cpu"
    monkeypatch.setenv("TS_IPEX_GPU_ENABLE", "true")
    assert choose_device(0) == ("xpu", torch.device("xpu:0"))


def test_what_is_on_its_device_stays_as_it_is() -> None:
    tensor = torch.zeros(100_000)
    assert to_device(tensor, CPU) is tensor
    assert to_device(tensor, "cpu") is tensor


def test_without_cuda_a_gpu_is_not_asked() -> None:
    assert gpu_is_usable()


@pytest.mark.parametrize(("error", "usable"), [(None, True), (RuntimeError("device-side assert"), False)])
def test_a_gpu_that_fails_again_is_lost(
    error: Exception | None, usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def synchronize() -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert gpu_is_usable() is usable


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_large_tensors_get_there_unharmed_while_their_memory_is_used_again() -> None:
    gpu = torch.device("cuda:0")
    own_stream(0)
    copies = [to_device(torch.full((1 << 20,), float(number)), gpu) for number in range(50)]
    assert [copy.mean().item() for copy in copies] == [float(number) for number in range(50)]
    assert torch.cuda.current_stream() != torch.cuda.default_stream()
