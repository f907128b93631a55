"""Dynamic int8: weights in 8 bits, the range of activations measured anew at each call. Needs no samples.

For models of linear layers and recurrent ones; the first use of language models. Convolutions stay in fp32.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.ao.quantization import (
    default_dynamic_qconfig,
    float_qparams_weight_only_qconfig,
    per_channel_dynamic_qconfig,
    quantize_dynamic,
)

from torchere.archiver.errors import ModelRefused

_RECURRENT = (nn.LSTM, nn.GRU)
_LARGE = 1_000_000  # weights of an embedding; smaller ones are not where the size is


def dynamic(module: nn.Module) -> tuple[nn.Module, int]:
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
    plan = {name: _configuration(layer) for name, layer in module.named_modules()}
    plan = {name: configuration for name, configuration in plan.items() if configuration is not None}
    if not plan:
        raise ModelRefused(
            "int8-dynamic changes linear, LSTM and GRU layers, and the model has none; "
            "for convolutions use int8-static with calibration samples"
        )
    quantised: nn.Module = quantize_dynamic(  # type: ignore[no-untyped-call]
        copy.deepcopy(module).eval(), plan, dtype=torch.qint8
    )
    return quantised, len(plan)


def _configuration(layer: nn.Module) -> Any:
    """How torch is to quantise the layer; None when it stays in fp32."""
    if type(layer) is nn.Linear:
        return per_channel_dynamic_qconfig
    if type(layer) in _RECURRENT:
        return default_dynamic_qconfig
    if type(layer) is nn.Embedding and layer.weight.numel() >= _LARGE:
        return float_qparams_weight_only_qconfig
    return None
