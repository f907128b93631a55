"""The devices that models run on, behind one interface: placement, copies, streams, waiting, failures.

The kinds are those of `deviceType` in model-config.yaml. NVIDIA's and AMD's GPUs (`cuda`, also for ROCm),
Intel's (`xpu`), Apple's (`mps`) and Gaudi (`hpu`) each have a module of torch with the same functions
(`torch.get_device_module`); XLA has a package (`xla.py`). docs/devices.md says which of them were run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import logging
import os
import sys
from collections.abc import Mapping
from glob import glob
from typing import Any

import torch

from torchere.handlers.loading import device_files, xla

logger = logging.getLogger(__name__)

_WITH_MODULE = ("cuda", "xpu", "mps", "hpu")
_BUILDS = ("cuda", "hip", "xpu")  # in `torch.version`: the platforms that this torch was built for
_PLUGINS = ("torch_xla", "habana_frameworks")
# Up to this size CUDA copies from pageable memory without waiting (API synchronization behavior).
_PAGEABLE_BYTES = 65_536


CPU = torch.device("cpu")


def choose_device(gpu_id: int | str | None, config: Mapping[str, Any] | None = None) -> torch.device:
    """Return the first available device of CUDA, Intel GPU, Apple GPU, XLA and CPU, or one of `deviceType`.

    Args:
        gpu_id: the accelerator assigned to this instance (from `MockContext` a `str`); a warning is logged
            when torch can't use any. None excludes CUDA, Intel and Apple GPUs.
        config: the model config. If its `deviceType` is "xpu", "mps", "hpu" or "xla", and this kind is not
            available, a warning is logged and the CPU is used; values other than these and "cpu" are ignored.

    Raises:
        RuntimeError: torch has GPUs, but not this one.
    """
    kind = kind_of(config)
    if kind == "cpu":
        return CPU
    if kind == "xla" or kind in _WITH_MODULE[1:]:
        return _of_kind(kind, gpu_id, config or {})
    if gpu_id is not None:
        if torch.cuda.is_available():
            device = torch.device(f"cuda:{gpu_id}")
            _use_tensor_cores(device)
            return device
        if os.environ.get("TS_IPEX_GPU_ENABLE", "false") == "true" and torch.xpu.is_available():
            return torch.device(f"xpu:{gpu_id}")
        if torch.backends.mps.is_available():
            return torch.device("mps")
        logger.warning(
            "GPU %s is to be used, and torch can't: nvidia-smi and the warnings above may tell why", gpu_id
        )
    return _of_kind("xla", None, config or {}) if _has_xla() else CPU


def kind_of(config: Mapping[str, Any] | None) -> str:
    """Return the kind of device that a model config asks for, in lower case; "" if it names none."""
    kind = (config or {}).get("deviceType")
    return kind.lower() if isinstance(kind, str) else ""


def _of_kind(kind: str, gpu_id: int | str | None, config: Mapping[str, Any]) -> torch.device:
    if kind == "xla" and _has_xla():
        return xla.device_of(config)
    module = _module(kind)
    if module is None or not module.is_available():
        logger.warning("deviceType: %s is to be used, and torch has none here: the CPU does it", kind)
        return CPU
    return torch.device(kind if kind == "mps" else f"{kind}:{gpu_id or 0}")


def sees_only_cpu() -> bool:
    """Return whether torch finds only the CPU here. Asks no driver, so the process may fork afterwards."""
    if any(importlib.util.find_spec(plugin) for plugin in _PLUGINS):
        return False
    if not any(getattr(torch.version, build, None) for build in _BUILDS):
        return True
    return sys.platform == "linux" and not any(map(glob, device_files.GPUS))


def _has_xla() -> bool:
    return importlib.util.find_spec("torch_xla") is not None


def _module(kind: str) -> Any:
    """Return torch's module for a kind of device; None if the kind or this build of torch has no module."""
    return torch.get_device_module(kind) if kind in _WITH_MODULE and hasattr(torch, kind) else None


def _use_tensor_cores(device: torch.device) -> None:
    # From compute capability 8.0 (Ampere) on, TF32 multiplies faster at an error of about 1e-3; TorchServe
    # switches it on as well, so answers stay comparable.
    try:
        capability = torch.cuda.get_device_capability(device)
    except AssertionError as err:  # the server counted the driver's GPUs, without asking CUDA
        raise RuntimeError(
            f"{device} is not there: CUDA shows {torch.cuda.device_count()} of them to a process (of several "
            "MIG instances the first); say so by number_of_gpu"
        ) from err
    if capability >= (8, 0):
        torch.set_float32_matmul_precision("high")


def own_stream(gpu_id: int, kind: str = "") -> None:
    """Give the calling thread a stream of its own, so that executors share a GPU but not its queue.

    `kind`: see `kind_of`. Devices of a kind without streams have one queue for all executors.
    """
    module = _module(kind if kind in _WITH_MODULE else "cuda")
    if module is not None and hasattr(module, "set_stream") and module.is_available():
        module.set_device(gpu_id)
        module.set_stream(module.Stream(gpu_id))


def whole_on_device(device: Any) -> None:
    """Wait until this thread's copies to a device are complete: other threads read them on other streams."""
    kind = getattr(device, "type", "")
    module = _module(kind)
    if hasattr(module, "current_stream"):
        module.current_stream(device).synchronize()
    elif module is not None:
        module.synchronize()
    elif kind == "xla":
        xla.wait()


def without_gradients(device: Any) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which a model runs on a device.

    XLA's lazy tensors can't be inference tensors: "Cannot set version_counter for inference tensor".
    """
    return torch.no_grad() if getattr(device, "type", "") == "xla" else torch.inference_mode()


def to_device(value: Any, device: Any) -> Any:
    """Return `value.to(device)`; a large tensor is copied to a GPU from pinned memory, asynchronously.

    Values and devices may be of other types than torch's; then the value's own `to` is called. torch does not
    reuse pinned memory while a copy reads it, and later operations on the stream run after the copy. A tensor
    that the caller has pinned is copied synchronously: torch can't know when its memory is written to again.
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
    """Return whether the accelerator can still be used after a handler has failed.

    A kernel that was given an invalid argument (an index out of range) ends its process's access to the GPU;
    after running out of memory the GPU stays usable. The text of an error does not tell the two apart: cuDNN
    and CUDA word errors of the same GPU differently. Apple's GPUs and XLA have no such state.

    Args:
        gpu_id: the executor's GPU; None if it has none of its own.
        free_memory: release the memory that torch caches, because other processes may lack it. This frees
            nothing while the exception is alive, because its frames hold the tensors.
    """
    for module in filter(None, map(_module, _WITH_MODULE)):
        if not getattr(module, "is_initialized", bool)():
            continue
        try:
            if free_memory:
                module.empty_cache()
            for gpu in _gpus_in_use(module, gpu_id):
                module.synchronize(gpu)
        except RuntimeError as err:
            logger.error("this process can't use its GPU any more: %s", err)
            return False
    return True


def _gpus_in_use(module: Any, gpu_id: int | None) -> list[int]:
    """Return the executor's GPU and the GPUs on which its handler has put parts of a model."""
    gpus = range(module.device_count())
    return [gpu for gpu in gpus if gpu == gpu_id or module.memory_reserved(gpu)]


def module_on(model: Any, device: torch.device) -> Any:
    """Return the model, moved to the device only if part of it is on another one.

    It is not moved needlessly, because another thread may be using it.
    """
    tensors = itertools.chain(model.parameters(), model.buffers())
    return model if all(tensor.device == device for tensor in tensors) else model.to(device)
