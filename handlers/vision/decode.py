"""Decode images: from the bytes of a request to a PIL image.

Decoding is bounded: the size that the header claims, and the memory that the pixels take while they are
decoded, are checked before a pixel is read. Data that is not an image is answered with 400 and a text that
names the data found, the data expected, and how to send it.
"""

from __future__ import annotations

import base64
import binascii
import functools
import io
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from torchere.handlers.errors import PredictionException, bad_request
from torchere.handlers.rows import sole_element

# Pillow's own limit for decompression bombs: twice its warning level of 2**30 / 4 / 3.
DEFAULT_MAX_PIXELS = 178_956_970
DEFAULT_MAX_BYTES = 256 * 2**20
DEFAULT_MAX_DECODED_BYTES = 512 * 2**20  # a JPEG of 53 megapixels

# Pillow passes EPS to Ghostscript, which runs programs that the file contains; IPTC can hold an EPS. Pillow
# decodes XPM in Python, and whole lines of the file even for an image of one pixel: seconds per megabyte.
_REFUSED_FORMATS = frozenset({"EPS", "IPTC", "XPM"})
_PIXEL_BYTES = 4  # of an RGB image in Pillow; images of fewer bands are converted to RGB
# Bytes per pixel and band that a decoder holds in addition to the image: for JPEG the coefficients of several
# scans, for WebP two canvases and a frame. Measured at 12 megapixels with Pillow 13.
_WORK_BYTES = {"JPEG": 2, "MPO": 2, "TIFF": 2, "QOI": 1, "AVIF": 2, "WEBP": 4, "JPEG2000": 5}
# Bytes per pixel for decoders that loop over all pixels in Python: 16 million pixels take a second. DDS takes
# a second for one million; its number stands for that time, not for memory.
_SLOW_PIXEL_BYTES = {"fits_gzip": 64, "bmp_rle": 32, "dds_rgb": 512}
# Formats that contain other image files, each with its own size. JPEG 2000 takes the most bytes per pixel.
_CONTAINERS = frozenset({"ICNS", "ICO", "BLP"})
_MAX_PIXEL_BYTES = 24

# Exceptions that Pillow's decoders raise on broken files, besides Pillow's own errors.
_BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    RuntimeError,
    AttributeError,
    LookupError,
    TypeError,
    ArithmeticError,
    struct.error,
    zlib.error,
)


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Bounds on one image; None means no bound."""

    max_pixels: int | None = DEFAULT_MAX_PIXELS
    max_bytes: int | None = DEFAULT_MAX_BYTES
    max_decoded_bytes: int | None = DEFAULT_MAX_DECODED_BYTES


def decode_image(data: bytes | bytearray | str, limits: ImageLimits | None = None) -> Image.Image:
    """Decode an image of any format that Pillow reads, as stored: no rotation by EXIF, no mode change.

    Args:
        data: the bytes of the file; a `str` is base64, optionally prefixed with `data:...;base64,`.
        limits: bounds on its size.

    Raises:
        PredictionException: 400, it is not an image, or it is broken or too large.
    """
    limits = limits or ImageLimits()
    raw = _from_base64(data) if isinstance(data, str) else bytes(data)
    if limits.max_bytes is not None and len(raw) > limits.max_bytes:
        raise bad_request(
            f"The image has {len(raw)} bytes, more than the limit of {limits.max_bytes}; send a smaller one, "
            "or raise handler.image.max_bytes in model-config.yaml"
        )
    image = _open(raw, limits)
    try:
        with _bounded_parts(image, limits):
            image.load()
    except Image.DecompressionBombError as err:  # the images inside an icon have their own sizes
        raise _too_large(str(err)) from err
    except _BROKEN as err:
        raise bad_request(
            f"The {image.format} image of {len(raw)} bytes is broken and can't be decoded: {err}; send the "
            "whole file"
        ) from err
    return image


def _open(raw: bytes, limits: ImageLimits) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(raw), formats=_formats())
        decoded_bytes = _decoded_bytes(image)  # raises an error for a mode that Pillow does not know
    except Image.DecompressionBombError as err:
        raise _too_large(str(err)) from err
    except _BROKEN as err:
        raise bad_request(
            f"The request body is not an image: found {_describe(raw)}; expected the bytes of a JPEG, PNG or "
            "other image file. Send them as they are (curl -T cat.jpg URL), in a form field "
            "(curl -F data=@cat.jpg URL), or as base64 with Content-Type: text/plain"
        ) from err
    check_pixels(image.width, image.height, limits)
    if limits.max_decoded_bytes is not None and decoded_bytes > limits.max_decoded_bytes:
        raise bad_request(
            f"The image is too large: decoding {image.width} x {image.height} pixels of {image.format} "
            f"({image.mode}) takes {decoded_bytes} bytes, limit {limits.max_decoded_bytes}; send a "
            "smaller one, or raise handler.image.max_decoded_bytes in model-config.yaml"
        )
    return image


def _decoded_bytes(image: Image.Image) -> int:
    """Estimate from the header the peak memory of decoding."""
    work_bytes = _WORK_BYTES.get(image.format or "", 0) * len(image.getbands())
    slow_bytes = max((_SLOW_PIXEL_BYTES.get(tile[0], 0) for tile in getattr(image, "tile", ())), default=0)
    return image.width * image.height * max(slow_bytes, _PIXEL_BYTES + work_bytes)


class _Bound(threading.local):
    """The largest number of pixels that Pillow may open in this thread; None: no bound."""

    pixels: float | None = None


_bound = _Bound()
_pillows_check = Image._decompression_bomb_check


def _check_bomb(size: tuple[int, int], **how: Any) -> None:
    """Check the limit of this thread, then make Pillow's own check, which has one limit for all threads."""
    if _bound.pixels is not None and size[0] * size[1] > _bound.pixels:
        raise Image.DecompressionBombError(
            f"it holds one of {size[0] * size[1]} pixels, limit {_bound.pixels:.0f}"
        )
    _pillows_check(size, **how)


