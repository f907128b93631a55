"""Object detection handler."""

from __future__ import annotations

from typing import Any

import torch

from torchere.handlers.devices import to_device
from torchere.handlers.image_transform import ImageTransform
from torchere.handlers.labels import map_class_to_label
from torchere.handlers.timer import timed
from torchere.handlers.vision import VisionHandler


class ObjectDetector(VisionHandler):
    """Answers each image with a list of `{name: [x1, y1, x2, y2], "score": s}`, boxes in pixels.

    The model is called like torchvision's detectors and returns the same: for each image `boxes`, `labels`
    and `scores`. Images are scaled to 0 ... 1 and neither resized nor normalised.
    """

    threshold = 0.5
    image_processing: Any = ImageTransform(resize=None, crop=None, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))

    def stack(self, images: list[torch.Tensor]) -> Any:
        """Return one tensor for images of one size; a list if sizes differ, or if the model takes a list."""
        on_device = [to_device(image, self.device) for image in images]
        same_size = len({image.shape for image in images}) == 1
        return torch.stack(on_device) if same_size and not _takes_list(self.model) else on_device

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the detector and return its detections.

        Scripted detectors of torchvision return (losses, detections).
        """
        with torch.inference_mode():
            output = self.model(data, *args, **kwargs)
        return output[1] if isinstance(output, tuple) else output

    @timed
    def postprocess(self, data: Any) -> Any:
        """Return the named detections of each image whose score is at least `threshold`."""
        return [self._detections(picture) for picture in data]

    def _detections(self, picture: dict[str, torch.Tensor]) -> list[dict[str, object]]:
        keep = picture["scores"] >= self.threshold
        boxes, labels, scores = (picture[key][keep].tolist() for key in ("boxes", "labels", "scores"))
        return [
            {**map_class_to_label([[box]], self.mapping, [[label]])[0], "score": score}
            for box, label, score in zip(boxes, labels, scores, strict=True)
        ]


def _takes_list(model: Any) -> bool:
    """Return whether a scripted model declares its input as a list of tensors."""
    schema = getattr(getattr(model, "forward", None), "schema", None)
    return schema is not None and "List[Tensor]" in [str(item.type) for item in schema.arguments[1:2]]
