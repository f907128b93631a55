from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torchere.handlers.loading import device_files
from torchere.handlers.loading.devices import (
    choose_device,
    gpu_is_usable,
    own_stream,
    sees_only_cpu,
    to_device,
    whole_on_device,
    without_gradients,
)

CPU = torch.device("cpu")


def test_without_an_accelerator_it_is_the_cpu() -> None:
    assert choose_device(None) == torch.device("cpu")


@pytest.mark.parametrize("gpu_id", [3, "3"])  # a text comes from MockContext
def test_a_gpu_that_is_not_there_falls_back_to_the_cpu_and_says_so(
    gpu_id: int | str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert choose_device(None) == CPU
    assert caplog.text == ""
    assert choose_device(gpu_id) == CPU
    assert "GPU 3 is to be used, and torch can't" in caplog.text


@pytest.mark.parametrize(
    ("build", "files", "only_cpu"), [(None, True, True), ("12.6", False, True), ("12.6", True, False)]
)
def test_only_a_torch_for_gpus_beside_a_driver_sees_more_than_the_cpu(
    build: str | None, files: bool, only_cpu: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("cuda", "hip", "xpu"):
        monkeypatch.setattr(torch.version, name, None, raising=False)
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(device_files, "GPUS", (str(tmp_path / "nvidia*"),))
    if files:
        (tmp_path / "nvidia0").touch()
    assert sees_only_cpu() is only_cpu


def pretend_cuda(monkeypatch: pytest.MonkeyPatch, capability: dict[int, tuple[int, int]]) -> None:
    """As many GPUs as have a capability; torch reads what names one of them as ever."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda gpu: capability[torch.cuda._utils._get_device_index(gpu)]
    )


@pytest.mark.parametrize("gpu_id", [1, "1"])
def test_a_cuda_gpu_is_taken_by_its_number(gpu_id: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch, {1: (7, 5)})
    assert choose_device(gpu_id) == torch.device("cuda:1")
    assert choose_device(None) == CPU


def test_a_gpu_that_the_driver_counts_and_cuda_does_not_show_is_said_to_be_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def invalid(_: object) -> tuple[int, int]:
        raise AssertionError("Invalid device id")  # torch.cuda.get_device_properties

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", invalid)
    with pytest.raises(RuntimeError, match=r"cuda:1 is not there: CUDA shows 1 of them.*number_of_gpu"):
        choose_device(1)


def test_tensor_cores_are_used_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    pretend_cuda(monkeypatch, {0: (7, 0), 1: (8, 0)})
    monkeypatch.setattr(torch, "set_float32_matmul_precision", chosen.append)
    choose_device(0)
    assert chosen == []
    choose_device(1)
    assert chosen == ["high"]


def test_an_intel_gpu_needs_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert choose_device(0) == CPU
    monkeypatch.setenv("TS_IPEX_GPU_ENABLE", "true")
    assert choose_device(0) == torch.device("xpu:0")


class FakeModule:
    """torch's module of a kind of device, with the functions that such modules share."""

    def __init__(self, *without: str, failing: str = "") -> None:
        self.calls: list[str] = []
        self._failing = failing
        for name in without:
            setattr(self, name, None)

    def __getattribute__(self, name: str) -> object:
        if name != "__dict__" and name in self.__dict__ and self.__dict__[name] is None:
            raise AttributeError(name)
        return object.__getattribute__(self, name)

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def memory_reserved(self, gpu: int) -> int:
        return 0

    def set_device(self, gpu: int) -> None:
        self.calls.append(f"set_device {gpu}")

    def Stream(self, gpu: int) -> str:
        return f"stream of {gpu}"

    def set_stream(self, stream: str) -> None:
        self.calls.append(f"set_stream {stream}")

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")

    def synchronize(self, gpu: int | None = None) -> None:
        self.calls.append("synchronize" if gpu is None else f"synchronize {gpu}")
        if self._failing:
            raise RuntimeError(self._failing)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, FakeModule], FakeModule]:
    """Makes torch have devices of a kind."""

    def make(kind: str, module: FakeModule) -> FakeModule:
        monkeypatch.setattr(torch, kind, module, raising=False)
        given = torch.get_device_module
        monkeypatch.setattr(
            torch, "get_device_module", lambda asked: module if asked == kind else given(asked)
        )
        return module

    return make


@pytest.mark.parametrize(
    ("kind", "gpu_id", "device"),
    [("xpu", 1, "xpu:1"), ("XPU", None, "xpu:0"), ("mps", None, "mps"), ("hpu", 0, "hpu:0")],
)
def test_the_kind_of_the_model_config_is_taken(
    kind: str, gpu_id: int | None, device: str, pretend: Callable[[str, FakeModule], FakeModule]
) -> None:
    pretend(kind.lower(), FakeModule())
    assert choose_device(gpu_id, {"deviceType": kind}) == torch.device(device)


