from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from torchere.archiver.signature import Limit
from torchere.handlers.text.tokens import SETTINGS, TextTokens, TransformerHandler


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A tokenizer of six words, cut off at five tokens, padded by number 9."""
    tokenizers = pytest.importorskip("tokenizers", reason="install torchere[tokenizers]")
    words = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "cats": 3, "sleep": 4, "dogs": 5}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(pad_id=9, length=128)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_a_text_becomes_numbers_without_padding(file: Path) -> None:
    assert TextTokens(file, None).of("cats sleep").ids == [1, 3, 4, 2]
    assert TextTokens(file, None).of("").ids == [1, 2]


def test_a_long_text_is_cut_off_as_the_file_or_the_operator_says(file: Path) -> None:
    assert TextTokens(file, None).of("cats dogs cats dogs cats").ids == [1, 3, 5, 3, 2]
    assert TextTokens(file, 3).of("cats dogs cats dogs cats").ids == [1, 3, 2]


def test_texts_are_padded_to_the_longest_of_them(file: Path) -> None:
    tokens = TextTokens(file, None)
    padded = tokens.padded([tokens.of("cats"), tokens.of("dogs sleep")])
    assert padded["ids"].tolist() == [[1, 3, 2, 9], [1, 5, 4, 2]]
    assert padded["mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert padded["types"].tolist() == [[0] * 4] * 2


def test_a_pair_is_one_row_whose_second_text_has_another_type(file: Path) -> None:
    pair = TextTokens(file, 8).of("cats", "dogs sleep")
    assert pair.ids == [1, 3, 2, 5, 4, 2]
    assert pair.types == [0, 0, 0, 1, 1, 1]
    assert len(TextTokens(file, None).of("cats sleep", "dogs sleep").ids) == 5


def test_texts_have_a_length_that_the_model_takes(file: Path) -> None:
    """A file without truncation, as `save_pretrained` writes it, says nothing of the model's positions."""
    long, short = "cats dogs cats dogs cats", "cats"
    tokens = TextTokens(file, 64, Limit(1, 2, 4))
    assert tokens.of(long).ids == [1, 3, 5, 2]
    assert TextTokens(file, 3, Limit(1, 2, 4)).max_tokens == 3
    fixed = TextTokens(file, 64, Limit(1, 6, 6))
    assert fixed.padded([fixed.of(short)])["ids"].tolist() == [[1, 3, 2, 9, 9, 9]]
    even = TextTokens(file, 64, Limit(1, 2, 8, 2))
    assert even.padded([even.of(short)])["mask"].tolist() == [[1, 1, 1, 0]]
    odd = TextTokens(file, 64, Limit(1, 2, 5, 2))
    assert odd.padded([odd.of(long)])["ids"].tolist() == [[1, 3, 5, 2]]


def test_a_missing_or_broken_file_says_what_to_do(file: Path) -> None:
    file.write_text("{}")
    with pytest.raises(RuntimeError, match=r"tokenizer\.json can't be read as a tokenizer"):
        TextTokens(file, None)
    with pytest.raises(RuntimeError, match=r"holds no other\.json; add it with --extra-files"):
        TextTokens(file.with_name("other.json"), None)


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"install torchere\[tokenizers\]"):
        TextTokens(tmp_path / "tokenizer.json", None)


def test_a_handler_of_an_archive_checks_its_settings_and_needs_no_choice_of_words(
    tmp_path: Path, make_context: Any
) -> None:
    class Own(TransformerHandler):
        section, output, defaults = "own", "own", {"layers": 2, **SETTINGS}

        def checked(self, settings: dict[str, Any]) -> dict[str, Any]:
            if settings["layers"] % 2:
                raise ValueError("an odd number of layers")
            return super().checked(settings)

    own: Any = Own  # it runs no model, so that it needs no `result_of`

    def load(**settings: Any) -> None:
        own().initialize(make_context(tmp_path, config={"handler": {"own": settings}}))

    with pytest.raises(ValueError, match="an odd number"):
        load(layers=3)
    with pytest.raises(ValueError, match=r"max_texts in model-config\.yaml is 0; expected 1 or more"):
        load(max_texts=0)
    with pytest.raises(RuntimeError, match="No model weights"):  # the settings are right
        load()
