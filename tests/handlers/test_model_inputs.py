"""Samples prepared by the handler's own `preprocess`, without its model."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from torchere.handlers.model_inputs import InputError, model_inputs
from torchere.handlers.vision.transform import ImageTransform

OWN = """
import torch
from torchere.handlers.vision.tasks import ImageClassifier


class Mine(ImageClassifier):
    def image_processing(self, image):
        return torch.full((3, 5, 7), float(image.width))
"""
LATE = """
from torchere.handlers.base import BaseHandler


class Late(BaseHandler):
    def initialize(self, context):
        super().initialize(context)
        self.words = {}

    def preprocess(self, data):
        return self.words[data[0]["body"]]
"""


def picture(width: int = 451, height: int = 300) -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise((width, height), 64).convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()


def inputs_of(handler: str, folder: Path | None = None, **image: Any) -> Any:
    return model_inputs(handler, folder, {"handler": {"image": image}} if image else {})


def test_a_picture_becomes_what_the_handler_feeds_for_a_request() -> None:
    body = picture()

    (found,) = inputs_of("image_classifier")(body)

    assert torch.equal(found, ImageTransform()(Image.open(io.BytesIO(body)))[None])
    assert found.shape == (1, 3, 224, 224)


def test_the_settings_of_the_archive_count() -> None:
    (found,) = inputs_of("image_classifier", resize=40, crop=32, mean=[0, 0, 0], std=[1, 1, 1])(picture())

    assert found.shape == (1, 3, 32, 32)
    assert found.min() >= 0


def test_a_detector_gets_the_picture_in_its_own_size() -> None:
    (found,) = inputs_of("object_detector")(picture())

    assert found.shape == (1, 3, 300, 451)
    assert 0 <= found.min() <= found.max() <= 1


@pytest.mark.parametrize("handler", ["tensor", "base_handler", "text_embedding", "voice_activity"])
def test_handlers_that_take_no_pictures_prepare_none(handler: str) -> None:
    assert inputs_of(handler) is None
    assert inputs_of(handler, crop=8, resize=8)(picture())[0].shape == (1, 3, 8, 8)


@pytest.mark.parametrize("name", ["mine.py", "mine", "mine.py:handle"])
def test_a_handler_of_the_users_own_prepares_by_its_own_code(tmp_path: Path, name: str) -> None:
    (tmp_path / "mine.py").write_text(OWN)

    (found,) = inputs_of(name, tmp_path)(picture())

    assert torch.equal(found, torch.full((1, 3, 5, 7), 451.0))


def test_what_only_a_loaded_handler_can_prepare_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE)
    (tmp_path / "function.py").write_text("def handle(data, context):\n    return data\n")
    for name in ("late.py", "function.py:handle"):
        with pytest.raises(InputError, match=r"without its model.*give what the model takes, as \.npy"):
            inputs_of(name, tmp_path)(picture())


@pytest.mark.parametrize(
    ("handler", "config", "text"),
    [
        ("image_classifier", {"handler": {"image": 5}}, "handler.image in model-config.yaml is 5"),
        ("image_classifier", {"handler": {"image": {"crop": -1}}}, "handler.image.crop .* is -1"),
        ("no_such", {}, "neither a file of the archive"),
    ],
)
def test_wrong_settings_and_names_are_one_line(handler: str, config: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text) as refusal:
        model_inputs(handler, None, config)
    assert "\n" not in str(refusal.value)


def test_a_body_that_is_no_picture_is_refused_as_the_server_refuses_it() -> None:
    with pytest.raises(InputError, match="The request body is not an image"):
        inputs_of("image_classifier")(b"no picture")
