"""How a loaded model computes: with torch.compile (`pt2`), in oneDNN's layout, in half precision."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch.utils import _pytree as pytree

logger = logging.getLogger(__name__)

# The names that TorchServe accepts; this build of torch may lack some, which shows when it compiles.
PT2_BACKENDS = frozenset(
    {
        "aot_cudagraphs",
        "aot_eager",
        "aot_nvfuser",
        "eager",
        "fx2trt",
        "hpu_backend",
        "inductor",
        "ipex",
        "nvfuser",
        "ofi",
        "onnxrt",
        "openvino",
        "tensorrt",
        "torchxla_trace_once",
    }
)
PT2Backend: Any = Enum("PT2Backend", [(name.upper(), name) for name in sorted(PT2_BACKENDS)], type=str)  # type: ignore[misc]


def check_valid_pt2_backend(backend: str) -> bool:
    """Return whether the backend is a known one of `torch.compile`; log a warning if it is not."""
    if backend in PT2_BACKENDS:
        return True
    logger.warning(
        "%s is not a supported backend; expected one of %s", backend, ", ".join(sorted(PT2_BACKENDS))
    )
    return False


def compiled(model: Any, config: dict[str, Any], device: torch.device) -> Any:
    """Return the model compiled as `pt2` in model-config.yaml says; without `pt2`, see `optimized`.

    A model that can't be compiled stays as it is, with a warning.

    Raises:
        ValueError: `pt2`, or `compile` in it, has the wrong type.
    """
    options = compile_options(config)
    if options is None:
        return optimized(model)
    try:
        if options.get("backend") == "tensorrt":
            importlib.import_module("torch_tensorrt")  # the import registers the backend
        faster = torch.compile(model, **options)
        if device.type == "cpu" and options.get("backend", "inductor") == "inductor":
            # It raises an exception where there is no compiler, in place of each run.
            importlib.import_module("torch._inductor.cpp_builder").get_cpp_compiler()
    except Exception as err:  # torch raises many kinds; the model works without it
        logger.warning("Compiling the model with %s failed, proceeding without compilation: %s", options, err)
        return model
    in_words = ", ".join(f"{name} {value}" for name, value in options.items())
    logger.info("Compiled model with %s", in_words)  # TorchServe's line: users search the log for it
    return faster


def compile_options(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the keyword arguments for `torch.compile`, or None when the model stays as it is.

    Args:
        config: the whole model-config.yaml.

    Raises:
        ValueError: `pt2`, or `compile` in it, has the wrong type.
    """
    pt2 = config.get("pt2")
    if pt2 is None:
        return None
    options = _requested(pt2)
    if options is None or ("backend" in options and not check_valid_pt2_backend(options["backend"])):
        return None
    return options


def _requested(pt2: object) -> dict[str, Any] | None:
    if isinstance(pt2, str):
        return {"backend": pt2}
    if not isinstance(pt2, dict):
        raise ValueError(f"pt2 should be str or dict; model-config.yaml has {pt2!r}")
    if "compile" not in pt2:
        return None if "export" in pt2 else dict(pt2)  # the older form: the arguments themselves
    compile_block = pt2["compile"]
    if not isinstance(compile_block, dict):
        raise ValueError(
            f"pt2.compile should be a dict with 'enable'; model-config.yaml has {compile_block!r}"
        )
    options = dict(compile_block)
    return options if options.pop("enable", False) is True else None


_EXTENSION = "intel_extension_for_pytorch"
IS_ASKED_FOR = os.environ.get("TS_IPEX_ENABLE", "false") == "true"
IPEX_AVAILABLE = IS_ASKED_FOR and importlib.util.find_spec(_EXTENSION) is not None
"""Whether models are optimized by the extension; handlers import it from `ts.torch_handler.base_handler`."""


def optimized(model: Any) -> Any:
    """Return the model as TorchServe's handlers run it with `ipex_enable=true`; unchanged without that.

    The extension is archived, and its kernels are part of torch by now (oneDNN). So without it the model gets
    the layout that both prefer, channels last, and torch does the rest.
    """
    if not IS_ASKED_FOR or not isinstance(model, torch.nn.Module):
        return model
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # its stub lacks it
    if not IPEX_AVAILABLE:
        logger.info("ipex_enable: %s is not installed; torch's own oneDNN kernels run the model", _EXTENSION)
        return model
    optimize = importlib.import_module(_EXTENSION).optimize
    logger.info("Compiled model with ipex")  # TorchServe's line
    return optimize(model)


_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def autocasting(model: Any, config: Mapping[str, Any], device: torch.device) -> Any:
    """Return the model wrapped as `autocast` in its config says; the model itself if it is not set.

    Raises:
        ValueError: `autocast` is not one of the types, or the model is a session of onnxruntime.
    """
    wanted = config.get("autocast")
    if wanted is None:
        return model
    if wanted not in _TYPES:
        raise ValueError(f"autocast of model-config.yaml is {wanted!r}, expected {' or '.join(_TYPES)}")
    if not callable(model):
        raise ValueError(
            f"autocast of model-config.yaml is {wanted!r}, and torch does not compute this model: found a "
            f"{type(model).__name__}; take autocast away, and convert an ONNX model itself to half precision"
        )
    return Autocast(model, device, _TYPES[wanted])


class Autocast:
    """A model that runs under torch.autocast, with its half-precision outputs converted to float32.

    All other attributes are the model's own. As thread-safe as the model.

    Args:
        model: the model to call.
        device: its type selects the operations that are cast.
        dtype: the type that they compute in.
    """

    def __init__(self, model: Any, device: torch.device, dtype: torch.dtype) -> None:
        self.wrapped = model  # callers check the class of the model
        self._device_type = device.type
        self._dtype = dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model and return its output, with half-precision tensors converted to float32."""
        # torch's cache of cast weights is shared by all threads and ignores streams: another executor could
        # compute with a weight whose cast is not done yet, or freed already.
        with torch.autocast(self._device_type, self._dtype, cache_enabled=False):
            return pytree.tree_map_only(torch.Tensor, self._widened, self.wrapped(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        if name == "wrapped":  # `copy` looks up attributes before the copy has any
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def _widened(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype is self._dtype else tensor
