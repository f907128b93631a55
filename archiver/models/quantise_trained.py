"""Models that were trained for int8 (quantisation-aware), or are int8 already: taken as they are."""

from __future__ import annotations

import copy

import torch
from torch import fx, nn
from torch.ao.quantization import FakeQuantizeBase, convert
from torch.ao.quantization.quantize_fx import convert_fx

from torchere.archiver.errors import ModelRefused

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
