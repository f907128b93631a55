from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from torchere.handlers.errors import PredictionException
from torchere.handlers.vision.decode import ImageLimits, picture_of_tensor

LIMITS = ImageLimits()


def pixels_of(image: Any) -> Any:
    assert isinstance(image, Image.Image)
    return np.asarray(image)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_bytes_of_pixels_are_a_picture(channels: int) -> None:
    sent = np.arange(4 * 5 * channels, dtype=np.uint8).reshape(4, 5, channels)
    expected = sent[:, :, 0] if channels == 1 else sent
    for tensor in (sent, sent[None], np.asfortranarray(sent)):
        assert np.array_equal(pixels_of(picture_of_tensor(tensor, LIMITS)), expected)


def test_two_dimensions_are_a_grey_picture() -> None:
    sent = np.arange(20, dtype=np.uint8).reshape(4, 5)
    assert np.array_equal(pixels_of(picture_of_tensor(sent, LIMITS)), sent)


def test_an_image_file_may_come_as_it_is_or_in_base64(jpeg: bytes) -> None:
    as_file = picture_of_tensor(np.array([jpeg], object), LIMITS)
    as_text = picture_of_tensor(np.array([[base64.b64encode(jpeg)]], object), LIMITS)
    assert np.array_equal(pixels_of(as_file), pixels_of(as_text))


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_numbers_with_a_fraction_are_the_models_input(dtype: str) -> None:
    sent = np.linspace(-1, 1, 24, dtype=dtype).reshape(2, 3, 4)
    for tensor in (sent, sent[None]):
        found = picture_of_tensor(tensor, LIMITS)
        assert isinstance(found, torch.Tensor)
        assert found.dtype == torch.float32
        assert np.array_equal(found.numpy(), sent.astype("f4"))


def test_bfloat16_is_the_models_input_too() -> None:
    found = picture_of_tensor(torch.ones(1, 3, 2, 2, dtype=torch.bfloat16), LIMITS)
    assert isinstance(found, torch.Tensor)
    assert (found.dtype, tuple(found.shape)) == (torch.float32, (3, 2, 2))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (np.zeros((3, 4, 5), np.uint8), r"UINT8 of shape \[3, 4, 5\]; expected UINT8 \[height, width, 3\]"),
        (np.zeros((0, 4, 3), np.uint8), r"UINT8 of shape \[0, 4, 3\]"),
        (np.zeros((2, 4, 5, 3), np.uint8), r"of 2 images of shape .* Send a request for each image"),
        (np.zeros(4, np.float32), r"shape \[4\]"),
        (np.zeros((4, 5, 3), np.int64), "a tensor of int64 that is no image"),
        (np.zeros((4, 5), bool), "a tensor of bool that is no image"),
        (np.array([b"a", b"b"], object), "2 elements of BYTES"),
        (np.array([b"\xffnonsense"], object), "not an image"),
        (np.array([b""], object), "found no bytes"),
    ],
)
def test_what_is_no_picture_is_refused(tensor: Any, message: str) -> None:
    with pytest.raises(PredictionException, match=message) as caught:
        picture_of_tensor(tensor, LIMITS)
    assert caught.value.error_code == 400


def test_the_limit_of_pixels_holds_for_tensors() -> None:
    with pytest.raises(PredictionException, match="5 x 4 = 20 pixels, limit 19"):
        picture_of_tensor(np.zeros((4, 5, 3), np.uint8), ImageLimits(max_pixels=19))
