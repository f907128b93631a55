"""Images sent as tensors of the Open Inference Protocol."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image

from torchere.handlers.errors import PredictionException
from torchere.handlers.image import ImageLimits, check_pixels, decode_image
from torchere.handlers.row_value import sole_element

_CHANNELS = {1: "L", 3: "RGB", 4: "RGBA"}  # modes of Pillow
_EXPECTED = (
    "expected UINT8 [height, width, 3] (or 1 or 4 channels), pixels; or BYTES [1], an image file; or FP32, "
    "FP16, BF16 or FP64 [channels, height, width], the model's input; each with or without a first dimension "
    "of 1"
)


def picture_of_tensor(value: Any, limits: ImageLimits) -> Image.Image | torch.Tensor:
    """Return the image; for floating-point tensors, the model's input for one request as float32.

    Args:
        value: a numpy array (BF16: a torch tensor). BYTES hold an image file, or its base64 text, as in
            JSON.
        limits: bounds on the image.

    Raises:
        PredictionException: 400, it has none of the forms above, or holds several images.
    """
    if isinstance(value, torch.Tensor):
        numbers: torch.Tensor = _without_batch(value).float()
        return numbers
    if value.dtype == object:
        element = sole_element(value, "the bytes of an image file")
        # All-ASCII bytes are base64: the only image formats in pure ASCII are not sent in practice.
        return decode_image(element.decode() if element and element.isascii() else element, limits)
    if value.dtype == np.uint8:
        return _picture(_without_batch(value), limits)
    if value.dtype.kind == "f":
        return torch.from_numpy(_without_batch(value).astype(np.float32))
    raise PredictionException(f"The request has a tensor of {value.dtype} that is no image; {_EXPECTED}", 400)


def _without_batch(value: Any) -> Any:
    if value.ndim == 4 and len(value) == 1:
        return value[0]
    if value.ndim in (2, 3):
        return value
    several = f" of {len(value)} images" if value.ndim == 4 else ""
    raise PredictionException(
        f"The request has a tensor{several} of shape {list(value.shape)}; {_EXPECTED}. "
        "Send a request for each image: the server puts them into one batch",
        400,
    )


def _picture(pixels: Any, limits: ImageLimits) -> Image.Image:
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    height, width, channels = pixels.shape
    if channels not in _CHANNELS or not height or not width:
        raise PredictionException(f"The request has UINT8 of shape {list(pixels.shape)}; {_EXPECTED}", 400)
    check_pixels(width, height, limits)
    mode = _CHANNELS[channels]
    return Image.frombytes(mode, (width, height), np.ascontiguousarray(pixels).tobytes())
