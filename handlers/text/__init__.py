"""Shared parts of the text handlers: the vocabulary, tokenization and text clean-up as in training."""

from __future__ import annotations

import pickle
import re
import string
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from torchere.handlers.base import BaseHandler
from torchere.handlers.context import Context
from torchere.handlers.text.contractions import expand_contractions

CLEANUP_REGEX = re.compile(r"<.*?>|&([a-z0-9]+|#[0-9]{1,6}|#x[0-9a-f]{1,6});")
UNKNOWN = "<unk>"  # torchtext's name for words that a vocabulary does not have
_SPACED = re.compile(r"(['.,()!?])")
_DROP_PUNCTUATION = str.maketrans("", "", string.punctuation)


def basic_english_tokens(text: str) -> list[str]:
    """Split a text into words as torchtext's `basic_english` tokenizer does.

    Lower case; `' . , ( ) ! ?` are words of their own, `"` is dropped, `; :` and `<br />` separate.
    """
    text = text.lower().replace('"', "").replace("<br />", " ").replace(";", " ").replace(":", " ")
    return _SPACED.sub(r" \1 ", text).split()


def ngrams(tokens: list[str], longest: int) -> Iterator[str]:
    """Yield the tokens, then all n-grams of 2 to `longest` neighbours, joined by a blank."""
    yield from tokens
    for size in range(2, longest + 1):
        for start in range(len(tokens) - size + 1):
            yield " ".join(tokens[start : start + size])


class TextHandler(BaseHandler):
    """Base class of the text handlers; `source_vocab` maps a token to its index. Not usable alone."""

    def __init__(self) -> None:
        super().__init__()
        self.source_vocab: Any = None
        self.tokenizer = basic_english_tokens
        self.input_text: Any = None  # for subclasses, as is the next
        self.lig: Any = None

    def initialize(self, context: Context) -> None:
        """Load the model and the vocabulary.

        Raises:
            RuntimeError: the archive has no vocabulary, or it is not a plain mapping.
        """
        super().initialize(context)
        self.initialized = False
        self.source_vocab = _load_vocabulary(Path(self.get_source_vocab_path(context)))
        self.initialized = True

    def get_source_vocab_path(self, ctx: Context) -> str:
        """Return the path of the vocabulary: the manifest's `sourceVocab`, or `source_vocab.pt`.

        Raises:
            RuntimeError: the archive does not hold that file.
        """
        named = ((ctx.manifest or {}).get("model") or {}).get("sourceVocab") or "source_vocab.pt"
        path = Path(ctx.system_properties["model_dir"], Path(named).name)
        if not path.is_file():
            raise RuntimeError(
                f"Missing the source_vocab file: a text handler needs {path.name} in the archive, written by "
                "torch.save of a dict from token to index; add it with --extra-files"
            )
        return str(path)

    def _expand_contractions(self, text: str) -> str:
        return expand_contractions(text)

    def _remove_accented_characters(self, text: str) -> str:
        return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()

    def _remove_html_tags(self, text: str) -> str:
        return CLEANUP_REGEX.sub("", text)

    def _remove_punctuation(self, text: str) -> str:
        return text.translate(_DROP_PUNCTUATION)

    _remove_puncutation = _remove_punctuation  # the spelling of early TorchServe versions

    def _tokenize(self, text: str) -> list[str]:
        return self.tokenizer(text)

    def get_word_token(self, input_tokens: Iterable[str]) -> list[str]:
        """Return the tokens without the mark by which byte-pair tokenizers encode a blank."""
        return [token.replace("\u0120", "") for token in input_tokens]

    def summarize_attributions(self, attributions: torch.Tensor) -> torch.Tensor:
        """Return the softmax of attributions [tokens, size], divided by the norm of its sums per token."""
        shares = torch.softmax(attributions, dim=0 if attributions.ndim in (0, 1, 3) else 1)
        summary: torch.Tensor = shares / torch.norm(shares.sum(dim=-1))
        return summary


def _load_vocabulary(path: Path) -> Mapping[str, int]:
    try:
        vocabulary = torch.load(path, weights_only=True)
    except pickle.UnpicklingError as err:
        raise RuntimeError(
            f"{path.name} holds more than a plain dict, and is not loaded because unpickling it could run "
            "any code; save it anew: torch.save(dict(vocab.get_stoi()), ...)"
        ) from err
    if not isinstance(vocabulary, Mapping):
        raise RuntimeError(
            f"{path.name} holds a {type(vocabulary).__name__}; expected a dict of token to index"
        )
    return _WithUnknown(vocabulary) if UNKNOWN in vocabulary else vocabulary


class _WithUnknown(dict[str, int]):
    """A vocabulary that gives the index of `<unk>` for unknown words."""

    def __missing__(self, token: str) -> int:
        return self[UNKNOWN]
