"""Dynamic int8: weights in 8 bits, the range of activations measured anew at each call. Needs no samples.

For models of linear layers and recurrent ones; the first use of language models. Convolutions stay in fp32.

Activations of linear layers have 8 bits and weights 7. PyTorch's own choice on x86 is the other way round:
processors without VNNI add two products in 16 bits, which 8 bits times 8 overflow. This is as fast, and
drifts half as far: activations have one scale for all tokens, weights one for each row. On all-MiniLM-L6-v2
it is 0.13 instead of 0.22.
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
# Of bags torch's int8 has sums only, over all entries, and takes others for these; it knows no max_norm.
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_LARGE = 1_000_000  # weights of an embedding; smaller ones are not where the size is
_WEIGHTS_7_BITS = PerChannelMinMaxObserver.with_args(
    dtype=torch.qint8, qscheme=torch.per_channel_symmetric, quant_min=-64, quant_max=63
)
# Layers of this version and older give activations 8 bits (torch.ao.nn.quantized.dynamic.Linear.forward).
_LAST_WITH_8_BITS = 3
# As a linear layer and an activation behind it are traced: the layer gives what its input was.
_LINEAR_RELU = """graph(%x, %weights, %reduced, %type, %no, %none):
  %y = quantized::linear_dynamic(%x, %weights, %reduced)
  %same = aten::to(%y, %type, %no, %no, %none)
  %z = aten::{relu}(%same)
  return (%z)"""
_FUSED = """graph(%x, %weights, %reduced, %type, %no, %none):
  %z = quantized::linear_relu_dynamic(%x, %weights, %reduced)
  return (%z)"""


def dynamic(module: nn.Module, kept: Collection[str] = ()) -> tuple[nn.Module, int]:
    """A copy whose linear, LSTM and GRU layers are int8, packed for the current engine, and their number.

    Linear weights are scaled row by row, which costs nothing and loses least; recurrent kernels know one
    scale only. Large embeddings get 8 bits, too, with a scale for each row: they are half of a language
    model's size.

    Raises:
        ModelRefused: there is no such layer, or the model is TorchScript.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise ModelRefused(
            "the model is TorchScript, whose layers can't be changed any more; "
            "quantise the eager model that it was made of (--model-file, or module:factory)"
        )
    plan = {name: _configuration(layer) for name, layer in module.named_modules() if name not in kept}
    plan = {name: configuration for name, configuration in plan.items() if configuration is not None}
    if not plan:
        raise ModelRefused(
            "int8-dynamic changes linear, LSTM and GRU layers, and the model has none; "
            "for convolutions use int8-static with calibration samples"
        )
    quantised: nn.Module = quantize_dynamic(  # type: ignore[no-untyped-call]
        copy.deepcopy(module).eval(), plan, dtype=torch.qint8
    )
    for layer in quantised.modules():
        if isinstance(layer, int8_layers.Linear):
            layer.version = _LAST_WITH_8_BITS
    return quantised, len(plan)


def large_embeddings(module: nn.Module) -> frozenset[str]:
    """The names of the embeddings that `dynamic` changes.

    Their `weight` is a method then. A model that reads it itself, as a head does that shares its weights with
    the embedding, takes them in fp32 only.
    """
    return frozenset(name for name, layer in module.named_modules() if _is_large_embedding(layer))


def fuse_relu(script: torch.jit.ScriptModule) -> None:
    """Let int8 linear layers of traced, frozen TorchScript do the ReLU that follows them.

    One pass over memory less; the fused step rounds as the two do. It must be saved and loaded to be run:
    oneDNN keeps what it made for a layer while this was traced.
    """
    for relu in ("relu", "relu_"):
        torch._C._jit_pass_custom_pattern_based_rewrite_graph(
            _LINEAR_RELU.format(relu=relu), _FUSED, script.graph
        )


def _configuration(layer: nn.Module) -> Any:
    """How torch is to quantise the layer; None when it stays in fp32."""
    if type(layer) is nn.Linear:
        return QConfig(  # type: ignore[no-untyped-call]
            activation=default_dynamic_qconfig.activation, weight=_WEIGHTS_7_BITS
        )
    if type(layer) in _RECURRENT:
        return default_dynamic_qconfig
    return float_qparams_weight_only_qconfig if _is_large_embedding(layer) else None


def _is_large_embedding(layer: nn.Module) -> bool:
    if type(layer) not in _EMBEDDINGS or layer.max_norm is not None or layer.weight.numel() < _LARGE:
        return False
    return type(layer) is nn.Embedding or (layer.mode == "sum" and layer.padding_idx is None)


# torch puts all its int8 layers into packages of these names.
_INT8_PACKAGES = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")


def trained(module: nn.Module) -> nn.Module:
    """The int8 model, with the scales that training found; packed for the current engine if it wasn't yet.

    TorchScript stays as it is. Otherwise it is a model with fake quantisation, as `prepare_qat_fx` or
    `prepare_qat` and training leave it, which is converted; or one that is converted already.

    Raises:
        ModelRefused: nothing in it is int8 or was trained to be.
    """
    if isinstance(module, torch.jit.ScriptModule) or is_int8(module):
        return module
    if not any(isinstance(layer, FakeQuantizeBase) for layer in module.modules()):
        raise ModelRefused(
            f"{type(module).__name__} has neither int8 layers nor fake quantisation; expected a model from "
            "prepare_qat_fx or convert_fx. One that was trained in fp32 is for int8-static or int8-dynamic"
        )
    # A traced graph was prepared by prepare_qat_fx, anything else layer by layer.
    prepared = copy.deepcopy(module).eval()
    if isinstance(prepared, fx.GraphModule):
        return convert_fx(prepared)
    converted: nn.Module = convert(prepared)  # type: ignore[no-untyped-call]
    return converted


def is_int8(module: nn.Module) -> bool:
    """Whether a layer of the model has packed int8 weights."""
    return any(type(layer).__module__.startswith(_INT8_PACKAGES) for layer in module.modules())
