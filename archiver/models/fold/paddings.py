"""Folding for models that stay in fp32, which helps only if a padding moves into a convolution."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from torchere.archiver.models.fold.convolutions import Folded, fold
from torchere.archiver.models.fold.tracing import NO_BRANCH, NotTraceable
from torchere.archiver.models.inputs.buffers import unchanged_buffers
from torchere.archiver.models.inputs.run import OperatorWatch


def folded_paddings(module: nn.Module, example: tuple[torch.Tensor, ...]) -> Folded | None:
    """Call `fold` for a model that stays in fp32; return None if it has no padding to fold.

    Raises:
        NotTraceable: the model pads with a constant, and can't be traced as a graph.
    """
    if not any(isinstance(layer, _ConvNd) for layer in module.modules()):
        return None  # saves the copy that `fold` makes
    try:
        folded = fold(module, example)
    # Broad: tracing runs the model's code in a way that its author did not intend, and folding is optional.
    except Exception as error:
        if not _pads(module, example):
            return None
        if isinstance(error, NotTraceable):
            raise NotTraceable(error.reason, error.mend) from error
        raise NotTraceable(str(error), NO_BRANCH) from error
    return folded if folded.paddings else None


class _Paddings(OperatorWatch):
    """Records whether the operator that pads with a constant runs."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= func is torch.ops.aten.constant_pad_nd.default
        return func(*args, **(kwargs or {}))


def _pads(module: nn.Module, example: tuple[torch.Tensor, ...]) -> bool:
    watch = _Paddings()
    with torch.no_grad(), unchanged_buffers(module), watch:
        module(*copy.deepcopy(example))
    return watch.found
