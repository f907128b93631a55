"""Trains the network on the breast cancer data that scikit-learn ships, in about a second."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from examples.harness.errors import ExampleFailed
from examples.tabular.network import Tumour

_STEPS, _HELD_OUT, _SEED = 100, 100, 0


@dataclass(frozen=True, slots=True)
class Trained:
    """A network, and rows that it was not trained on: FP32 [100, 30] and their classes [100]."""

    network: Tumour
    features: torch.Tensor
    benign: torch.Tensor

    @property
    def accuracy(self) -> float:
        """How many of these rows it gets right, 0 to 1."""
        with torch.inference_mode():
            right = (self.network(self.features)[:, 0] > 0) == self.benign
        return float(right.float().mean())


def trained() -> Trained:
    """Load, split, scale, train; the same each time.

    Raises:
        ExampleFailed: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_breast_cancer  # type: ignore[import-untyped]  # noqa: PLC0415
    except ModuleNotFoundError as err:
        raise ExampleFailed("scikit-learn is not there; pip install scikit-learn") from err
    data = load_breast_cancer()
    torch.manual_seed(_SEED)
    order = torch.randperm(len(data.target))
    features = torch.tensor(data.data, dtype=torch.float32)[order]
    benign = torch.tensor(data.target, dtype=torch.bool)[order]
    network = Tumour()
    network.mean = features[_HELD_OUT:].mean(0)
    network.scale = features[_HELD_OUT:].std(0)
    _train(network, features[_HELD_OUT:], benign[_HELD_OUT:].float())
    return Trained(network.eval(), features[:_HELD_OUT], benign[:_HELD_OUT])


def _train(network: Tumour, features: torch.Tensor, wanted: torch.Tensor) -> None:
    optimiser = torch.optim.AdamW(network.parameters(), lr=0.01, weight_decay=0.01)
    for _ in range(_STEPS):
        loss = functional.binary_cross_entropy_with_logits(network(features)[:, 0], wanted)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
