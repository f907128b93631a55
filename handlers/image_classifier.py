"""Image classification handler."""

from __future__ import annotations

import io
import logging
from typing import Any

import torch
from PIL import Image

from torchere.handlers.context import Context
from torchere.handlers.image_transform import ImageTransform
from torchere.handlers.labels import map_class_to_label
from torchere.handlers.timer import timed
from torchere.handlers.vision import VisionHandler
from torchere.handlers.warm_up import refusal_of

logger = logging.getLogger(__name__)


class ImageClassifier(VisionHandler):
    """Answers each image with its most probable classes, `{name: probability}`, best first.

    The model takes [batch, 3, 224, 224] and gives scores [batch, classes] before softmax; the sizes and the
    normalisation come from `handler.image` in model-config.yaml, as does `top_k`.
    """

    topk = 5
    image_processing: Any = ImageTransform()

    def initialize(self, context: Context) -> None:
        """Load the model and read `handler.image`.

        Raises:
            ValueError: a value under `handler.image` is wrong.
        """
        super().initialize(context)
        top_k = self.image_config().get("top_k", self.topk)
        if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
            raise ValueError(f"handler.image.top_k in model-config.yaml is {top_k!r}; expected 1 or more")
        self.set_max_result_classes(top_k)

    def set_max_result_classes(self, topk: int) -> None:
        """Set the largest number of classes in an answer."""
        self.topk = topk

    def get_max_result_classes(self) -> int:
        """Return the largest number of classes in an answer."""
        return self.topk

    @timed
    def postprocess(self, data: Any) -> Any:
        """Return the most probable classes of each image by softmax, with their names."""
        probabilities = torch.softmax(data, dim=1)
        best, classes = torch.topk(probabilities, min(self.topk, probabilities.shape[1]), dim=1)
        return map_class_to_label(best.tolist(), self.mapping, classes.tolist())

    def warmup_data(self) -> list[dict[str, object]] | None:
        """Return one small grey JPEG; None where the model refuses it, as one for lists of numbers may."""
        buffer = io.BytesIO()
        Image.new("RGB", (256, 256), (128, 128, 128)).save(buffer, "JPEG")
        rows: list[dict[str, object]] = [{"body": bytearray(buffer.getvalue())}]
        refusal = refusal_of(lambda: self.postprocess(self.inference(self.preprocess(rows))))
        if refusal is None:
            return rows
        logger.warning("not warmed up, as the model does not take a picture: %s", refusal)
        return None
