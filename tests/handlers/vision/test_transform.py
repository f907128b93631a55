from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from torchere.handlers.errors import PredictionException
from torchere.handlers.vision.decode import ImageLimits, decode_image
from torchere.handlers.vision.transform import (
    ImageTransform,
    crop_box,
    resized_size,
    to_rgb,
    to_tensor,
)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((320, 213), (384, 256)),  # 256 * 320 / 213 = 384.6, cut
        ((213, 320), (256, 384)),
        ((500, 500), (256, 256)),
        ((100, 50), (512, 256)),
        ((256, 1000), (256, 1000)),
        ((3, 1000), (256, 85333)),
    ],
)
def test_the_shorter_side_is_made_the_size_and_the_longer_cut(
    size: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert resized_size(*size, 256) == expected


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((384, 256), (80, 16, 304, 240)),
        ((257, 256), (16, 16, 240, 240)),  # 16.5 goes to the even 16
        ((259, 256), (18, 16, 242, 240)),  # 17.5 goes to the even 18
        ((224, 224), (0, 0, 224, 224)),
        ((221, 300), (-1, 38, 223, 262)),  # 3 missing: 1 left, 2 right
    ],
)
def test_the_middle_is_cut_with_torchvisions_rounding(
    size: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    assert crop_box(*size, 224) == expected


def test_the_whole_transform_is_resize_crop_scale_normalise(photo: Image.Image) -> None:
    cropped = photo.resize((384, 256), Image.Resampling.BILINEAR).crop((80, 16, 304, 240))
    scaled = np.asarray(cropped).astype(np.float32) / 255
    expected = (scaled - np.array([0.485, 0.456, 0.406])) / np.array([0.229, 0.224, 0.225])
    tensor = ImageTransform()(photo)
    assert tensor.dtype == torch.float32
    assert tensor.shape == (3, 224, 224)
    assert np.allclose(tensor.numpy(), expected.transpose(2, 0, 1), atol=1e-6)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "1", "LA"])
def test_pictures_of_any_mode_come_out_in_three_channels(photo: Image.Image, mode: str) -> None:
    assert ImageTransform()(photo.convert(mode)).shape == (3, 224, 224)


@pytest.mark.parametrize("suffix", ["PNG", "TIFF", "JPEG2000", "PPM"])
def test_of_a_grey_picture_of_16_bits_the_upper_8_are_kept(suffix: str) -> None:
    """Pillow's own conversion to RGB cuts the numbers off at 255: grey became white."""
    buffer = io.BytesIO()
    Image.fromarray(np.array([[0, 0x7FFF], [0x80FF, 0xFFFF]], dtype=np.uint16)).save(buffer, suffix)
    red, green, blue = to_rgb(decode_image(buffer.getvalue())).split()
    assert list(red.tobytes()) == [0, 0x7F, 0x80, 0xFF]
    assert red.tobytes() == green.tobytes() == blue.tobytes()


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_whose_white_is_unknown_are_refused(mode: str) -> None:
    buffer = io.BytesIO()
    Image.new(mode, (4, 3), 1).save(buffer, "TIFF")
    with pytest.raises(PredictionException, match=f"The TIFF has pixels of 32 bits .*mode {mode}") as caught:
        ImageTransform()(decode_image(buffer.getvalue()))
    assert caught.value.error_code == 400


def test_a_small_picture_is_padded_with_black() -> None:
    transform = ImageTransform(resize=None, crop=4, mean=(0.0,) * 3, std=(1.0,) * 3)
    tensor = transform(Image.new("RGB", (2, 2), (255, 255, 255)))
    assert tensor[0].tolist() == [[0, 0, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]]


def test_a_grey_picture_gives_one_channel_as_a_tensor() -> None:
    assert to_tensor(Image.new("L", (3, 2), 255)).tolist() == [[[1.0] * 3] * 2]


def test_the_config_overrides_what_it_names() -> None:
    changed = ImageTransform().replaced_by({"resize": 232, "crop": None, "mean": [0, 0, 0], "top_k": 3})
    assert changed == ImageTransform(resize=232, crop=None, mean=(0.0, 0.0, 0.0))
    assert ImageTransform().replaced_by({}) == ImageTransform()


@pytest.mark.parametrize(
    "overrides",
    [
        {"resize": 0},
        {"resize": "256"},
        {"crop": -1},
        {"crop": True},
        {"mean": [0.5]},
        {"std": [1, 0, 1]},
        {"std": 1},
    ],
)
def test_values_out_of_range_are_refused(overrides: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"handler\.image\."):
        ImageTransform().replaced_by(overrides)


def test_a_line_that_would_be_resized_to_billions_of_pixels_is_refused() -> None:
    with pytest.raises(
        PredictionException, match="1 x 60000 pixels is too narrow: resized it has 256 x 15360000"
    ):
        ImageTransform()(Image.new("L", (1, 60_000)))
    assert ImageTransform()(Image.new("L", (1, 2_000))).shape == (3, 224, 224)


def test_a_large_picture_that_is_not_cropped_is_refused_before_its_tensor_is_made() -> None:
    whole = ImageTransform(resize=None, crop=None, max_decoded_bytes=1_000)
    assert whole(Image.new("L", (10, 10))).shape == (3, 10, 10)
    large = Image.new("L", (11, 10))
    with pytest.raises(PredictionException, match=r"11 x 10 pixels counts 1100 bytes, limit 1000") as caught:
        whole(large)
    assert caught.value.error_code == 400
    assert replace(whole, crop=4)(large).shape == (3, 4, 4)
    assert replace(whole, max_decoded_bytes=None)(large).shape == (3, 10, 11)


def test_a_size_that_the_config_sets_is_not_too_large() -> None:
    resized = ImageTransform(resize=20, crop=None, max_decoded_bytes=1_000)
    assert resized(Image.new("L", (4, 1))).shape == (3, 20, 80)
    with pytest.raises(PredictionException, match="100 x 20 pixels"):
        resized(Image.new("L", (5, 1)))


def test_each_photograph_that_is_decoded_by_default_becomes_a_tensor() -> None:
    assert ImageLimits().max_decoded_bytes == ImageTransform().max_decoded_bytes
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64)).save(buffer, "JPEG")
    limits = ImageLimits(max_decoded_bytes=64 * 64 * 10)
    picture = decode_image(buffer.getvalue(), limits)
    whole = ImageTransform(resize=None, crop=None, max_decoded_bytes=limits.max_decoded_bytes)
    assert whole(picture).shape == (3, 64, 64)
    with pytest.raises(PredictionException):
        decode_image(buffer.getvalue(), replace(limits, max_decoded_bytes=64 * 64 * 10 - 1))
