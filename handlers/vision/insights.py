"""Explain one output of a model by its input: integrated gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def integrated_gradients(
    model: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor, target: Any = 0, n_steps: int = 15
) -> torch.Tensor:
    """Return how much each input element adds to the score of `target`, against an all-zero input.

    The integral along the straight line from zero is taken by Gauss-Legendre quadrature, as captum does by
    default. Parameters of the model get no gradients, so it may be shared between threads.

    Args:
        model: gives [batch, classes], differentiable in its input.
        inputs: [batch, ...], float.
        target: index of the class, or one per element of the batch.
        n_steps: points on the line; TorchServe takes 15.

    Returns:
        A tensor of the shape of `inputs`.
    """
    nodes, weights = np.polynomial.legendre.leggauss(n_steps)
    total = torch.zeros_like(inputs)
    for node, weight in zip(nodes, weights, strict=True):
        # Nodes and weights are for -1 ... 1; the line is 0 ... 1.
        point = (inputs.detach() * ((1.0 + node) / 2.0)).requires_grad_()
        with torch.enable_grad():
            scores = model(point)
            rows = torch.arange(len(inputs), device=scores.device)
            picked = scores[rows, torch.as_tensor(target, device=scores.device)].sum()
        (gradient,) = torch.autograd.grad(picked, point)
        total += gradient * (weight / 2.0)
    return total * inputs
