"""Finds the layers whose weight a model's own code reads, such as an embedding that its head multiplies by.

A layer in int8 has no weight in fp32 that other code could read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from torchere.archiver.models.inputs.buffers import unchanged_buffers
from torchere.archiver.models.inputs.run import copies
from torchere.archiver.models.inputs.sizes import Tensors

KEPT_AS_READ = "in fp32, as other code uses their weights:"


def read_elsewhere(module: nn.Module, example: Tensors, layers: Mapping[str, nn.Module]) -> dict[str, bool]:
    """Return those of the layers whose `weight` is read outside of their `forward` in a run on the example.

    Not thread-safe: the layers have another `forward` during the run.

    Args:
        module: eager; it is unchanged afterwards.
        example: arguments of the model.
        layers: layers of the model with a `weight`, by name.

    Returns:
        By name, whether the values of the weight are read; False: only its type, shape or device.
    """
    if not layers:
        return {}
    reads = _Reads(layers)
    with contextlib.ExitStack() as watched:
        for layer in layers.values():
            watched.enter_context(_noted(layer, reads.running))
        watched.enter_context(unchanged_buffers(module))
        # If the model fails here, the packer finds out, and refuses it, where it runs without this watch.
        watched.enter_context(contextlib.suppress(Exception))
        with torch.no_grad(), reads:
            module(*copies(example))
    return reads.found


class _Reads(TorchFunctionMode):
    """Records the layers whose weight is an argument of a function of torch while the layer does not run."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.running: list[nn.Module] = []
        self.found: dict[str, bool] = {}
        self._layers: dict[int, dict[str, nn.Module]] = {}  # by the id of the weight, which layers may share
        for name, layer in layers.items():
            self._layers.setdefault(id(layer.weight), {})[name] = layer

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `torch.overrides`."""
        result = func(*args, **(kwargs or {}))
        for given in tree_leaves((args, kwargs)):
            layers = self._layers.get(id(given), {})
            if layers and not any(layer in self.running for layer in layers.values()):
                # `x.to(weight)` takes the type and the device of the weight. `x.type_as(weight)` and the like
                # count as reads of values, because frozen TorchScript keeps their whole operand in fp32;
                # freezing empties that of `to` only.
                is_type = func == torch.Tensor.to and args[0] is not given
                makes_tensor = any(isinstance(one, torch.Tensor) for one in tree_leaves(result))
                has_values = makes_tensor and not is_type
                self.found |= {name: has_values or self.found.get(name, False) for name in layers}
        return result


@contextlib.contextmanager
def _noted(layer: nn.Module, running: list[nn.Module]) -> Iterator[None]:
    """Keep the layer in the list while its `forward` runs: hooks would miss direct calls of `forward`."""
    own: Any = layer.__dict__.get("forward")
    forward = layer.forward

    def noted(*args: Any, **kwargs: Any) -> Any:
        running.append(layer)
        try:
            return forward(*args, **kwargs)
        finally:
            running.pop()

    layer.__dict__["forward"] = noted
    try:
        yield
    finally:
        del layer.__dict__["forward"]
        if own is not None:
            layer.__dict__["forward"] = own
