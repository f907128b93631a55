"""Packing Hugging Face folders for the handlers that take texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torchere.archiver.errors import ModelRefused
from torchere.archiver.huggingface_texts import add_texts, check_texts
from torchere.archiver.request import ArchiveRequest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with what the packer of texts reads: no weights."""
    made = tmp_path / "model"
    made.mkdir()
    (made / "tokenizer.json").write_text('{"of": "the folder"}')
    (made / "config.json").write_text(json.dumps({"id2label": {"0": "fine", "1": "awful"}}))
    return made


def request(handler: str, **fields: Any) -> ArchiveRequest:
    return ArchiveRequest(model_name="m", version="1.0", handler=handler, **fields)


def packed(handler: str, folder: Path, beside: Path, **fields: Any) -> dict[str, str]:
    beside.mkdir()
    add_texts(request(handler, **fields), folder, beside)
    return {path.name: path.read_text() for path in beside.iterdir()}


def test_tokenizer_and_names_of_classes_are_those_of_the_folder(folder: Path, tmp_path: Path) -> None:
    files = packed("sequence_classifier", folder, tmp_path / "beside")
    assert files["tokenizer.json"] == '{"of": "the folder"}'
    assert json.loads(files["index_to_name.json"]) == {"0": "fine", "1": "awful"}
    assert list(packed("text_embedding", folder, tmp_path / "vectors")) == ["tokenizer.json"]


def test_extra_files_of_the_same_names_stay(folder: Path, tmp_path: Path) -> None:
    given = [tmp_path / name for name in ("tokenizer.json", "index_to_name.json")]
    for path in given:
        path.write_text("{}")
    assert packed("sequence_classifier", folder, tmp_path / "beside", extra_files=tuple(given)) == {}


def test_other_handlers_and_other_models_get_nothing(folder: Path, tmp_path: Path) -> None:
    assert packed("tensor", folder, tmp_path / "one") == {}
    assert packed("text_embedding", tmp_path / "encoder.pt", tmp_path / "two") == {}


def test_a_folder_without_names_of_classes_has_numbers(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").write_text("{}")
    assert list(packed("sequence_classifier", folder, tmp_path / "beside")) == ["tokenizer.json"]


def test_a_broken_configuration_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelRefused, match=r"config\.json can't be read"):
        packed("sequence_classifier", folder, tmp_path / "beside")


def test_a_folder_without_a_tokenizer_is_refused_before_it_is_read(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelRefused, match=r"has no tokenizer\.json, by which .*save_pretrained"):
        check_texts(request("sequence_classifier"), folder)
    check_texts(request("tensor"), folder)


def test_a_handler_of_vocabularies_names_the_one_for_folders(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="expected --handler sequence_classifier"):
        check_texts(request("text_classifier"), folder)
    vocabulary = tmp_path / "source_vocab.pt"
    vocabulary.write_bytes(b"")
    check_texts(request("text_classifier", extra_files=(vocabulary,)), folder)
    check_texts(request("text_classifier"), tmp_path / "model.pt")
