"""Pictures: from the bytes of a request to a PIL image, and from there to a tensor.

Decoding is bounded: the size that the header claims is checked before a pixel is read. What is not a picture
is answered with 400 and a text that says what came, what was expected and how to send it.
"""

from __future__ import annotations

import base64
import binascii
import io
import struct
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from torchere.handlers.errors import PredictionException

# Where Pillow itself refuses a picture as a decompression bomb: twice its warning level of 2**30 / 4 / 3 pixels.
DEFAULT_MAX_PIXELS = 178_956_970
DEFAULT_MAX_BYTES = 256 * 2**20

# Pillow hands EPS to Ghostscript, which runs programs: not for what comes from a network.
_REFUSED_FORMATS = frozenset({"EPS"})

# What Pillow's decoders raise on broken files, beside their own errors.
_BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    ArithmeticError,
    struct.error,
    zlib.error,
)

Transform = Callable[[Image.Image], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Bounds on one picture; None means none."""

    max_pixels: int | None = DEFAULT_MAX_PIXELS
    max_bytes: int | None = DEFAULT_MAX_BYTES


def decode_image(data: bytes | bytearray | str, limits: ImageLimits | None = None) -> Image.Image:
    """Decode a picture of any format Pillow reads, as it is stored: no rotation by EXIF, no change of mode.

    Args:
        data: the bytes of the file; a `str` is base64, with or without a `data:...;base64,` in front.
        limits: bounds on its size.

    Raises:
        PredictionException: 400, it is not a picture, or it is broken or too large.
    """
    limits = limits or ImageLimits()
    raw = _from_base64(data) if isinstance(data, str) else bytes(data)
    if limits.max_bytes is not None and len(raw) > limits.max_bytes:
        raise PredictionException(
            f"The image has {len(raw)} bytes, more than the limit of {limits.max_bytes}; send a smaller one, or "
            "raise handler.image.max_bytes in model-config.yaml",
            400,
        )
    image = _open(raw, limits)
    try:
        image.load()
    except _BROKEN as err:
        raise PredictionException(
            f"The {image.format} image of {len(raw)} bytes is broken and can't be decoded: {err}; send the "
            "whole file",
            400,
        ) from err
    return image


def _open(raw: bytes, limits: ImageLimits) -> Image.Image:
    if not Image.MIME or len(Image.ID) < 30:
        Image.init()  # registers every format; until then Pillow knows the five commonest
    try:
        with warnings.catch_warnings() if False else _NO_WARNINGS:
            image = Image.open(io.BytesIO(raw), formats=[f for f in Image.ID if f not in _REFUSED_FORMATS])
    except Image.DecompressionBombError as err:
        raise _too_large(str(err)) from err
    except _BROKEN as err:
        raise PredictionException(_not_an_image(raw), 400) from err
    pixels = image.width * image.height
    if limits.max_pixels is not None and pixels > limits.max_pixels:
        raise _too_large(f"it has {image.width} x {image.height} = {pixels} pixels, limit {limits.max_pixels}")
    return image
