"""Mixed precision: when int8 drifts too far, the layers that hurt most go back to fp32.

How much a layer hurts is told by the fp32 model in which the weights of this one layer and what goes into it
are rounded to 8 bits: one run over a few rows for each, and no conversion. Such errors add up about as
squares, so the layers that must go back can be foretold; the search only converts the model again to see
whether that holds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchere.archiver.models.verify_outputs import difference, flattened

# A cosine of 0.99 between outputs, when the error points anywhere: sqrt(2 (1 - 0.99)).
WANTED_DRIFT = 0.141
# Share of the weights that may go back: it leaves a file that would be 0.25 times as large below 0.35.
MOST_KEPT = 0.12
# Times the drift that is wanted; one conversion each. Lenient first, for what is foretold tends to be worse
# than what comes: on EfficientNet-Lite0 four layers did what eight were foretold to need.
_AIMS = (1.4, 1.15, 1.0)
_LEVELS = 255
_TINY = 1e-8  # no scale is 0

Samples = Sequence[tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Sensitive:
    """A layer, and what it would do alone."""

    name: str
    drift: float  # of the model in which only this layer is int8
    weights: int


def sensitivities(module: nn.Module, samples: Samples, kinds: tuple[type[nn.Module], ...]) -> list[Sensitive]:
    """The layers of these kinds, the one that hurts most first.

    Args:
        module: in fp32; left as it is.
        samples: arguments of the model; a few rows do, for only the order counts.
        kinds: of layers with a weight of two dimensions or more and one input.
    """
    model = copy.deepcopy(module).eval()
    with torch.inference_mode(False), torch.no_grad():
        wanted = [flattened(model(*sample)) for sample in samples]
        found = []
        for name, layer in model.named_modules():
            if type(layer) in kinds:
                with _Rounded(layer):
                    pairs = ((one, flattened(model(*s))) for one, s in zip(wanted, samples, strict=True))
                    drift = difference(pairs).drift
                found.append(Sensitive(name, drift, layer.weight.numel()))
    return sorted(found, key=lambda one: -one.drift)


def to_give_back(
    layers: Sequence[Sensitive], drift: float, wanted: float, most_weights: float
) -> frozenset[str]:
    """The layers that hurt most, as many as it takes to come from `drift` to `wanted`; a pure function.

    Args:
        layers: by how much they hurt.
        drift: of the model when all of them are int8.
        wanted: drift to reach.
        most_weights: how many weights may go back; a layer with more than what is left is passed over.
    """
    total = sum(one.drift**2 for one in layers)
    excess = total * (1 - (wanted / drift) ** 2)
    kept: set[str] = set()
    for one in layers:
        if excess <= 0:
            break
        if one.weights <= most_weights:
            kept.add(one.name)
            most_weights -= one.weights
            excess -= one.drift**2
    return frozenset(kept)


def search(
    layers: Sequence[Sensitive],
    most_weights: float,
    drift: float,
    wanted: float,
    drift_with: Callable[[frozenset[str]], float],
) -> frozenset[str]:
    """Which layers to give back so that the model drifts by `wanted` or less, or by the least found.

    Args:
        layers: see `to_give_back`.
        most_weights: see `to_give_back`.
        drift: without giving any back.
        wanted: drift to reach.
        drift_with: converts the model with these layers in fp32, and measures; called three times at most.
    """
    tried: dict[frozenset[str], float] = {frozenset(): drift}
    for aim in _AIMS:
        kept = to_give_back(layers, drift, aim * wanted, most_weights)
        if kept in tried or len(kept) == len(layers):  # a model in which nothing is int8 is no answer
            continue
        tried[kept] = drift_with(kept)
        if tried[kept] <= wanted:
            break
    return min(tried, key=lambda kept: tried[kept])


class _Rounded:
    """While entered, the layer computes with weights of 7 bits, row by row, and inputs of 8."""

    def __init__(self, layer: Any) -> None:
        self._layer, self._weights, self._hook = layer, layer.weight.data, None

    def __enter__(self) -> None:
        rows = self._weights.flatten(1).abs().amax(1)
        scales = (rows / 63).clamp_min(_TINY)
        zeros = torch.zeros(len(scales), dtype=torch.int32)
        self._layer.weight.data = torch.fake_quantize_per_channel_affine(
            self._weights, scales, zeros, 0, -64, 63
        )
        self._hook = self._layer.register_forward_pre_hook(lambda _layer, given: (_rounded(given[0]),))

    def __exit__(self, *_error: object) -> None:
        self._layer.weight.data = self._weights
        if self._hook is not None:
            self._hook.remove()


def _rounded(values: torch.Tensor) -> torch.Tensor:
    low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
    scale = max((high - low) / _LEVELS, _TINY)
    return torch.fake_quantize_per_tensor_affine(values, scale, round(-low / scale), 0, _LEVELS)
