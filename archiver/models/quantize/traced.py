"""Conversion to frozen TorchScript, the format in which int8 weights are saved and loaded."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import nn

from torchere.archiver.models.load.module import traceable_lengths

Compile = Callable[[nn.Module, tuple[torch.Tensor, ...]], torch.jit.ScriptModule]


def traced(module: nn.Module, example: tuple[torch.Tensor, ...]) -> torch.jit.ScriptModule:
    """Trace the model on the example and freeze it; return TorchScript unchanged."""
    if isinstance(module, torch.jit.ScriptModule):
        return module
    # Not in inference mode: a frozen module's constants must be ordinary tensors.
    with torch.no_grad(), quiet(), traceable_lengths(module):
        found = torch.jit.trace(module.eval(), example, check_trace=False)  # type: ignore[no-untyped-call]
        frozen: torch.jit.ScriptModule = torch.jit.freeze(found.eval())
    return frozen


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress torch's deprecation and tracer warnings during quantisation; the user can't act on them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message="`torch.jit")  # a FutureWarning from torch 2.14 on
        warnings.filterwarnings("ignore", message="Converting a tensor to a Python")
        warnings.filterwarnings("ignore", message=r"torch\.quantize_per_tensor")
        warnings.filterwarnings("ignore", message="Currently, qnnpack incorrectly ignores reduce_range")
        yield


@contextlib.contextmanager
def plain_attention() -> Iterator[None]:
    """Disable fused encoder layers: they read `linear1.weight` as a tensor, but in int8 it is a method."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
