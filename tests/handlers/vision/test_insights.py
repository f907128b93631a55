from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchere.handlers.errors import PredictionException
from torchere.handlers.micro_batching import MicroBatching
from torchere.handlers.vision import integrated_gradients
from torchere.handlers.vision.tasks import ImageClassifier


@pytest.fixture
def handler(classifier_archive: Path, make_context: Any) -> ImageClassifier:
    classifier = ImageClassifier()
    classifier.initialize(make_context(classifier_archive, model={"serializedFile": "classifier.pt"}))
    return classifier


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
