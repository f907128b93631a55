"""Folding of parametrisations, such as weight normalisation or pruning, into plain weights to quantise.

A parametrised layer has a class of its own and computes its weight at each call. Quantisers recognise layers
by their class, and would count the parts of a parametrisation as layers with weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.utils import parametrize, prune, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm


def without_parametrizations(module: nn.Module) -> nn.Module:
    """Copy the module with the current values of its parametrised weights; without any, return the module."""
    if not any(parametrize.is_parametrized(layer) or _hooks(layer) for layer in module.modules()):
        return module
    made = copied(module)
    for layer in made.modules():
        for name, remove in _hooks(layer).items():
            remove(layer, name)
        if parametrize.is_parametrized(layer):
            _remove(layer)
    return made


def copied(module: nn.Module) -> nn.Module:
    """Copy the module; hooks may have left computed tensors in its layers, which torch can't copy."""
    for layer in module.modules():
        for name in _hooks(layer):
            setattr(layer, name, getattr(layer, name).detach())  # each call computes it again
    return copy.deepcopy(module)


def _hooks(layer: nn.Module) -> dict[str, Callable[[nn.Module, str], Any]]:
    """Return the names of weights that hooks compute, each with the function that makes the weight plain."""
    found: dict[str, Callable[[nn.Module, str], Any]] = {}
    for hook in layer._forward_pre_hooks.values():
        for kind, attribute, remove in _HOOKS:
            if isinstance(hook, kind):
                found[getattr(hook, attribute)] = remove
    return found


def _remove_pruning(layer: Any, name: str) -> None:
    # torch writes the pruned values into this parameter, which another layer may share.
    setattr(layer, f"{name}_orig", nn.Parameter(getattr(layer, f"{name}_orig").detach().clone()))
    prune.remove(layer, name)  # type: ignore[no-untyped-call]


# Normalisations that older code adds as hooks, and pruning: each with the attribute that holds the weight's
# name, and the function that removes the hook.
_HOOKS: tuple[tuple[type, str, Any], ...] = (
    (WeightNorm, "name", remove_weight_norm),
    (SpectralNorm, "name", remove_spectral_norm),
    (prune.BasePruningMethod, "_tensor_name", _remove_pruning),
)


def _remove(layer: Any) -> None:
    kind = type(layer)
    # torch removes the weight from the class, which copies of a layer share with their original.
    layer.__class__ = type(kind.__name__, kind.__bases__, dict(vars(kind)))
    for name in list(layer.parametrizations):
        parametrize.remove_parametrizations(layer, name)
