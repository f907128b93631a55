"""Torch's attention becomes plain layers before a model is quantised, so that its projections can be int8.

Of a transformer's weights they are a third; left in fp32 they are most of what remains of its file.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.fold.attention_layers import (
    CrossAttention,
    Encoder,
    EncoderLayer,
    SelfAttention,
)
from torchere.archiver.models.measure.difference import difference, flattened

_MAX_DRIFT = 1e-3  # of what only sums up in another order
# What a model's own code does when it looks into an attention layer and finds no weights there.
_LOOKED_INTO = (
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    ModelRefused,
)


@dataclass(frozen=True, slots=True)
class Opened:
    """A model, and how many of its attention layers are plain layers now."""

    module: nn.Module  # the very model when there is none; else a copy in eval mode
    attentions: int


def open_attention(module: nn.Module, example: tuple[torch.Tensor, ...]) -> Opened:
    """A copy of the model with `nn.MultiheadAttention` as linear layers and what is between them.

    `nn.TransformerEncoderLayer` and `nn.TransformerEncoder` change with it, for they read its weights. Left
    as they are: subclasses, layers with hooks, attention with `add_bias_kv` or `add_zero_attn`; and the whole
    model, if its answer to the example is another one then, or none because its own code reads these weights.

    Args:
        module: eager; left as it is.
        example: arguments of the model. Those attention layers that see different tensors as query, key and
            value get three projections instead of one.
    """
    if isinstance(module, torch.jit.ScriptModule) or not any(map(_opens, module.modules())):
        return Opened(module, 0)
    with torch.no_grad():
        wanted = flattened(module(*copy.deepcopy(example)))
    opening = _Opening()
    opened = _changed(copy.deepcopy(module).eval(), opening.plain, {})
    try:
        with torch.no_grad(), _Watch(opening.made) as watch:
            found = flattened(opened(*copy.deepcopy(example)))
        drift = difference([(wanted, found)]).drift
    except _LOOKED_INTO:
        return Opened(module, 0)
    if not drift <= _MAX_DRIFT:
        return Opened(module, 0)
    apart = {layer: CrossAttention(opening.made[layer]) for layer in watch.apart}
    return Opened(_changed(opened, lambda layer: apart.get(layer, layer), {}), len(opening.made))


def _opens(layer: nn.Module) -> bool:
    return (
        type(layer) is nn.MultiheadAttention
        and layer.bias_k is None
        and layer.bias_v is None
        and not layer.add_zero_attn
        and not _has_hooks(layer)
    )


def _has_hooks(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


def _changed(
    layer: nn.Module, change: Callable[[nn.Module], nn.Module], seen: dict[nn.Module, nn.Module]
) -> nn.Module:
    """The layer after all inside of it were changed, the innermost first; one in two places stays one."""
    if layer not in seen:
        for name, inner in layer._modules.items():
            if inner is not None:
                layer._modules[name] = _changed(inner, change, seen)
        seen[layer] = change(layer)
    return seen[layer]


class _Opening:
    """What torch's layers become, and of which each attention layer was made."""

    def __init__(self) -> None:
        self.made: dict[nn.Module, nn.MultiheadAttention] = {}

    def plain(self, layer: nn.Module) -> nn.Module:
        """The layer, or what takes its place."""
        if isinstance(layer, nn.MultiheadAttention) and _opens(layer):
            kind = CrossAttention if layer.in_proj_weight is None else SelfAttention
            made = kind(layer)
            self.made[made] = layer
            return made
        if isinstance(layer, nn.TransformerEncoder) and self._is_in(layer):
            if type(layer) is nn.TransformerEncoder and not _has_hooks(layer):
                return Encoder(layer)
            layer.use_nested_tensor = False
        if type(layer) is nn.TransformerEncoderLayer and self._is_in(layer) and not _has_hooks(layer):
            return EncoderLayer(layer)
        return layer

    def _is_in(self, layer: nn.Module) -> bool:
        return any(inner in self.made for inner in layer.modules())


class _Watch:
    """While entered, sees which attention layers get different tensors as query, key and value."""

    def __init__(self, layers: dict[nn.Module, nn.MultiheadAttention]) -> None:
        self.apart: set[nn.Module] = set()
        self._layers = [layer for layer in layers if isinstance(layer, SelfAttention)]
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> _Watch:
        self._handles = [
            layer.register_forward_pre_hook(self._look, with_kwargs=True) for layer in self._layers
        ]
        return self

    def __exit__(self, *_error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _look(self, layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        tensors = {**dict(zip(("query", "key", "value"), given, strict=False)), **named}
        if tensors["query"] is not tensors["key"] or tensors["key"] is not tensors["value"]:
            self.apart.add(layer)
