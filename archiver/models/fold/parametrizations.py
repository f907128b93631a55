"""Folding of parametrisations, such as weight normalisation, into plain weights, before quantisation.

A parametrised layer has a class of its own and computes its weight at each call. Quantisers recognise layers
by their class, and would count the parts of a parametrisation as layers with weights.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.nn.utils import parametrize, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

# Normalisations that older code adds as hooks.
_HOOKS: dict[type, Any] = {WeightNorm: remove_weight_norm, SpectralNorm: remove_spectral_norm}


def without_parametrizations(module: nn.Module) -> nn.Module:
    """Copy the module with the current values of its parametrised weights; without any, return the module."""
    if not any(parametrize.is_parametrized(layer) or _hooks(layer) for layer in module.modules()):
        return module
    made = copied(module)
    for layer in made.modules():
        for hook in _hooks(layer):
            _HOOKS[type(hook)](layer, hook.name)
        if parametrize.is_parametrized(layer):
            _remove(layer)
    return made


def copied(module: nn.Module) -> nn.Module:
    """Copy the module; hooks may have left computed tensors in its layers, which torch can't copy."""
    for layer in module.modules():
        for hook in _hooks(layer):
            setattr(layer, hook.name, getattr(layer, hook.name).detach())  # each call computes it again
    return copy.deepcopy(module)


def _hooks(layer: nn.Module) -> list[Any]:
    return [hook for hook in layer._forward_pre_hooks.values() if type(hook) in _HOOKS]


def _remove(layer: Any) -> None:
    kind = type(layer)
    # torch removes the weight from the class, which copies of a layer share with their original.
    layer.__class__ = type(kind.__name__, kind.__bases__, dict(vars(kind)))
    for name in list(layer.parametrizations):
        parametrize.remove_parametrizations(layer, name)
