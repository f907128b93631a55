from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from torchere.handlers.text.embedding import TextTokens


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A tokenizer of six words, cut off at five tokens, padded by number 9."""
    tokenizers = pytest.importorskip("tokenizers", reason="install torchere[tokenizers]")
    words = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "cats": 3, "sleep": 4, "dogs": 5}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
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
