from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchere.archiver.signature import Limit, Signature, TensorSpec
from torchere.handlers.tensors.answer import OPEN_INFERENCE

tokenizers = pytest.importorskip("tokenizers", reason="install torchere[tokenizers]")
NAMES = ("input_ids", "attention_mask", "token_type_ids")


class Counts(torch.nn.Module):
    """Logits: the sum of the numbers of the first texts, that of the second ones, and how many tokens."""

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        ids = input_ids * attention_mask
        first, second = ids * (1 - token_type_ids), ids * token_type_ids
        return {"logits": torch.stack([first.sum(1), second.sum(1), attention_mask.sum(1)], 1).float()}


class Whole(torch.nn.Module):
    """Gives a state for each token, as an encoder without its head."""

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor
    ) -> torch.Tensor:
        return (input_ids * attention_mask + token_type_ids).float()[:, :, None]


@pytest.fixture
def make(tmp_path: Path, make_context: Any, answering: Any) -> Callable[..., Any]:
    words = {"[UNK]": 0, "cats": 2, "sleep": 3, "dogs": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="$A", pair="$A $B:1")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    inputs = tuple(TensorSpec(name, "INT64", (-1, -1), (Limit(1, 1, 4),)) for name in NAMES)
    signature = Signature(inputs, (TensorSpec("logits", "FP32", (-1, 3)),))
    (tmp_path / "signature.json").write_text(signature.to_json())

    def maker(model: torch.nn.Module | None = None, **settings: Any) -> Any:
        torch.jit.save(torch.jit.script((model or Counts()).eval()), str(tmp_path / "model.pt"))
        config = {"handler": {"sequence_classifier": {"scores": "none", **settings}}}
        context = make_context(tmp_path, model={"serializedFile": "model.pt"}, config=config)
        return answering("sequence_classifier", context)

    return maker


@pytest.mark.parametrize(
    "row",
    [
        {"body": b"cats sleep"},
        {"text": "cats sleep"},
        {"body": {"text": "cats sleep"}},
        {"data": "cats sleep"},
    ],
)
def test_a_text_is_answered_with_the_score_of_each_class(make: Any, row: Any) -> None:
    assert make()(row) == [{"0": 5.0, "1": 0.0, "2": 2.0}]


def test_classes_have_the_names_of_the_archive(make: Any, tmp_path: Path) -> None:
    (tmp_path / "index_to_name.json").write_text(json.dumps({"0": "good", "1": "bad", "2": "neither"}))
    assert list(make()({"body": "cats"})[0]) == ["good", "bad", "neither"]


def test_lists_and_pairs_are_answered_in_the_order_of_the_request(make: Any) -> None:
    answers = make(texts_per_run=2)(
        {"body": {"text": ["cats sleep dogs", "cats"]}},
        {"body": {"text": "cats", "text_pair": "dogs dogs"}},
        {"body": {"text": ["cats", "dogs"], "text_pair": ["sleep", "sleep sleep"]}},
    )
    assert [[one["0"], one["1"]] for one in answers[0]] == [[9.0, 0.0], [2.0, 0.0]]
    assert (answers[1]["0"], answers[1]["1"]) == (2.0, 8.0)
    assert [[one["0"], one["1"]] for one in answers[2]] == [[2.0, 3.0], [4.0, 6.0]]


def test_a_text_beyond_the_positions_of_the_model_is_cut_off(make: Any) -> None:
    assert make()({"body": "cats " * 90})[0]["2"] == 4.0


def test_a_request_that_is_wrong_does_not_touch_its_batch_mates(make: Any) -> None:
    rows = [{"body": {"text": ["cats"], "text_pair": ["dogs", "dogs"]}}, {"body": {"text": 7}}]
    *refused, good = make()(*rows, {"body": "dogs"})
    assert good["0"] == 4.0
    assert [one["message"].partition(";")[0].removeprefix("The request has ") for one in refused] == [
        "2 texts in 'text_pair'",
        "a int",
    ]


@pytest.mark.parametrize(("scores", "total"), [("softmax", 1.0), ("sigmoid", None)])
def test_logits_become_probabilities(make: Any, scores: str, total: float | None) -> None:
    (answer,) = make(scores=scores)({"body": "cats"})
    logits = torch.tensor([2.0, 0.0, 1.0])
    wanted = logits.softmax(0) if total else logits.sigmoid()
    assert list(answer.values()) == pytest.approx(wanted.tolist())


def test_the_open_inference_protocol_gets_an_array(make: Any) -> None:
    row = {
        "text": np.array([b"cats", b"dogs"], dtype=object),
        "text_pair": np.array([b"dogs", b"cats"], dtype=object),
    }
    (found,) = make()(row, headers={OPEN_INFERENCE: "{}"})
    assert found["scores"].tolist() == [[2.0, 4.0, 2.0], [4.0, 2.0, 2.0]]


def test_a_model_without_a_head_is_an_error(make: Any) -> None:
    with pytest.raises(
        RuntimeError, match=r"the model gave \(1, 1, 1\) for 1 texts; expected \[texts, classes\]"
    ):
        make(Whole())({"body": "cats"})


def test_a_wrong_configuration_does_not_load(make: Any) -> None:
    with pytest.raises(ValueError, match=r"scores in model-config\.yaml is 'odds'; expected one of softmax"):
        make(scores="odds")


def test_the_warm_up_is_answered(make: Any) -> None:
    answer = make()
    assert len(answer(*answer.entry_point.warmup_data())) == 2
