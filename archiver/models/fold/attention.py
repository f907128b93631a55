"""Replacement of torch's attention by plain layers, so that its projections can be quantised to int8.

The projections are a third of a transformer's weights; left in fp32, they would be most of the size of the
quantised file.
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

_MAX_DRIFT = 1e-3  # only the order of sums differs
# The errors of a model whose own code reads the weights of an attention layer, which are no longer there.
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
    """A model, and the number of its attention layers that were replaced by plain layers."""

    module: nn.Module  # the model itself if `attentions` is 0; else a copy in eval mode
    attentions: int


def open_attention(module: nn.Module, example: tuple[torch.Tensor, ...]) -> Opened:
    """Copy the model and replace `nn.MultiheadAttention` by linear layers and plain operations.

    `nn.TransformerEncoderLayer` and `nn.TransformerEncoder` are replaced, too, because they read its weights.
    Subclasses, layers with hooks, and attention with `add_bias_kv` or `add_zero_attn` stay unchanged. The
    whole model stays unchanged if the copy gives another output for the example, or fails because its own
    code reads the replaced weights.

    Args:
        module: eager; it is not modified.
        example: arguments of the model. Attention layers that get different tensors as query, key and value
            get three projections instead of one.
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
    """Apply `change` to the layer and all layers in it, innermost first; a shared layer stays shared."""
    if layer not in seen:
        for name, inner in layer._modules.items():
            if inner is not None:
                layer._modules[name] = _changed(inner, change, seen)
        seen[layer] = change(layer)
    return seen[layer]


class _Opening:
    """Replaces torch's layers by plain ones; `made` maps each new attention layer to its original."""

    def __init__(self) -> None:
        self.made: dict[nn.Module, nn.MultiheadAttention] = {}

    def plain(self, layer: nn.Module) -> nn.Module:
        """Return the replacement of the layer, or the layer itself."""
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
    """A context manager that records the attention layers whose query, key and value differ (`apart`)."""

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
