"""Image segmentation handler."""

from __future__ import annotations

from typing import Any

import torch

from torchere.handlers.timer import timed
from torchere.handlers.vision import VisionHandler


class ImageSegmenter(VisionHandler):
    """Answers each image with nested lists [height][width][2]: class index (as a float), probability.

    The model takes [batch, 3, 224, 224] and gives `{"out": scores}`, scores [batch, classes, height, width]
    before softmax.
    """

    @timed
    def postprocess(self, data: Any) -> Any:
        """Return the most probable class of each pixel by softmax, and its probability."""
        best = torch.softmax(data["out"], dim=1).max(dim=1)
        return torch.stack([best.indices.to(best.values.dtype), best.values], dim=3).tolist()


ImangeSegmenter = ImageSegmenter  # the spelling of early TorchServe versions
