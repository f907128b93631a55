"""Packs the tokenizer and class names of a Hugging Face folder, which text handlers need in the archive."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from torchere.archiver.errors import ModelRefused
from torchere.archiver.request import ArchiveRequest
from torchere.archiver.writer import extra_files

TOKENIZER, NAMES = "tokenizer.json", "index_to_name.json"
_CLASSES = "sequence_classifier"
_TOKENIZED = (_CLASSES, "text_embedding")


def check_texts(request: ArchiveRequest, folder: Path | None) -> None:
    """Raise ModelRefused if the archive would lack the tokenizer or vocabulary that its handler needs.

    Args:
        request: the request, which names the handler and the extra files.
        folder: the Hugging Face folder to pack; None for a model of another kind.
    """
    if folder is None or not folder.is_dir():
        return
    if request.handler == "text_classifier" and "source_vocab.pt" not in _names(request):
        raise ModelRefused(
            "the handler text_classifier looks words up in source_vocab.pt, which a Hugging Face folder does "
            f"not have; expected --handler {_CLASSES}, which takes texts by {TOKENIZER}"
        )
    is_there = (folder / TOKENIZER).is_file() or TOKENIZER in _names(request)
    if request.handler in _TOKENIZED and not is_there:
        raise ModelRefused(
            f"{folder} has no {TOKENIZER}, by which the handler {request.handler} reads texts; "
            "tokenizer.save_pretrained(folder) of transformers writes it"
        )


def add_texts(request: ArchiveRequest, folder: Path | None, beside: Path) -> None:
    """Put the folder's tokenizer and class names beside the model, unless an extra file has the same name.

    Raises ModelRefused if config.json can't be read.
    """
    if folder is None or not folder.is_dir() or request.handler not in _TOKENIZED:
        return
    given = _names(request)
    if TOKENIZER not in given:
        shutil.copyfile(folder / TOKENIZER, beside / TOKENIZER)
    if request.handler == _CLASSES and NAMES not in given and (names := _class_names(folder)):
        (beside / NAMES).write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")


def _names(request: ArchiveRequest) -> set[str]:
    return {item.name for item in extra_files(request)}


def _class_names(folder: Path) -> dict[str, str]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelRefused(f"{folder}/config.json can't be read: {error}") from error
    found = config.get("id2label") if isinstance(config, dict) else None
    if not isinstance(found, dict):
        return {}
    return {str(index): str(name) for index, name in found.items()}
