"""The built-in image handlers: classification, segmentation and object detection."""

from __future__ import annotations

import io
import logging
from typing import Any

import torch
from PIL import Image

from torchere.handlers.base import refusal_of
from torchere.handlers.context import Context
from torchere.handlers.labels import map_class_to_label
from torchere.handlers.loading.devices import to_device, without_gradients
from torchere.handlers.metrics import timed
from torchere.handlers.rows import wrong_setting
from torchere.handlers.vision import VisionHandler
from torchere.handlers.vision.transform import ImageTransform

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
        top_k = self._torchere_image_config().get("top_k", self.topk)
        if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
            raise wrong_setting("image.top_k", top_k, "1 or more")
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
        """Return a row with a grey 256 x 256 JPEG; None if the model fails on it: it may not take images."""
        buffer = io.BytesIO()
        Image.new("RGB", (256, 256), (128, 128, 128)).save(buffer, "JPEG")
        rows: list[dict[str, object]] = [{"body": bytearray(buffer.getvalue())}]
        refusal = refusal_of(lambda: self.postprocess(self.inference(self.preprocess(rows))))
        if refusal is None:
            return rows
        logger.warning("not warmed up, as the model does not take a picture: %s", refusal)
        return None


class ImageSegmenter(VisionHandler):
    """Answers each image with nested lists [height][width][2]: class index (as a float), probability.

    The model takes [batch, 3, 224, 224] and gives `{"out": scores}`, scores [batch, classes, height, width]
    before softmax.
    """

    @timed
    def postprocess(self, data: Any) -> Any:
        """Return the most probable class of each pixel and its probability, by softmax."""
        best = torch.softmax(data["out"], dim=1).max(dim=1)
        return torch.stack([best.indices.to(best.values.dtype), best.values], dim=3).tolist()


ImangeSegmenter = ImageSegmenter  # the spelling of early TorchServe versions


class ObjectDetector(VisionHandler):
    """Answers each image with a list of `{name: [x1, y1, x2, y2], "score": s}`, boxes in pixels.

    A class named "score" is reported under its index, because that key holds the score.

    The model has the interface of torchvision's detectors: it returns for each image `boxes`, `labels`
    and `scores`. Images are scaled to 0 ... 1 and neither resized nor normalised.
    """

    threshold = 0.5
    image_processing: Any = ImageTransform(resize=None, crop=None, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))

    def _torchere_stack(self, images: list[torch.Tensor]) -> Any:
        """Return one tensor for images of one size; a list if sizes differ, or if the model takes a list."""
        on_device = [to_device(image, self.device) for image in images]
        same_size = len({image.shape for image in images}) == 1
        return torch.stack(on_device) if same_size and not _takes_list(self.model) else on_device

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the detector on a tensor, or on a list of tensors that are on its device."""
        data = data if isinstance(data, list) else to_device(data, self.device)
        with without_gradients(self.device):
            return self.model(data, *args, **kwargs)

    @timed
    def postprocess(self, data: Any) -> Any:
        """Return the named detections of each image whose score is at least `threshold`.

        Scripted detectors of torchvision give (losses, detections).
        """
        pictures = data[1] if isinstance(data, tuple) else data
        return [_detections(picture, self.threshold, self.mapping) for picture in pictures]


def _detections(
    picture: dict[str, torch.Tensor], threshold: float, names: dict[str, str] | None
) -> list[dict[str, object]]:
    keep = picture["scores"] >= threshold
    boxes, labels, scores = (picture[key][keep].tolist() for key in ("boxes", "labels", "scores"))
    return [
        {**_named(box, label, names), "score": score}
        for box, label, score in zip(boxes, labels, scores, strict=True)
    ]


def _named(box: list[float], label: int, names: dict[str, str] | None) -> dict[str, object]:
    named = map_class_to_label([[box]], names, [[label]])[0]
    return {str(label): box} if "score" in named else named


def _takes_list(model: Any) -> bool:
    """Return whether a scripted model declares its input as a list of tensors."""
    schema = getattr(getattr(model, "forward", None), "schema", None)
    return schema is not None and "List[Tensor]" in [str(item.type) for item in schema.arguments[1:2]]
