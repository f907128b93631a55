"""bfloat16: half the size and, where the processor multiplies it, more speed; float32 in and out."""

from __future__ import annotations

import copy
import platform
from typing import Any

import torch
from torch import nn

from torchere.archiver.errors import ModelRefused


class InBfloat16(nn.Module):
    """A model that computes in bfloat16 and takes and gives float32, so that its signature is the same."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(module).to(torch.bfloat16).eval()

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Floating-point inputs are rounded; tokens and masks go in as they are."""
        return _cast(self.module(*(_cast(one, torch.bfloat16) for one in inputs)), torch.float32)


def bf16(module: nn.Module, has_bf16: bool | None = None) -> nn.Module:
    """The model in bfloat16.

    Args:
        module: eager, in fp32; left as it is.
        has_bf16: whether the processor multiplies bfloat16; None asks this one.

    Raises:
        ModelRefused: the processor has no such instruction, or the model is TorchScript.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise ModelRefused(
            "the model is TorchScript, which can't be cast safely: it may hold constants of float32; "
            "cast the eager model that it was made of (--model-file, or module:factory)"
        )
    if not (processor_has_bf16() if has_bf16 is None else has_bf16):
        raise ModelRefused(
            f"bf16 would be slower than fp32 here: this {platform.machine()} processor has "
            f"{torch.backends.cpu.get_cpu_capability()} and no bfloat16 instructions; expected AVX512-BF16, "
            "AMX or Arm BF16. Pack on such a machine, or use int8"
        )
    return InBfloat16(module)


def processor_has_bf16() -> bool:
    """Whether this processor multiplies bfloat16."""
    capabilities: Any = getattr(torch.cpu, "get_capabilities", dict)  # torch 2.6 has no such function
    found = capabilities() or {"avx512_bf16": torch.cpu._is_avx512_bf16_supported()}
    return any(bool(found.get(name)) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: _cast(part, dtype) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(_cast(part, dtype) for part in value)
    return value
