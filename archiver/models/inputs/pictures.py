"""Converts pictures of any mode to RGB, for examples and for the handlers of pictures."""

from __future__ import annotations

import numpy as np
from PIL import Image


def to_rgb(image: Image.Image) -> Image.Image:
    """Return an image of any mode as 8-bit RGB; of 16-bit values, the upper 8 bits are kept.

    Raises:
        ValueError: the pixels are 32-bit numbers; image files do not say which number is white.
    """
    if image.mode == "RGB":
        return image
    # Pillow's own conversion clamps 16-bit values to 255, which makes nearly all pixels white. It decodes a
    # grey PGM of 16 bits to the mode I, and before release 11.3 a PNG as well.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in {"PPM", "PNG"}):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in {"I", "F"}:
        raise ValueError(
            f"The {image.format or 'image'} has pixels of 32 bits (Pillow's mode {image.mode}), and does not "
            "say which number is white; send it with 8 or 16 bits for each channel"
        )
    return image.convert("RGB")
