from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchere.handlers.errors import PredictionException
from torchere.handlers.resolve import load_entry_point
from torchere.handlers.text import (
    CLEANUP_REGEX,
    CONTRACTIONS,
    TextClassifier,
    TextHandler,
    expand_contractions,
    get_tokenizer,
    ngrams_iterator,
)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("You can now install TorchText using pip!", "you can now install torchtext using pip !"),
        ('It\'s <br />(not) "bad", is it? a;b:c.', "it ' s ( not ) bad , is it ? a b c ."),
        ('Hi, "you" (there)! a;b:c<br />d.', "hi , you ( there ) ! a b c d ."),
        ("", ""),
    ],
)
def test_basic_english_is_torchtexts(text: str, tokens: str) -> None:
    assert get_tokenizer("basic_english")(text) == tokens.split()


def test_other_tokenizers() -> None:
    assert get_tokenizer(None)("a  B") == ["a", "B"]
    assert get_tokenizer(list)("ab") == ["a", "b"]
    with pytest.raises(ValueError, match="expected basic_english or a function"):
        get_tokenizer("spacy")
    with pytest.raises(ValueError, match="is for English"):
        get_tokenizer("basic_english", "de")


def test_ngrams_are_words_then_pairs_then_triples() -> None:
    assert list(ngrams_iterator(["a", "b", "c"], 2)) == ["a", "b", "c", "a b", "b c"]
    assert list(ngrams_iterator(["a", "b", "c"], 3)) == ["a", "b", "c", "a b", "b c", "a b c"]
    assert list(ngrams_iterator(["a"], 2)) == ["a"]


def test_cleaning_removes_tags_entities_accents_and_punctuation() -> None:
    handler = TextHandler()
    assert handler._remove_html_tags("<b>a</b>&nbsp;&#39;b<br/>") == "ab"
    assert handler._remove_accented_characters("café") == "cafe"
    assert handler._remove_punctuation("a.b!") == handler._remove_puncutation("a.b!") == "ab"


def test_an_archive_without_vocabulary_is_explained(scripted_doubler: Path, make_context: Any) -> None:
    context = make_context(scripted_doubler, model={"serializedFile": "doubler.pt"})
    with pytest.raises(RuntimeError, match=r"Missing the source_vocab file: .*source_vocab\.pt"):
        TextHandler().initialize(context)


def test_the_manifest_may_name_the_vocabulary(scripted_doubler: Path, make_context: Any) -> None:
    torch.save({"a": 1}, scripted_doubler / "words.pt")
    model = {"serializedFile": "doubler.pt", "sourceVocab": "words.pt"}
    handler = TextHandler()
    handler.initialize(make_context(scripted_doubler, model=model))
    assert handler.source_vocab == {"a": 1}


def test_a_vocabulary_outside_the_archive_is_not_read(scripted_doubler: Path, make_context: Any) -> None:
    torch.save({"a": 1}, scripted_doubler.parent / "words.pt")
    model = {"serializedFile": "doubler.pt", "sourceVocab": "../words.pt"}
    with pytest.raises(RuntimeError, match="Missing the source_vocab file"):
        TextHandler().initialize(make_context(scripted_doubler, model=model))


def test_a_vocabulary_with_code_is_not_run(scripted_doubler: Path, make_context: Any, tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return Path.touch, (marker,)

    torch.save({"a": Bomb()}, scripted_doubler / "source_vocab.pt")
    context = make_context(scripted_doubler, model={"serializedFile": "doubler.pt"})
    with pytest.raises(RuntimeError, match="unpickling") as caught:
        TextHandler().initialize(context)
    assert isinstance(caught.value.__cause__, pickle.UnpicklingError)
    assert not marker.exists()


def test_a_vocabulary_of_the_wrong_type_is_refused(scripted_doubler: Path, make_context: Any) -> None:
    torch.save(["a"], scripted_doubler / "source_vocab.pt")
    context = make_context(scripted_doubler, model={"serializedFile": "doubler.pt"})
    with pytest.raises(RuntimeError, match="holds a list"):
        TextHandler().initialize(context)


def test_what_subclasses_that_explain_use_is_there() -> None:
    handler = TextHandler()
    assert (handler.input_text, handler.lig) == (None, None)
    assert handler.get_word_token(["\u0120cat", "s"]) == ["cat", "s"]
    summary = handler.summarize_attributions(torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    assert torch.allclose(
        summary, torch.full((2, 2), 0.5 / 2**0.5)
    )  # shares of 0.5, and each token's sum is 1


@given(st.text(alphabet="<>&;a#1\n", max_size=40))
def test_tags_and_entities_are_removed_as_torchserve_removes_them(text: str) -> None:
    assert TextClassifier()._remove_html_tags(text) == CLEANUP_REGEX.sub("", text)


def test_signs_that_begin_no_tag_are_passed_in_linear_time() -> None:
    text = "<" * 2_000_000
    assert TextClassifier()._remove_html_tags(text) == text


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


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("don't", "do not"),
        ("Don't", "Do not"),
        ("I'd've said he's right", "I would have said he is right"),
        ("can't've", "cannot have"),
        ("she's", "she is"),
        ("we're they'll you've", "we are they will you have"),
        ("won't shan't ain't", "will not shall not is not"),
        ("'cause", "because"),
        ("the dog's bone", "the dogs bone"),
        ("WON'T", "Will not"),
        ("", ""),
    ],
)
def test_contractions_are_written_out_and_apostrophes_dropped(text: str, expanded: str) -> None:
    assert expand_contractions(text) == expanded


def test_the_table_covers_common_english() -> None:
    assert len(CONTRACTIONS) >= 120
