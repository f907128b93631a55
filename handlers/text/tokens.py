"""Converts texts to token ids with an archive's `tokenizer.json` and the package `tokenizers`."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

TOKENIZER_NAME = "tokenizer.json"
_MAX_TOKENS = 512  # default if neither the operator nor the tokenizer's file sets one: BERT's positions


class Tokens(NamedTuple):
    """One text: the ids of its tokens, and their token type ids."""

    ids: list[int]
    types: list[int]


class TextTokens:
    """Tokenizes texts and pads several to one length. Thread-safe.

    Args:
        path: the tokenizer's file.
        max_tokens: longer texts are truncated; None: the limit in the file.

    Raises:
        RuntimeError: the package is not installed, or the file is missing or not a tokenizer.
    """

    def __init__(self, path: Path, max_tokens: int | None) -> None:
        self._tokenizer: Any = _load(path)
        padding, truncation = self._tokenizer.padding or {}, self._tokenizer.truncation or {}
        self.max_tokens: int = max_tokens or truncation.get("max_length") or _MAX_TOKENS
        self._pad_id: int = padding.get("pad_id", 0)
        # `padded` pads to the longest text of a run instead of the length set in the file.
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(self.max_tokens)

    def of(self, text: str) -> Tokens:
        """Tokenize one text, with the special tokens that the model expects at its ends."""
        # One text at a time: for a batch of texts the package starts a thread for each core.
        found = self._tokenizer.encode(text)
        return Tokens(found.ids, found.type_ids)

    def padded(self, texts: Sequence[Tokens]) -> dict[str, torch.Tensor]:
        """Return `ids`, `mask` (1 for a token) and `types`, each int64 [texts, length of the longest]."""
        shape = (len(texts), max(len(text.ids) for text in texts))
        ids, mask, types = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
        ids.fill_(self._pad_id)
        for row, text in enumerate(texts):
            count = len(text.ids)
            ids[row, :count] = torch.tensor(text.ids)
            types[row, :count] = torch.tensor(text.types)
            mask[row, :count] = 1
        return {"ids": ids, "mask": mask, "types": types}


def _load(path: Path) -> Any:
    if importlib.util.find_spec("tokenizers") is None:
        raise RuntimeError(
            "this handler needs the package tokenizers, which is not installed; install torchere[tokenizers]"
        )
    if not path.is_file():
        raise RuntimeError(
            f"the archive holds no {path.name}; add it with --extra-files (Hugging Face's models have one)"
        )
    tokenizers = importlib.import_module("tokenizers")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as err:  # the package raises no narrower class
        raise RuntimeError(f"{path.name} can't be read as a tokenizer: {err}") from err
