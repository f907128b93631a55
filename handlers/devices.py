"""Which device a handler instance computes on."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from typing import NamedTuple

import torch

logger = logging.getLogger(__name__)


class DeviceChoice(NamedTuple):
    """`map_location` is the kind ("cuda", "cpu", ...), None for XLA; `device` the very one."""

    map_location: str | None
    device: torch.device


def choose_device(gpu_id: int | None) -> DeviceChoice:
    """The best device there is: CUDA, Intel GPU, Apple GPU, XLA, CPU.

    Args:
        gpu_id: the accelerator this instance was given; None keeps it off CUDA, Intel and Apple GPUs.
    """
    if gpu_id is not None:
        if torch.cuda.is_available():
            _use_tensor_cores()
            return DeviceChoice("cuda", torch.device(f"cuda:{gpu_id}"))
        if os.environ.get("TS_IPEX_GPU_ENABLE", "false") == "true" and torch.xpu.is_available():
            return DeviceChoice("xpu", torch.device(f"xpu:{gpu_id}"))
        if torch.backends.mps.is_available():
            return DeviceChoice("mps", torch.device("mps"))
    if importlib.util.find_spec("torch_xla") is not None:
        return DeviceChoice(None, importlib.import_module("torch_xla.core.xla_model").xla_device())
    return DeviceChoice("cpu", torch.device("cpu"))


def _use_tensor_cores() -> None:
    # From compute capability 8.0 (Ampere) on, TF32 multiplies faster at an error of about 1e-3; TorchServe
    # switches it on as well, so answers stay comparable.
    if torch.cuda.get_device_capability() >= (8, 0):
        torch.set_float32_matmul_precision("high")
