"""Dynamic int8: 8-bit weights, with the range of activations measured at each call; needs no samples.

For models of linear and recurrent layers, mainly language models. Convolutions stay in fp32.

Activations of linear layers have 8 bits and weights 7. PyTorch's default on x86 is the reverse: processors
without VNNI add two products in 16 bits, and products of 8 by 8 bits would overflow. The choice here is as
fast and has about half the drift, 0.13 instead of 0.22 on all-MiniLM-L6-v2, because activations have one
scale for all tokens, and weights one for each row.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import fx, nn
from torch.ao.nn.quantized import dynamic as int8_layers
from torch.ao.quantization import (
    FakeQuantizeBase,
    PerChannelMinMaxObserver,
    QConfig,
    convert,
    default_dynamic_qconfig,
    float_qparams_weight_only_qconfig,
    quantize_dynamic,
)
from torch.ao.quantization.quantize_fx import convert_fx

from torchere.archiver.errors import ModelRefused

_RECURRENT = (nn.LSTM, nn.GRU)
# torch's int8 embedding bag supports only sums over all entries and treats every other mode as a sum. It
# ignores max_norm.
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_LARGE = 1_000_000  # weights of an embedding; smaller ones contribute little to the file size
_WEIGHTS_7_BITS = PerChannelMinMaxObserver.with_args(
    dtype=torch.qint8, qscheme=torch.per_channel_symmetric, quant_min=-64, quant_max=63
)
# Layers up to this version quantise activations to 8 bits (torch.ao.nn.quantized.dynamic.Linear.forward).
_LAST_WITH_8_BITS = 3
# The trace of a linear layer and a following ReLU: the layer casts its output to the dtype of its input.
_LINEAR_RELU = """graph(%x, %weights, %reduced, %type, %no, %none):
  %y = quantized::linear_dynamic(%x, %weights, %reduced)
  %same = aten::to(%y, %type, %no, %no, %none)
  %z = aten::{relu}(%same)
  return (%z)"""
_FUSED = """graph(%x, %weights, %reduced, %type, %no, %none):
  %z = quantized::linear_relu_dynamic(%x, %weights, %reduced)
  return (%z)"""


def dynamic(module: nn.Module, kept: Collection[str] = ()) -> tuple[nn.Module, int]:
    """Copy the model with int8 linear, LSTM and GRU layers; return the copy and the number of layers.

    The weights are packed for the current engine. Linear weights have a scale per row, which costs nothing
    and loses the least accuracy; recurrent kernels support a single scale only. Large embeddings get 8 bits,
    too, with a scale per row, because they are half of the size of a language model.

    Raises:
        ModelRefused: there is no such layer.
    """
    layers = {name: layer for name, layer in module.named_modules() if name not in kept}
    # torch replaces layers within a module, never the module itself, which may be a layer.
    plan = {f"0.{name}".rstrip("."): _configuration(layer) for name, layer in layers.items()}
    plan = {name: configuration for name, configuration in plan.items() if configuration is not None}
    if not plan:
        raise ModelRefused(_NO_LAYER)
    quantised: nn.Module = quantize_dynamic(  # type: ignore[no-untyped-call]
        nn.Sequential(copy.deepcopy(module)).eval(), plan, dtype=torch.qint8
    )[0]
    # torch converts a layer with several names only under the first, or again under some of the others.
    first = {id(layer): name for name, layer in layers.items() if f"0.{name}" in plan}
    for name, layer in module.named_modules(remove_duplicate=False):
        if first.get(id(layer), name) != name:
            parent, _, own = name.rpartition(".")
            setattr(quantised.get_submodule(parent), own, quantised.get_submodule(first[id(layer)]))
    made: Any
    for made in quantised.modules():
        if isinstance(made, int8_layers.Linear):
            made.version = _LAST_WITH_8_BITS
        if type(made) in (int8_layers.LSTM, int8_layers.GRU):
            made.flatten_parameters = _nothing_to_flatten
    return quantised, len(plan)


_NO_LAYER = (
    "int8-dynamic changes linear, LSTM and GRU layers (these with bias, without proj_size), and the model "
    "has none, or its own code reads their weights; for convolutions use int8-static with calibration samples"
)


def _nothing_to_flatten() -> None:
    """Stand in for a method of recurrent layers that many models call, and that torch's int8 ones lack."""


def large_embeddings(module: nn.Module) -> frozenset[str]:
    """Return the names of the embeddings that `dynamic` quantises.

    A model that uses more of their attributes than `embedding_dim` and `num_embeddings` needs them in fp32.
    """
    return frozenset(name for name, layer in module.named_modules() if _is_large_embedding(layer))


def fuse_relu(script: torch.jit.ScriptModule) -> None:
    """Fuse each ReLU into the int8 linear layer before it, in traced, frozen TorchScript.

    This saves one pass over memory and does not change the results. Save and reload the script before running
    it: oneDNN keeps the state that it created for a layer during tracing.
    """
    for relu in ("relu", "relu_"):
        torch._C._jit_pass_custom_pattern_based_rewrite_graph(
            _LINEAR_RELU.format(relu=relu), _FUSED, script.graph
        )


def _configuration(layer: nn.Module) -> Any:
    """Return torch's quantisation configuration of the layer; None if the layer stays in fp32."""
    if type(layer) is nn.Linear:
        return QConfig(  # type: ignore[no-untyped-call]
            activation=default_dynamic_qconfig.activation, weight=_WEIGHTS_7_BITS
        )
    if type(layer) in _RECURRENT:
        # torch's int8 layers take a bias for granted, and read memory beyond the weights with `proj_size`.
        return default_dynamic_qconfig if layer.bias and not layer.proj_size else None
    return float_qparams_weight_only_qconfig if _is_large_embedding(layer) else None


def _is_large_embedding(layer: nn.Module) -> bool:
    if type(layer) not in _EMBEDDINGS or layer.max_norm is not None or layer.weight.numel() < _LARGE:
        return False
    return type(layer) is nn.Embedding or (layer.mode == "sum" and layer.padding_idx is None)


# The packages of torch's int8 layers.
_INT8_PACKAGES = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")


def trained(module: nn.Module) -> nn.Module:
    """Convert a model from quantisation-aware training to int8, with the scales of the training.

    Converted weights are packed for the current engine. TorchScript and models that are already converted are
    returned unchanged; others must have fake quantisation, as `prepare_qat_fx` or `prepare_qat` adds it.

    Raises:
        ModelRefused: the model has neither int8 layers nor fake quantisation.
    """
    if isinstance(module, torch.jit.ScriptModule) or is_int8(module):
        return module
    if not any(isinstance(layer, FakeQuantizeBase) for layer in module.modules()):
        raise ModelRefused(
            f"{type(module).__name__} has neither int8 layers nor fake quantisation; expected a model from "
            "prepare_qat_fx or convert_fx. One that was trained in fp32 is for int8-static or int8-dynamic"
        )
    # A graph module comes from prepare_qat_fx, any other model from prepare_qat.
    prepared = copy.deepcopy(module).eval()
    if isinstance(prepared, fx.GraphModule):
        return convert_fx(prepared)
    converted: nn.Module = convert(prepared)  # type: ignore[no-untyped-call]
    return converted


def is_int8(module: nn.Module) -> bool:
    """Return whether a layer of the model has packed int8 weights."""
    return any(type(layer).__module__.startswith(_INT8_PACKAGES) for layer in module.modules())
