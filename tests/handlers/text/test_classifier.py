from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchere.handlers.errors import PredictionException
from torchere.handlers.resolve import load_entry_point
from torchere.handlers.text import TextClassifier

VOCABULARY = {"it": 0, "is": 1, "good": 2, "it is": 3, "is good": 4}


class Bag(torch.nn.Module):
    """Scores 2 classes by the number of tokens it is given."""

    def forward(self, tokens: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        count = torch.tensor(float(len(tokens) * len(offsets)))
        return torch.stack([count, count - 1.0])[None]


@pytest.fixture
def classify(tmp_path: Path, make_context: Any, begin: Any) -> Callable[[Any], Any]:
    torch.jit.save(torch.jit.script(Bag()), str(tmp_path / "bag.pt"))
    torch.save(VOCABULARY, tmp_path / "source_vocab.pt")
    (tmp_path / "index_to_name.json").write_text(json.dumps({"0": "praise", "1": "blame"}))
    context = make_context(tmp_path, model={"serializedFile": "bag.pt"})
    entry_point = load_entry_point("text_classifier", context)

    def run(row: Any) -> Any:
        begin(context, 1)
        return entry_point([row], context)

    run.handler = entry_point.instance  # type: ignore[attr-defined]
    return run


def test_a_text_is_answered_with_every_class_in_order(classify: Any) -> None:
    (answer,) = classify({"body": "<p>It's GOOD!</p>"})
    assert list(answer) == ["praise", "blame"]
    assert answer["praise"] == pytest.approx(0.7310586, abs=1e-5)
    assert classify({"data": bytearray(b"It's good")}) == [answer]


def test_a_text_may_come_as_a_tensor(classify: Any) -> None:
    expected = classify({"body": "It's good"})
    assert classify({"text": np.array([b"It's good"], object)}) == expected
    assert classify({"data": np.array([["It's good"]], object)}) == expected
    with pytest.raises(PredictionException, match="2 elements of BYTES"):
        classify.handler.preprocess([{"text": np.array([b"a", b"b"], object)}])
    with pytest.raises(PredictionException, match=r"found a ndarray; expected text .* or a tensor of BYTES"):
        classify.handler.preprocess([{"text": np.zeros(2)}])


def test_tokens_of_a_subclass_are_moved_to_the_device() -> None:
    handler = TextClassifier()
    handler.device = torch.device("meta")
    handler.model = lambda tokens, offsets: (tokens.device.type, offsets.device.type)
    assert handler.inference((torch.tensor([0, 1]), ["it", "is"])) == ("meta", "meta")


def test_words_and_pairs_become_indices(classify: Any) -> None:
    indices, words = classify.handler.preprocess([{"body": "It's good"}])
    assert indices.tolist() == [0, 1, 2, 3, 4]
    assert words == ["it", "is", "good"]


def test_an_unknown_word_is_the_vocabularys_own_error(classify: Any) -> None:
    with pytest.raises(KeyError, match="bad"):
        classify({"body": "bad"})


def test_an_unknown_word_is_the_one_that_the_vocabulary_has_for_them(
    tmp_path: Path, make_context: Any
) -> None:
    torch.jit.save(torch.jit.script(Bag()), str(tmp_path / "bag.pt"))
    torch.save({"<unk>": 0, "good": 1}, tmp_path / "source_vocab.pt")
    handler = TextClassifier()
    handler.initialize(make_context(tmp_path, model={"serializedFile": "bag.pt"}))
    indices, _ = handler.preprocess([{"body": "good news"}])
    assert indices.tolist() == [1, 0, 0]  # "good", "news", and the pair of them


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"body": b"\xff"}, "not UTF-8"),
        ({}, "no text"),
        ({"good news": b""}, "a text that came as application/x-www-form-urlencoded"),
        ({"body": [1]}, "no text"),
        ({"body": b""}, "at least one word"),
        ({"body": " <br/> "}, "at least one word"),
    ],
)
def test_what_is_no_text_is_answered_with_400(classify: Any, row: Any, message: str) -> None:
    with pytest.raises(PredictionException, match=message) as caught:
        classify(row)
    assert caught.value.error_code == 400


def test_a_text_without_a_row_is_not_classified_by_its_first_letter(classify: Any) -> None:
    with pytest.raises(PredictionException, match="has the instances 'good'; expected a list"):
        classify.handler.preprocess("good")