@pytest.mark.parametrize("kind", ["xpu", "mps", "hpu", "xla"])
def test_a_kind_that_is_not_there_falls_back_to_the_cpu_and_says_so(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "mps" and torch.backends.mps.is_available():
        pytest.skip("this machine has a GPU of Apple's")
    assert choose_device(0, {"deviceType": kind}) == CPU
    assert f"deviceType: {kind} is to be used, and torch has none here" in caplog.text


@pytest.mark.parametrize("kind", ["gpu", "cuda", "neuron", 4, None])
def test_other_words_choose_as_without_one(kind: object, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch, {1: (7, 5)})
    assert choose_device(1, {"deviceType": kind}) == torch.device("cuda:1")
    assert choose_device(1, {"deviceType": "cpu"}) == CPU


def test_a_lane_has_a_stream_of_its_own_on_each_kind_with_streams(
    pretend: Callable[[str, FakeModule], FakeModule],
) -> None:
    xpu = pretend("xpu", FakeModule())
    own_stream(1, "xpu")
    assert xpu.calls == ["set_device 1", "set_stream stream of 1"]
    mps = pretend("mps", FakeModule("set_stream"))
    own_stream(0, "mps")
    assert mps.calls == []


def test_a_kind_without_streams_is_waited_for_as_a_whole(
    pretend: Callable[[str, FakeModule], FakeModule],
) -> None:
    mps = pretend("mps", FakeModule())
    whole_on_device(torch.device("mps"))
    assert mps.calls == ["synchronize"]
    whole_on_device(CPU)
    assert mps.calls == ["synchronize"]


@pytest.mark.parametrize("failing", ["", "XPU error: the device is lost"])
def test_other_gpus_are_asked_after_a_failure_like_cuda(
    failing: str, pretend: Callable[[str, FakeModule], FakeModule]
) -> None:
    xpu = pretend("xpu", FakeModule(failing=failing))
    assert gpu_is_usable(1, free_memory=True) is not bool(failing)
    assert xpu.calls == ["empty_cache", "synchronize 1"]


def test_only_xla_runs_without_inference_mode() -> None:
    with without_gradients(CPU):
        assert torch.is_inference_mode_enabled()
    with without_gradients(torch.device("xla")):
        assert not torch.is_inference_mode_enabled()
        assert not torch.is_grad_enabled()


def test_what_is_on_its_device_stays_as_it_is() -> None:
    tensor = torch.zeros(100_000)
    assert to_device(tensor, CPU) is tensor
    assert to_device(tensor, "cpu") is tensor


PINNED = "pin_memory", "to(cuda:3, non_blocking=True)"
PLAIN = ("to(cuda:3)",)
LARGE = torch.zeros(1, 100_000)


@pytest.mark.parametrize(
    ("value", "is_pinned", "copied"),
    [
        pytest.param(LARGE, False, PINNED, id="large"),
        pytest.param(torch.zeros(10), False, PLAIN, id="small"),
        pytest.param(LARGE, True, PLAIN, id="pinned by its owner, who may write to it again"),
        pytest.param(LARGE.expand(8, -1), False, PLAIN, id="one row for all"),
        pytest.param(LARGE.reshape(100, 1000).T, False, PLAIN, id="transposed"),
        pytest.param(LARGE.to_sparse(), False, PLAIN, id="sparse"),
    ],
)
def test_only_what_torch_can_pin_is_copied_without_waiting(
    value: torch.Tensor, is_pinned: bool, copied: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        calls.append("pin_memory")
        torch.empty_strided(tensor.shape, tensor.stride()).copy_(tensor)  # as torch does it
        return tensor

    def to(tensor: torch.Tensor, device: torch.device, **how: bool) -> torch.Tensor:
        calls.append(f"to({device}{''.join(f', {name}={value}' for name, value in how.items())})")
        return tensor

    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: is_pinned)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    assert to_device(value, torch.device("cuda:3")) is value
    assert tuple(calls) == copied


def test_without_cuda_a_gpu_is_not_asked() -> None:
    assert gpu_is_usable(3, free_memory=True)


@pytest.mark.parametrize(
    ("failing", "usable"),
    [
        ("", True),
        ("empty_cache", None),
        ("synchronize 1", True),
        ("synchronize 2", False),
        ("synchronize 3", False),
    ],
)
@pytest.mark.parametrize("free_memory", [True, False])
def test_a_gpu_that_fails_again_is_lost(
    failing: str, usable: bool | None, free_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor has 3; its handler has put a part of its model on 2, as `device_map` does."""
    calls = []

    def call(name: str, *args: int) -> None:
        calls.append(" ".join([name, *map(str, args)]))
        if calls[-1] == failing:
            raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "memory_reserved", {0: 0, 1: 0, 2: 5, 3: 0}.__getitem__)
    for name in ("empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, functools.partial(call, name))
    assert gpu_is_usable(3, free_memory) is (not free_memory if usable is None else usable)
    assert ("empty_cache" in calls) is free_memory
    assert "synchronize 1" not in calls  # which would take memory of it


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device and -m gpu")


@pytest.mark.gpu
@needs_gpu
def test_large_tensors_get_there_unharmed_while_their_memory_is_used_again() -> None:
    gpu = torch.device("cuda:0")
    with torch.cuda.stream(torch.cuda.current_stream(gpu)):  # which is this thread's again afterwards
        own_stream(0)
        copies = [to_device(torch.full((1 << 20,), float(number)), gpu) for number in range(50)]
        assert [copy.mean().item() for copy in copies] == [float(number) for number in range(50)]
        assert torch.cuda.current_stream() != torch.cuda.default_stream()


TRIPPING = """
import os, torch
from torchere.handlers.loading.devices import gpu_is_usable
gpu = torch.cuda.device_count() - 1
table, places = torch.zeros(4, device=f"cuda:{gpu}"), torch.tensor([9], device=f"cuda:{gpu}")
before = gpu_is_usable(gpu, free_memory=True)
try:
    table[places].tolist()
except RuntimeError:
    os.write(1, str((before, gpu_is_usable(gpu, free_memory=False))).encode())
os._exit(0)
"""


@pytest.mark.gpu
@needs_gpu
def test_an_index_out_of_range_costs_a_process_the_last_gpu_as_well_as_the_first() -> None:
    done = subprocess.run([sys.executable, "-c", TRIPPING], capture_output=True, check=True, timeout=120)
    assert done.stdout == b"(True, False)"
