from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from torchere.handlers.errors import PredictionException
from torchere.handlers.micro_batching import MicroBatching
from torchere.handlers.vision import VisionHandler, integrated_gradients
from torchere.handlers.vision.tasks import ImageClassifier

MODEL = {"serializedFile": "classifier.pt"}


@pytest.fixture
def handler(classifier_archive: Path, make_context: Any) -> ImageClassifier:
    classifier = ImageClassifier()
    classifier.initialize(make_context(classifier_archive, model=MODEL))
    return classifier


def test_pictures_and_numbers_are_stacked_into_a_batch(handler: ImageClassifier, jpeg: bytes) -> None:
    numbers = torch.zeros(3, 224, 224).tolist()
    batch = handler.preprocess([{"data": jpeg}, {"body": bytearray(jpeg)}, {"body": numbers}])
    assert batch.shape == (3, 3, 224, 224)
    assert torch.equal(batch[0], batch[1])
    assert batch[2].abs().sum() == 0


def test_tensors_of_pixels_and_of_files_are_pictures_too(
    handler: ImageClassifier, jpeg: bytes, photo: Image.Image
) -> None:
    file = np.array([jpeg], dtype=object)
    decoded = np.asarray(Image.open(io.BytesIO(jpeg)))
    batch = handler.preprocess([{"body": jpeg}, {"image": file}, {"x": decoded}, {"data": decoded[None]}])
    assert all(torch.equal(batch[0], other) for other in batch[1:])


def test_a_tensor_of_floats_is_the_input_of_the_model(handler: ImageClassifier) -> None:
    sent = np.linspace(0, 1, 3 * 4 * 4, dtype="f4").reshape(1, 3, 4, 4)
    assert np.array_equal(handler.preprocess([{"x": sent}]).numpy(), sent)


def test_pictures_are_read_by_a_handler_that_never_called_our_constructor(jpeg: bytes) -> None:
    class Own(VisionHandler):
        def __init__(self) -> None:
            self.device = torch.device("cpu")

    assert Own().preprocess([{"body": jpeg}]).shape == (1, 3, 224, 224)


def test_an_envelope_may_hand_bodies_over_as_they_are(handler: ImageClassifier, jpeg: bytes) -> None:
    assert handler.preprocess([jpeg]).shape == (1, 3, 224, 224)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"picture": b"x"}, "found the fields 'picture'; expected 'data' or 'body'"),
        ({"body": b""}, "found no bytes"),
        ({"data": b""}, "found no bytes"),
        ({"body": []}, "a list that is not an image (it is empty)"),
        ({"body": {"a": 1}}, "a JSON object with the fields 'a', and no image; expected"),
        ({"body": {"instances": []}}, "'instances', and no image (service_envelope in config"),
        ({"body": [[1], "x"]}, "a list that is not an image ("),
        ({"body": b"nonsense"}, "not an image"),
        ({"body": 5}, "a int that is not an image; expected"),  # no tensor of so many numbers
        ({"body": 0}, "a int that is not an image; expected"),
    ],
)
def test_a_row_without_a_picture_is_answered_with_400(
    handler: ImageClassifier, row: Any, message: str
) -> None:
    with pytest.raises(PredictionException) as caught:
        handler.preprocess([row])
    assert caught.value.error_code == 400
    assert message in caught.value.message


def test_one_value_without_rows_is_answered_with_400(handler: ImageClassifier) -> None:
    with pytest.raises(PredictionException, match="has the instances 3; expected a list"):
        handler.preprocess(3)


def test_inputs_of_different_shapes_are_refused(handler: ImageClassifier) -> None:
    with pytest.raises(PredictionException, match="different shapes"):
        handler.preprocess([{"body": [[0.0]]}, {"body": [0.0]}])


def test_limits_come_from_the_config(classifier_archive: Path, make_context: Any, jpeg: bytes) -> None:
    config = {"handler": {"image": {"max_pixels": 1000, "max_bytes": 10**6, "resize": 64, "crop": 32}}}
    handler = ImageClassifier()
    handler.initialize(make_context(classifier_archive, model=MODEL, config=config))
    with pytest.raises(PredictionException, match="limit 1000"):
        handler.preprocess([{"body": jpeg}])
    handler.image_limits = handler.image_limits.__class__()
    assert handler.preprocess([{"body": jpeg}]).shape == (1, 3, 32, 32)


