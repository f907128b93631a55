"""Run matrix products and convolutions in half precision: `autocast` in model-config.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def autocasting(model: Any, config: Mapping[str, Any], device: torch.device) -> Any:
    """Return the model wrapped as `autocast` in its config says; the model itself where it is not set.

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
        self._model = model
        self._device_type = device.type
        self._dtype = dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model and return its output, with half-precision tensors converted to float32."""
        # torch's cache of cast weights is shared by all threads and ignores streams: another executor could
        # compute with a weight whose cast is not done yet, or freed already.
        with torch.autocast(self._device_type, self._dtype, cache_enabled=False):
            return pytree.tree_map_only(torch.Tensor, self._widened, self._model(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _widened(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype is self._dtype else tensor
