from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchere.handlers.text import (
    CLEANUP_REGEX,
    TextClassifier,
    TextHandler,
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