def test_the_limit_of_memory_comes_from_the_config(
    classifier_archive: Path, make_context: Any, jpeg: bytes
) -> None:
    handler = ImageClassifier()
    config = {"handler": {"image": {"max_decoded_bytes": 20_000}}}
    handler.initialize(make_context(classifier_archive, model=MODEL, config=config))
    with pytest.raises(PredictionException, match=r"bytes, limit 20000; .*handler\.image\.max_decoded_bytes"):
        handler.preprocess([{"body": jpeg}])


@pytest.mark.parametrize("key", ["max_pixels", "max_bytes", "max_decoded_bytes"])
@pytest.mark.parametrize("value", ["1e8", 0, -1, True, [1], float("nan")])
def test_a_limit_that_is_no_number_fails_the_load(
    classifier_archive: Path, make_context: Any, key: str, value: object
) -> None:
    context = make_context(classifier_archive, model=MODEL, config={"handler": {"image": {key: value}}})
    with pytest.raises(
        ValueError, match=rf"handler\.image\.{key} in model-config\.yaml is .*; expected a number"
    ):
        ImageClassifier().initialize(context)


def test_the_config_of_one_model_does_not_change_another(classifier_archive: Path, make_context: Any) -> None:
    config = {"handler": {"image": {"crop": 32}}}
    first, second = ImageClassifier(), ImageClassifier()
    first.initialize(make_context(classifier_archive, model=MODEL, config=config))
    second.initialize(make_context(classifier_archive, model=MODEL))
    assert (first.image_processing.crop, second.image_processing.crop) == (32, 224)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ({"resiz": 64}, r"handler\.image\.resiz in model-config\.yaml is unknown; expected one of resize"),
        (224, r"handler\.image in model-config\.yaml is 224; expected keys and values"),
    ],
)
def test_a_built_in_handler_refuses_what_it_does_not_know(
    classifier_archive: Path, make_context: Any, image: Any, message: str
) -> None:
    class Own(ImageClassifier):
        pass

    context = make_context(classifier_archive, model=MODEL, config={"handler": {"image": image}})
    with pytest.raises(ValueError, match=message):
        ImageClassifier().initialize(context)
    Own().initialize(context)  # it may read keys of its own


def test_a_misspelt_block_is_warned_of(
    classifier_archive: Path, make_context: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"handler": {"imag": {"crop": 100}, "profile": True, "image": {"top_k": 1}, 1: 2}}
    ImageClassifier().initialize(make_context(classifier_archive, model=MODEL, config=config))
    assert [line for line in caplog.messages if "handler." in line] == [
        "handler.imag in model-config.yaml is not used; did you mean handler.image?"
    ]


