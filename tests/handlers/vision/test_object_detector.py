from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from torchere.handlers.errors import PredictionException
from torchere.handlers.resolve import load_entry_point
from torchere.handlers.vision.tasks import ObjectDetector

DETECTOR = """
import torch

class Detector(torch.nn.Module):
    def forward(self, images):
        assert all(image.min() >= 0 and image.max() <= 1 for image in images)
        return [
            {
                "boxes": torch.tensor([[0.0, 0.0, image.shape[2], image.shape[1]], [1.0, 2.0, 3.0, 4.0]]),
                "labels": torch.tensor([1, 0]),
                "scores": torch.tensor([0.9, 0.4]),
            }
            for image in images
        ]
"""


class ScriptedDetector(torch.nn.Module):
    """Takes and gives what torchvision's scripted detectors do."""

    def forward(
        self, images: list[torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
        found: list[dict[str, torch.Tensor]] = []
        for image in images:
            found.append(
                {
                    "boxes": torch.zeros(1, 4),
                    "labels": torch.tensor([image.shape[2]]),
                    "scores": torch.tensor([0.5]),
                }
            )
        losses: dict[str, torch.Tensor] = {}
        return losses, found


def test_objects_above_the_threshold_are_named_with_their_boxes(
    write_archive: Any, make_context: Any, begin: Any, jpeg: bytes
) -> None:
    archive = write_archive({"model.py": DETECTOR, "index_to_name.json": '{"0": "cat", "1": "dog"}'})
    context = make_context(archive, model={"modelFile": "model.py"})
    entry_point = load_entry_point("object_detector", context)
    begin(context, 2)
    answers: Any = entry_point([{"body": jpeg}, {"data": jpeg}], context)
    assert answers[0] == answers[1]
    assert list(answers[0][0]) == ["dog", "score"]
    assert answers[0][0]["dog"] == [0.0, 0.0, 320.0, 213.0]
    assert abs(answers[0][0]["score"] - 0.9) < 1e-6
    entry_point.instance.threshold = 0.3
    again: Any = entry_point([{"body": jpeg}], context)
    assert [next(iter(item)) for item in again[0]] == ["dog", "cat"]


def test_a_scripted_detector_gets_a_list_and_pictures_of_any_size(
    tmp_path: Path, make_context: Any, begin: Any
) -> None:
    torch.jit.save(torch.jit.script(ScriptedDetector()), str(tmp_path / "d.pt"))
    handler = ObjectDetector()
    context = make_context(tmp_path, model={"serializedFile": "d.pt"})
    handler.initialize(context)
    begin(context, 2)
    rows = [{"body": torch.zeros(3, 2, 5).tolist()}, {"body": torch.zeros(3, 4, 6).tolist()}]
    box = [0.0, 0.0, 0.0, 0.0]
    assert handler.handle(rows, context) == [[{"5": box, "score": 0.5}], [{"6": box, "score": 0.5}]]


@pytest.mark.parametrize(
    ("image", "limit_bytes"),
    [({}, 512 * 2**20), ({"max_decoded_bytes": None}, None), ({"max_decoded_bytes": 30_000}, 30_000)],
)
def test_the_memory_of_a_picture_in_its_own_size_is_limited(
    tmp_path: Path, make_context: Any, image: dict[str, Any], limit_bytes: int | None
) -> None:
    torch.jit.save(torch.jit.script(ScriptedDetector()), str(tmp_path / "d.pt"))
    handler = ObjectDetector()
    config = {"handler": {"image": image}}
    handler.initialize(make_context(tmp_path, model={"serializedFile": "d.pt"}, config=config))
    assert handler.image_processing.max_decoded_bytes == limit_bytes
    file = io.BytesIO()
    Image.new("L", (64, 64)).save(file, "PNG")  # decoded it takes 16 kB
    if limit_bytes != 30_000:
        assert handler.preprocess([{"body": file.getvalue()}])[0].shape == (3, 64, 64)
        return
    with pytest.raises(PredictionException, match="64 x 64 pixels counts 40960 bytes, limit 30000"):
        handler.preprocess([{"body": file.getvalue()}])


def test_a_subclass_gets_all_that_its_model_gives_and_its_pictures_are_moved_to_the_device() -> None:
    handler = ObjectDetector()
    handler.device = torch.device("meta")
    handler.model = lambda pictures: (pictures + 1, [pictures])
    boxes, features = handler.inference(torch.zeros(1, 3, 4, 4))
    assert (boxes.device.type, features[0].device.type) == ("meta", "meta")


def test_a_class_that_is_named_score_keeps_its_box() -> None:
    handler = ObjectDetector()
    handler.mapping = {"0": "score", "1": "dog"}
    found = {"boxes": torch.ones(2, 4), "labels": torch.tensor([0, 1]), "scores": torch.tensor([0.75, 0.5])}
    box = [1.0, 1.0, 1.0, 1.0]
    assert handler.postprocess([found]) == [[{"0": box, "score": 0.75}, {"dog": box, "score": 0.5}]]
