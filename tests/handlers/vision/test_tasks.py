from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from torchere.handlers.errors import PredictionException
from torchere.handlers.resolve import load_entry_point
from torchere.handlers.vision.tasks import ImageClassifier, ImageSegmenter, ObjectDetector
from torchere.handlers.vision.transform import ImageTransform

MODEL = {"serializedFile": "classifier.pt"}


def test_a_photograph_is_answered_with_its_five_best_classes(
    classifier_archive: Path, make_context: Any, begin: Any, jpeg: bytes, photo: Any
) -> None:
    context = make_context(classifier_archive, model=MODEL)
    entry_point = load_entry_point("image_classifier", context)
    begin(context, 2)
    answers: Any = entry_point(
        [{"body": bytearray(jpeg)}, {"data": base64.b64encode(jpeg).decode()}], context
    )
    assert answers[0] == pytest.approx(answers[1])
    probabilities = list(answers[0].values())
    assert len(probabilities) == 5
    assert probabilities == sorted(probabilities, reverse=True)
    assert all(name.startswith("class-") for name in answers[0])
    assert 0.99 < sum(probabilities) + 2 * probabilities[-1] <= 1 + 2 * probabilities[-1]


def test_the_answer_is_the_models_own(
    classifier_archive: Path, make_context: Any, begin: Any, photo: Any
) -> None:
    handler = ImageClassifier()
    handler.initialize(make_context(classifier_archive, model=MODEL))
    expected = torch.softmax(handler.model(ImageTransform()(photo)[None]), dim=1)[0]
    (answer,) = handler.postprocess(handler.inference(ImageTransform()(photo)[None]))
    best = int(expected.argmax())
    assert next(iter(answer)) == f"class-{best}"
    assert answer[f"class-{best}"] == pytest.approx(float(expected[best]))


def test_the_number_of_classes_can_be_set_in_code_and_in_the_config(
    classifier_archive: Path, make_context: Any
) -> None:
    handler = ImageClassifier()
    config = {"handler": {"image": {"top_k": 2}}}
    handler.initialize(make_context(classifier_archive, model=MODEL, config=config))
    assert handler.get_max_result_classes() == 2
    scores = torch.rand(1, 7)
    assert len(handler.postprocess(scores)[0]) == 2
    handler.set_max_result_classes(3)
    assert len(handler.postprocess(scores)[0]) == 3
    handler.set_max_result_classes(100)
    assert len(handler.postprocess(scores)[0]) == 7


@pytest.mark.parametrize("top_k", [0, "5", True])
def test_a_wrong_number_of_classes_is_refused_at_load(
    classifier_archive: Path, make_context: Any, top_k: object
) -> None:
    config = {"handler": {"image": {"top_k": top_k}}}
    with pytest.raises(ValueError, match="top_k"):
        ImageClassifier().initialize(make_context(classifier_archive, model=MODEL, config=config))


def test_without_names_classes_are_numbers(classifier_archive: Path, make_context: Any) -> None:
    (classifier_archive / "index_to_name.json").unlink()
    handler = ImageClassifier()
    handler.initialize(make_context(classifier_archive, model=MODEL))
    assert set(handler.postprocess(torch.rand(1, 7))[0]) < set("0123456")


def test_the_warm_up_rows_can_be_answered(classifier_archive: Path, make_context: Any, begin: Any) -> None:
    context = make_context(classifier_archive, model=MODEL)
    entry_point = load_entry_point("image_classifier", context)
    rows = entry_point.warmup_data()
    assert rows is not None
    begin(context, len(rows))
    assert len(entry_point(rows, context)) == 1  # type: ignore[arg-type]


def test_a_model_that_takes_no_picture_has_no_warm_up_rows_and_answers_lists(
    make_context: Any, begin: Any, write_archive: Any
) -> None:
    model = """
        import torch
        class Net(torch.nn.Module):
            def forward(self, x):
                assert x.shape[1:] == (1, 2)
                return x[:, 0]
    """
    context = make_context(write_archive({"model.py": model}), model={"modelFile": "model.py"})
    entry_point = load_entry_point("image_classifier", context)
    begin(context, 1)
    assert entry_point.warmup_data() is None
    assert entry_point([{"body": [[0.0, 1.0]]}], context) == [pytest.approx({"1": 0.7311, "0": 0.2689}, 1e-3)]


def test_the_warm_up_of_a_model_that_has_no_room_fails(
    classifier_archive: Path, make_context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry_point = load_entry_point("image_classifier", make_context(classifier_archive, model=MODEL))

    def inference(data: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(entry_point.instance, "inference", inference)
    with pytest.raises(torch.OutOfMemoryError):
        entry_point.warmup_data()


def test_a_digit_classifier_in_the_style_of_the_mnist_example_works(
    classifier_archive: Path, make_context: Any, begin: Any, write_archive: Any
) -> None:
    import io

    from PIL import Image

    code = """
        import numpy as np
        import torch
        from ts.torch_handler.image_classifier import ImageClassifier

        class MNISTDigitClassifier(ImageClassifier):
            image_processing = staticmethod(
                lambda image: (torch.from_numpy(np.array(image)).float()[None] / 255 - 0.1307) / 0.3081
            )
            def postprocess(self, data):
                return data.argmax(1).tolist()
    """
    model = """
        import torch
        class Net(torch.nn.Module):
            def forward(self, x):
                assert x.shape[1:] == (1, 28, 28)
                return torch.tensor([[0.0, 0.0, 1.0]]).repeat(len(x), 1)
    """
    context = make_context(
        write_archive({"mnist.py": code, "model.py": model}), model={"modelFile": "model.py"}
    )
    entry_point = load_entry_point("mnist.py", context)
    buffer = io.BytesIO()
    Image.new("L", (28, 28), 9).save(buffer, "PNG")
    begin(context, 1)
    assert entry_point.warmup_data() is None  # the picture of ours is no digit
    assert entry_point([{"data": bytearray(buffer.getvalue())}], context) == [2]


def test_each_pixel_gets_its_class_and_probability() -> None:
    scores = torch.zeros(1, 3, 2, 2)
    scores[0, 2, 0, 1] = 100.0
    (picture,) = ImageSegmenter().postprocess({"out": scores})
    assert picture[0][1] == [2.0, 1.0]
    assert picture[1][0][0] == 0.0
    assert abs(picture[1][0][1] - 1 / 3) < 1e-6


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
