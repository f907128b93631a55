"""Finds objects in a picture."""

from __future__ import annotations

from typing import Any

import torch

from torchere.handlers.devices import to_device
from torchere.handlers.image_transform import ImageTransform
from torchere.handlers.labels import map_class_to_label
from torchere.handlers.timer import timed
from torchere.handlers.vision import VisionHandler


class ObjectDetector(VisionHandler):
    """Answers each picture with a list of `{name: [x1, y1, x2, y2], "score": s}`, boxes in pixels.

    The model is called like torchvision's detectors and answers like them: for each picture `boxes`, `labels`
    and `scores`. Pictures are scaled to 0 ... 1 and neither resized nor normalised.
    """

    threshold = 0.5
    image_processing: Any = ImageTransform(resize=None, crop=None, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))

    def stack(self, images: list[torch.Tensor]) -> Any:
        """One tensor for pictures of one size, and a list of tensors where the model asks for it."""
        on_device = [to_device(image, self.device) for image in images]
        same_size = len({image.shape for image in images}) == 1
        return torch.stack(on_device) if same_size and not _takes_list(self.model) else on_device

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the detector; scripted ones of torchvision give (losses, detections)."""
        with torch.inference_mode():
            output = self.model(data, *args, **kwargs)
        return output[1] if isinstance(output, tuple) else output

    @timed
    def postprocess(self, data: Any) -> Any:
        """Keep what scores at least `threshold`, and name it."""
        return [self._detections(picture) for picture in data]

    def _detections(self, picture: dict[str, torch.Tensor]) -> list[dict[str, object]]:
        keep = picture["scores"] >= self.threshold
        boxes, labels, scores = (picture[key][keep].tolist() for key in ("boxes", "labels", "scores"))
        return [
            {**map_class_to_label([[box]], self.mapping, [[label]])[0], "score": score}
            for box, label, score in zip(boxes, labels, scores, strict=True)
        ]


def _takes_list(model: Any) -> bool:
    """Whether a scripted model declares its input as a list of tensors."""
    schema = getattr(getattr(model, "forward", None), "schema", None)
    return schema is not None and "List[Tensor]" in [str(item.type) for item in schema.arguments[1:2]]
