"""Convert a PIL image to the input tensor of a vision model, without torchvision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from torchere.archiver.models.inputs import pictures
from torchere.handlers.errors import bad_request
from torchere.handlers.rows import wrong_setting
from torchere.handlers.vision.decode import DEFAULT_MAX_DECODED_BYTES

# Limit of a resized image: an image one pixel high, scaled until its shorter side is `resize`, would fill the
# memory. This many RGB pixels take 512 MiB in Pillow.
MAX_RESIZED_PIXELS = 2**27
MAX_RATIO = 4  # longer to shorter side; up to it, a resized image may exceed the limits
# Bytes counted per pixel of an image that is not cropped: as many as decode.py counts for a JPEG, so that
# every photograph that was decoded passes. Its tensor takes 12 bytes per pixel, and the batch 12 more.
_PIXEL_BYTES = 10


def to_tensor(image: Image.Image) -> torch.Tensor:
    """Return an image as a float tensor [channels, height, width]; 8-bit values become 0.0 ... 1.0."""
    array = np.array(image, copy=True)
    if array.ndim == 2:
        array = array[:, :, None]
    tensor = torch.from_numpy(array).permute(2, 0, 1).contiguous()
    return tensor.float().div_(255) if array.dtype == np.uint8 else tensor.float()


def resized_size(width: int, height: int, shorter: int) -> tuple[int, int]:
    """Return (width, height) with the shorter side set to `shorter`; the longer is cut to an integer."""
    if width <= height:
        return shorter, int(shorter * height / width)
    return int(shorter * width / height), shorter


def crop_box(width: int, height: int, size: int) -> tuple[int, int, int, int]:
    """Return (left, top, right, bottom) of the centre square, which extends beyond a smaller image.

    The rounding is torchvision's CenterCrop: to the nearest, halves to even; when padding, the odd pixel goes
    to the right and to the bottom.
    """
    left, top = _crop_start(width, size), _crop_start(height, size)
    return left, top, left + size, top + size


def _crop_start(length: int, size: int) -> int:
    return -((size - length) // 2) if length < size else round((length - size) / 2.0)


def to_rgb(image: Image.Image) -> Image.Image:
    """Return an image of any mode as RGB with 8 bits per channel; of 16 bits the upper 8 are kept.

    Raises:
        PredictionException: 400, the pixels are 32-bit numbers, and files do not say which number is white.
    """
    try:
        return pictures.to_rgb(image)
    except ValueError as err:
        raise bad_request(str(err)) from err


@dataclass(frozen=True, slots=True)
class ImageTransform:
    """A transform from a PIL image to a normalised float tensor [3, crop, crop].

    The steps are those of torchvision's `Resize(resize)`, `CenterCrop(crop)`, `ToTensor()`, `Normalize(mean,
    std)` on PIL images. Images are converted to three channels first (`to_rgb`). The default numbers are
    ImageNet's.
    """

    resize: int | None = 256  # shorter side, in pixels
    crop: int | None = 224  # side of the square, in pixels
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    max_decoded_bytes: float | None = DEFAULT_MAX_DECODED_BYTES  # applies only without `crop`; None: no limit

    def __call__(self, image: Image.Image) -> torch.Tensor:
        """Return the tensor of an image.

        Raises:
            PredictionException: 400, `to_rgb` refuses its mode, or it has too many pixels: a narrow image
                after it is resized, or an image that is not cropped.
        """
        image = to_rgb(image)
        if self.resize is not None:
            size = resized_size(image.width, image.height, self.resize)
            if size[0] * size[1] > max(MAX_RESIZED_PIXELS, MAX_RATIO * self.resize**2):
                raise bad_request(
                    f"The image of {image.width} x {image.height} pixels is too narrow: resized it has "
                    f"{size[0]} x {size[1]}; send the part that matters"
                )
            image = image.resize(size, Image.Resampling.BILINEAR) if image.size != size else image
        if self.crop is not None:
            image = image.crop(crop_box(image.width, image.height, self.crop))
        else:
            self._check_pixels(image)
        mean = torch.tensor(self.mean).view(-1, 1, 1)
        std = torch.tensor(self.std).view(-1, 1, 1)
        return to_tensor(image).sub_(mean).div_(std)

    def _check_pixels(self, image: Image.Image) -> None:
        limit_bytes, pixels = self.max_decoded_bytes, image.width * image.height
        if limit_bytes is None or pixels <= MAX_RATIO * (self.resize or 0) ** 2:
            return
        if pixels * _PIXEL_BYTES > limit_bytes:
            raise bad_request(
                f"The image is too large: its tensor of {image.width} x {image.height} pixels counts "
                f"{pixels * _PIXEL_BYTES} bytes, limit {limit_bytes}; send a smaller one, or raise "
                "handler.image.max_decoded_bytes in model-config.yaml, or set crop there"
            )

    def replaced_by(self, overrides: Mapping[str, Any]) -> ImageTransform:
        """Return a copy with the values that `handler.image` of model-config.yaml sets.

        Raises:
            ValueError: a value has the wrong type or is out of range.
        """
        sides = {key: _side(key, overrides[key]) for key in ("resize", "crop") if key in overrides}
        levels = {key: _levels(key, overrides[key]) for key in ("mean", "std") if key in overrides}
        return replace(self, **sides, **levels)  # type: ignore[arg-type]  # the keys are the fields above


def _side(key: str, value: object) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 16_384):
        return value
    raise wrong_setting(f"image.{key}", value, "pixels (1 to 16384)")


def _levels(key: str, value: object) -> tuple[float, ...]:
    numbers = value if isinstance(value, (list, tuple)) else ()
    valid = len(numbers) == 3 and all(isinstance(n, (int, float)) for n in numbers)
    if not valid or (key == "std" and 0 in numbers):
        raise wrong_setting(f"image.{key}", value, "three numbers, one per colour")
    return tuple(float(n) for n in numbers)
