"""The photographs that scikit-image ships, and tensors made of them. Nothing is downloaded.

The files are found without importing scikit-image, which would take longer than all the rest of this module.
"""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import torch
from PIL import Image, ImageEnhance

from torchere.handlers.vision.transform import ImageTransform, to_tensor

SIDE = 224  # pixels; what EfficientNet-Lite0 was trained on
# (pixel - 127) / 128, as in the training of EfficientNet-Lite, written for pixels scaled to 0.0 ... 1.0.
MEAN = (127 / 255,) * 3
STD = (128 / 255,) * 3
TRANSFORM = ImageTransform(resize=256, crop=SIDE, mean=MEAN, std=STD)  # what the archives tell the handler

CAT = "chelsea.png"
# Never shown to the quantiser, so that what is said about the int8 model is not said about these by heart.
HELD_OUT = (CAT, "coffee.png", "rocket.jpg", "camera.png", "motorcycle_right.png")
CALIBRATION = (
    "astronaut.png",
    "motorcycle_left.png",
    "brick.png",
    "grass.png",
    "gravel.png",
    "hubble_deep_field.jpg",
    "retina.jpg",
    "ihc.png",
    "clock_motion.png",
    "coins.png",
    "horse.png",
    "moon.png",
    "color.png",
)


def photograph(name: str) -> Path:
    """Where the photograph lies.

    Raises:
        FileNotFoundError: scikit-image is not installed, or this release of it ships no such file.
    """
    package = importlib.util.find_spec("skimage")
    if package is None or package.origin is None:
        raise FileNotFoundError("scikit-image is not installed; run `pip install -e '.[demo]'`")
    path = Path(package.origin).parent / "data" / name
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; expected scikit-image 0.25 or 0.26, which ship it")
    return path


def centre(name: str) -> torch.Tensor:
    """Float tensor [1, 3, 224, 224] of the middle, as the image_classifier handler makes it."""
    with Image.open(photograph(name)) as image:
        return TRANSFORM(image)[None]


def crops(names: tuple[str, ...], per_photograph: int, seed: int) -> list[torch.Tensor]:
    """Random square cut-outs of the photographs, some mirrored, all a little brighter, duller and so on.

    A handful of pictures shows a quantiser too little of what a network meets. The same seed gives the same
    crops.

    Returns:
        Float tensors [per_photograph, 3, 224, 224], one per photograph.
    """
    chance = random.Random(seed)
    return [_crops_of(name, per_photograph, chance) for name in names]


def _crops_of(name: str, count: int, chance: random.Random) -> torch.Tensor:
    with Image.open(photograph(name)) as image:
        picture = image.convert("RGB")
    return torch.stack([_normalised(_crop(picture, chance)) for _ in range(count)])


def _crop(picture: Image.Image, chance: random.Random) -> Image.Image:
    side = int(min(picture.size) * chance.uniform(0.45, 1.0))
    left, top = chance.randint(0, picture.width - side), chance.randint(0, picture.height - side)
    crop = picture.crop((left, top, left + side, top + side)).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    if chance.random() < 0.5:
        crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    crop = ImageEnhance.Brightness(crop).enhance(chance.uniform(0.7, 1.3))
    return ImageEnhance.Color(crop).enhance(chance.uniform(0.6, 1.4))


def _normalised(image: Image.Image) -> torch.Tensor:
    return to_tensor(image).sub_(torch.tensor(MEAN).view(-1, 1, 1)).div_(torch.tensor(STD).view(-1, 1, 1))