def test_the_server_may_lift_pillows_limit(
    classifier_archive: Path, make_context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
    handler = ImageClassifier()
    handler.initialize(make_context(classifier_archive, model=MODEL, limit_max_image_pixels=False))
    assert Image.MAX_IMAGE_PIXELS is None
    assert handler.image_limits.max_pixels is None
    assert handler.image_limits.max_decoded_bytes is None


def test_a_subclass_may_bring_its_own_processing(
    classifier_archive: Path, make_context: Any, jpeg: bytes
) -> None:
    class Grey(VisionHandler):
        def image_processing(self, image: Any) -> torch.Tensor:
            assert image.mode == "RGB"
            return torch.full((1, 2, 2), 0.5)

    handler = Grey()
    handler.initialize(
        make_context(classifier_archive, model=MODEL, config={"handler": {"image": {"crop": 3}}})
    )
    assert handler.preprocess([{"body": jpeg}]).tolist() == [[[[0.5, 0.5], [0.5, 0.5]]]]


def test_explanations_add_up_to_the_score(handler: ImageClassifier, make_context: Any, begin: Any) -> None:
    context = handler.context
    begin(context, 1, explain="True")
    picture = torch.rand(3, 4, 4)
    answer = handler.handle([{"body": picture.tolist(), "target": 2}], context)
    assert json.dumps(answer)
    batch = picture[None]
    difference = handler.model(batch)[0, 2] - handler.model(torch.zeros_like(batch))[0, 2]
    assert torch.tensor(answer).shape == batch.shape
    assert torch.tensor(answer).sum().item() == pytest.approx(difference.item(), abs=1e-5)


def test_captum_is_asked_for_only_by_subclasses_that_explain_with_it(handler: ImageClassifier) -> None:
    if importlib.util.find_spec("captum") is None:
        with pytest.raises(ImportError, match="captum"):
            _ = handler.ig
    else:
        assert handler.ig is handler.ig
    handler.ig = "of the handler's own"
    assert handler.ig == "of the handler's own"


@pytest.mark.parametrize("target", [b"1", bytearray(b"1"), "1"])
def test_a_target_from_a_form_is_a_number(handler: ImageClassifier, target: Any) -> None:
    inputs = torch.rand(1, 3, 224, 224)
    explained = handler.get_insights(inputs, None, target)
    assert explained == handler.get_insights(inputs, None, 1)
    assert explained != handler.get_insights(inputs, None, 0)


@pytest.mark.parametrize(
    "target",
    [b"cat", 1000, b"9" * 1000, -1000, [1000], [[0]], [], [0, 1], [1.0], 1.5, True, {"a": 1}, None],
)
def test_a_target_that_is_no_class_is_refused(handler: ImageClassifier, target: Any) -> None:
    with pytest.raises(PredictionException, match=r"The target is .*; expected the number") as caught:
        handler.get_insights(torch.rand(1, 3, 224, 224), None, target)
    assert caught.value.error_code == 400
    assert len(caught.value.message) < 300


def explained(handle: Any, context: Any, begin: Any, *targets: Any) -> Any:
    begin(context, len(targets), explain="True")
    picture = torch.arange(48.0).reshape(3, 4, 4).tolist()
    return handle([{"data": picture, "target": target} for target in targets], context)


@pytest.mark.parametrize("in_parts", [False, True])
def test_each_request_of_a_batch_is_explained_for_its_own_target(
    handler: ImageClassifier, begin: Any, in_parts: bool
) -> None:
    handle = MicroBatching(handler) if in_parts else handler.handle
    context = handler.context
    (first,), (second,) = (explained(handle, context, begin, target) for target in (b"1", 2))
    assert first != second
    assert explained(handle, context, begin, b"1", 2, b"1") == [first, second, first]
    assert explained(handle, context, begin, [1], [2]) == [first, second]
    assert explained(handle, context, begin, b"1", b"1") == [first, first]


def test_a_wrong_target_refuses_its_own_request(handler: ImageClassifier, begin: Any) -> None:
    (good,) = explained(handler.handle, handler.context, begin, 1)
    targets = (1, 99, np.array([1, 2]), torch.tensor([1]), True)
    first, *refused = explained(handler.handle, handler.context, begin, *targets)
    assert [first, refused.pop(2)] == [good, good]
    assert [one["code"] for one in refused] == [400] * 3
    statuses = [handler.context.get_response_status(place)[0] for place in range(5)]
    assert statuses == [200, 400, 400, 200, 400]
    with pytest.raises(PredictionException, match=r"The target is \[1, 2\]; expected the number") as caught:
        explained(handler.handle, handler.context, begin, np.array([1, 2]))
    assert caught.value.error_code == 400


def test_a_list_is_no_target_for_each_request_of_a_batch(handler: ImageClassifier, begin: Any) -> None:
    refused = explained(handler.handle, handler.context, begin, [0, 1], [0, 1])
    assert [one["code"] for one in refused] == [400, 400]


def test_a_curved_score_is_integrated_exactly() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x.sum(dim=1), (x**3).sum(dim=1)], dim=1)

    inputs = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
    result = integrated_gradients(model, inputs, 1)
    assert torch.allclose(result, inputs**3, atol=1e-5)


def test_each_element_of_a_batch_may_have_its_own_target() -> None:
    result = integrated_gradients(lambda x: x * torch.tensor([1.0, 10.0]), torch.ones(2, 2), [0, 1])
    assert torch.allclose(result, torch.tensor([[1.0, 0.0], [0.0, 10.0]]), atol=1e-5)


@pytest.mark.parametrize("target", [1, [1], (1, 1), np.array([1]), np.int64(1), torch.tensor([1, 1])])
def test_a_target_may_have_each_form_of_whole_numbers(target: Any) -> None:
    result = integrated_gradients(lambda x: x * torch.tensor([1.0, 10.0]), torch.ones(2, 2), target)
    assert torch.allclose(result, torch.tensor([[0.0, 10.0]] * 2), atol=1e-5)


def test_shared_parameters_get_no_gradients() -> None:
    model = torch.nn.Linear(2, 2)
    result = integrated_gradients(model, torch.ones(1, 2), 0)
    assert model.weight.grad is None
    assert result.sum().item() == pytest.approx(model.weight[0].sum().item(), abs=1e-5)
