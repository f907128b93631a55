"""A small network on measurements of cells: 30 numbers to one score; above 0 the tumour is benign."""

from __future__ import annotations

import torch
from torch import nn

FEATURES, HIDDEN = 30, 32


class Tumour(nn.Module):
    """FP32 [rows, 30], in the units of the data, to scores [rows, 1]; it scales its inputs itself."""

    mean: torch.Tensor
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("scale", torch.ones(FEATURES))
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1)
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """See the class."""
        scores: torch.Tensor = self.layers((features - self.mean) / self.scale)
        return scores
