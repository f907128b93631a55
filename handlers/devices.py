"""Which device a handler instance computes on, and how tensors get there."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import logging
import os
from typing import Any, NamedTuple

import torch

logger = logging.getLogger(__name__)

# Up to here CUDA copies from any memory without waiting (API synchronization behavior).
_PAGEABLE_BYTES = 65_536


class DeviceChoice(NamedTuple):
    """`map_location` is the kind ("cuda", "cpu", ...), None for XLA; `device` the very one."""

    map_location: str | None
    device: torch.device


CPU = DeviceChoice("cpu", torch.device("cpu"))


def choose_device(gpu_id: int | str | None) -> DeviceChoice:
    """The best device there is: CUDA, Intel GPU, Apple GPU, XLA, CPU.

    Args:
        gpu_id: the accelerator this instance was given (by `MockContext` as a text), and a warning says where
            torch has none after all; None keeps it off CUDA, Intel and Apple GPUs.

    Raises:
        RuntimeError: torch has GPUs, but fewer.
    """
    if gpu_id is not None:
        if torch.cuda.is_available():
            device = torch.device(f"cuda:{gpu_id}")
            _use_tensor_cores(device)
            return DeviceChoice("cuda", device)
        if os.environ.get("TS_IPEX_GPU_ENABLE", "false") == "true" and torch.xpu.is_available():
            return DeviceChoice("xpu", torch.device(f"xpu:{gpu_id}"))
        if torch.backends.mps.is_available():
            return DeviceChoice("mps", torch.device("mps"))
        logger.warning(
            "GPU %s is to be used, and torch can't: nvidia-smi and the warnings above may tell why", gpu_id
        )
    if importlib.util.find_spec("torch_xla") is not None:
        return DeviceChoice(None, importlib.import_module("torch_xla.core.xla_model").xla_device())
    return CPU


def _use_tensor_cores(device: torch.device) -> None:
    # From compute capability 8.0 (Ampere) on, TF32 multiplies faster at an error of about 1e-3; TorchServe
    # switches it on as well, so answers stay comparable.
    try:
        capability = torch.cuda.get_device_capability(device)
    except AssertionError as err:  # the server has counted what the driver has, without asking CUDA
        raise RuntimeError(
            f"{device} is not there: CUDA shows {torch.cuda.device_count()} of them to a process (of several "
            "MIG instances the first); say so by number_of_gpu"
        ) from err
    if capability >= (8, 0):
        torch.set_float32_matmul_precision("high")


def own_stream(gpu_id: int) -> None:
    """Have the calling thread compute on a stream of its own: executors share a GPU, and no queue."""
    if torch.cuda.is_available():
        torch.cuda.set_device(gpu_id)
        torch.cuda.set_stream(torch.cuda.Stream(gpu_id))  # type: ignore[no-untyped-call]


def whole_on_device(device: Any) -> None:
    """Wait until what this thread has begun to copy to a GPU is there: others read it on other streams."""
    if getattr(device, "type", "") == "cuda":
        torch.cuda.current_stream(device).synchronize()


def to_device(value: Any, device: Any) -> Any:
    """`value.to(device)`; a large tensor goes to a GPU from pinned memory, and nobody waits for it.

    Handlers may have other values and devices than torch's, whose `to` is asked then. torch keeps pinned
    memory from being used again while a copy reads it, and what is computed from the copy comes after it on
    the stream. Of memory that the caller has pinned it can't know when it is written to again.
    """
    to_gpu = getattr(device, "type", "") == "cuda" and isinstance(value, torch.Tensor)
    if to_gpu and _can_be_pinned(value) and value.nbytes > _PAGEABLE_BYTES and not value.is_pinned():
        return value.pin_memory().to(device, non_blocking=True)
    return value.to(device)


def _can_be_pinned(value: torch.Tensor) -> bool:
    # pin_memory() keeps the strides, and fails where several elements share memory (`expand`).
    is_plain = value.layout is torch.strided and not (value.is_nested or value.is_quantized)
    return is_plain and value.device.type == "cpu" and value.is_contiguous()


def gpu_is_usable(gpu_id: int | None, free_memory: bool) -> bool:
    """After a handler has failed: whether its GPU still answers.

    A kernel that was given something impossible (an index out of range) takes the whole access of its process
    to the GPU with it; after a lack of memory all is well again. The text of an error does not tell: of the
    same GPU cuDNN has other words than CUDA.

    Args:
        gpu_id: of the executor; None: it has none of its own.
        free_memory: give back what torch holds ready, for other processes have none. Nothing comes of it as
            long as the exception lives, for its frames hold the tensors.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return True
    try:
        if free_memory:
            torch.cuda.empty_cache()
        for gpu in _gpus_in_use(gpu_id):
            torch.cuda.synchronize(gpu)
    except RuntimeError as err:
        logger.error("this process can't use its GPU any more: %s", err)
        return False
    return True


def _gpus_in_use(gpu_id: int | None) -> list[int]:
    """The executor's, and those on which its handler has put parts of a model besides."""
    gpus = range(torch.cuda.device_count())
    return [gpu for gpu in gpus if gpu == gpu_id or torch.cuda.memory_reserved(gpu)]


def module_on(model: Any, device: torch.device) -> Any:
    """The model, moved if part of it is elsewhere; not needlessly, for another thread may be using it."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return model if all(tensor.device == device for tensor in tensors) else model.to(device)