Image._decompression_bomb_check = _check_bomb


@contextmanager
def _bounded_parts(image: Image.Image, limits: ImageLimits) -> Iterator[None]:
    if limits.max_decoded_bytes is not None and image.format in _CONTAINERS:
        _bound.pixels = limits.max_decoded_bytes / _MAX_PIXEL_BYTES
    try:
        yield
    finally:
        _bound.pixels = None


def check_pixels(width: int, height: int, limits: ImageLimits) -> None:
    """Refuse an image of too many pixels.

    Raises:
        PredictionException: 400, with the number of pixels and the limit.
    """
    pixels = width * height
    if limits.max_pixels is not None and pixels > limits.max_pixels:
        raise _too_large(f"{width} x {height} = {pixels} pixels, limit {limits.max_pixels}")


@functools.cache
def _formats() -> tuple[str, ...]:
    Image.init()  # registers every format; until then Pillow knows the commonest five
    return tuple(name for name in Image.ID if name not in _REFUSED_FORMATS)


def _too_large(found: str) -> PredictionException:
    return bad_request(
        f"The image is too large: {found}; send a smaller one, or set limit_max_image_pixels=false in "
        "config.properties"
    )


# Files that are sent as images and can't be opened: offset, the bytes there, and a description.
_KNOWN_HEADS = (
    (0, b"PK", "a zip or pickle file"),
    (0, b"\x80\x02", "a zip or pickle file"),
    (0, b"\xff\xd8\xff", "a JPEG whose head is broken or cut off"),
    (0, b"\x89PNG\r\n\x1a\n", "a PNG whose head is broken or cut off"),
    (4, b"ftyphei", "a HEIC file, which Pillow does not decode: convert it to JPEG"),
    (4, b"ftypmif1", "a HEIF file, which Pillow does not decode: convert it to JPEG"),
)


def _describe(raw: bytes) -> str:
    if not raw:
        return "no bytes"
    for offset, magic, what in _KNOWN_HEADS:
        if raw.startswith(magic, offset):
            return f"{len(raw)} bytes of {what}"
    head = raw[:24]
    if head.lstrip()[:1] in (b"{", b"["):
        return f"{len(raw)} bytes that look like JSON: {head!r}"
    return f"{len(raw)} bytes that begin with {head!r}"


def _from_base64(text: str) -> bytes:
    payload = text.partition(";base64,")[2] if text.startswith("data:") else text
    try:
        return base64.b64decode("".join(payload.split()), validate=True)
    except (binascii.Error, ValueError) as err:
        raise bad_request(
            f"The request body is text that is not base64 (it begins with {text[:24]!r}); expected an image: "
            "send its bytes with Content-Type: application/octet-stream, or encode them as base64"
        ) from err


_CHANNELS = {1: "L", 3: "RGB", 4: "RGBA"}  # modes of Pillow
_EXPECTED = (
    "expected UINT8 [height, width, 3] (or 1 or 4 channels), pixels; or BYTES [1], an image file; or FP32, "
    "FP16, BF16 or FP64 [channels, height, width], the model's input; each with or without a first dimension "
    "of 1"
)


def picture_of_tensor(value: Any, limits: ImageLimits) -> Image.Image | torch.Tensor:
    """Convert one request's tensor: UINT8 or BYTES to an image, floats to the model's input as float32.

    Args:
        value: a numpy array (BF16: a torch tensor). BYTES hold an image file, or its base64 text, as in
            JSON.
        limits: bounds on the image.

    Raises:
        PredictionException: 400, its datatype or shape is not accepted, or it holds several images.
    """
    if isinstance(value, torch.Tensor):
        numbers: torch.Tensor = _without_batch(value).float()
        return numbers
    if value.dtype == object:
        element = sole_element(value, "the bytes of an image file")
        # All-ASCII bytes are taken for base64: image formats in pure ASCII are not sent in practice.
        return decode_image(element.decode() if element and element.isascii() else element, limits)
    if value.dtype == np.uint8:
        return _picture(_without_batch(value), limits)
    if value.dtype.kind == "f":
        return torch.from_numpy(_without_batch(value).astype(np.float32))
    raise bad_request(f"The request has a tensor of {value.dtype} that is no image; {_EXPECTED}")


def _without_batch(value: Any) -> Any:
    if value.ndim == 4 and len(value) == 1:
        return value[0]
    if value.ndim in (2, 3):
        return value
    several = f" of {len(value)} images" if value.ndim == 4 else ""
    raise bad_request(
        f"The request has a tensor{several} of shape {list(value.shape)}; {_EXPECTED}. "
        "Send a request for each image: the server puts them into one batch"
    )


def _picture(pixels: Any, limits: ImageLimits) -> Image.Image:
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    height, width, channels = pixels.shape
    if channels not in _CHANNELS or not height or not width:
        raise bad_request(f"The request has UINT8 of shape {list(pixels.shape)}; {_EXPECTED}")
    check_pixels(width, height, limits)
    mode = _CHANNELS[channels]
    return Image.frombytes(mode, (width, height), np.ascontiguousarray(pixels).tobytes())
