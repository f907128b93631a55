"""Text classification, and common parts of text handlers: vocabulary, tokenization, clean-up."""

from __future__ import annotations

import pickle
import re
import string
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchere.handlers.base import BaseHandler
from torchere.handlers.context import Context
from torchere.handlers.errors import bad_request
from torchere.handlers.labels import map_class_to_label
from torchere.handlers.loading.devices import to_device, without_gradients
from torchere.handlers.metrics import timed
from torchere.handlers.rows import fields_of, rows_of, sole_element, value_of

# English contractions and their long forms.
#
# Pronouns and question words take regular endings; `'s` and `'d` are read as "is" and "would".
_PRONOUNS = ("i", "you", "he", "she", "it", "we", "they")
_POINTERS = ("that", "there", "this", "who", "what", "when", "where", "why", "how")
_ENDINGS = {"'ll": "will", "'ve": "have", "'d": "would", "'d've": "would have", "'ll've": "will have"}
_WITH_IS = ("he", "she", "it", "here", *_POINTERS)
_WITH_ARE = ("you", "we", "they", "what", "who", "there")
_AUXILIARIES = ("are", "is", "was", "were", "do", "does", "did", "have", "has", "had", "may", "might", "must")
_NEGATED = (*_AUXILIARIES, "could", "should", "would", "need", "ought", "dare")

_IRREGULAR = {
    "ain't": "is not",
    "can't": "cannot",
    "can't've": "cannot have",
    "shan't": "shall not",
    "won't": "will not",
    "won't've": "will not have",
    "i'm": "i am",
    "let's": "let us",
    "ma'am": "madam",
    "o'clock": "of the clock",
    "y'all": "you all",
    "y'all're": "you all are",
    "'cause": "because",
    "so's": "so as",
    "so've": "so have",
    "to've": "to have",
    "could've": "could have",
    "might've": "might have",
    "must've": "must have",
    "should've": "should have",
    "would've": "would have",
    "will've": "will have",
    "how'd'y": "how do you",
    "how'd": "how did",
}


def _table() -> dict[str, str]:
    table = {
        subject + ending: f"{subject} {words}"
        for subject in (*_PRONOUNS, *_POINTERS)
        for ending, words in _ENDINGS.items()
    }
    table |= {f"{subject}'s": f"{subject} is" for subject in _WITH_IS}
    table |= {f"{subject}'re": f"{subject} are" for subject in _WITH_ARE}
    table |= {f"{verb}n't": f"{verb} not" for verb in _NEGATED}
    table |= {
        f"{verb}n't've": f"{verb} not have" for verb in ("could", "might", "must", "should", "would", "had")
    }
    return table | _IRREGULAR


CONTRACTIONS = _table()
# Longest first: "can't've" must not end as "cannot've".
_PATTERN = re.compile(
    r"(?<!\w)(?:" + "|".join(map(re.escape, sorted(CONTRACTIONS, key=len, reverse=True))) + r")(?!\w)",
    re.IGNORECASE,
)


def expand_contractions(text: str) -> str:
    """Write contractions out ("Don't" as "Do not") in the case of their first letter; drop apostrophes."""

    def written_out(match: re.Match[str]) -> str:
        expanded = CONTRACTIONS[match.group().lower()]
        return expanded.capitalize() if match.group()[0].isupper() else expanded

    return _PATTERN.sub(written_out, text).replace("'", "")


_ENTITY = re.compile(r"&([a-z0-9]+|#[0-9]{1,6}|#x[0-9a-f]{1,6});")
CLEANUP_REGEX = re.compile(rf"<.*?>|{_ENTITY.pattern}")
UNKNOWN = "<unk>"  # torchtext's name for words that a vocabulary does not have
_SPACED = re.compile(r"(['.,()!?])")
_DROP_PUNCTUATION = str.maketrans("", "", string.punctuation)
Tokenizer = Callable[[str], list[str]]


def basic_english_tokens(text: str) -> list[str]:
    """Split a text into words as torchtext's `basic_english` tokenizer does.

    Lower case; `' . , ( ) ! ?` are words of their own, `"` is dropped, `; :` and `<br />` separate.
    """
    text = text.lower().replace('"', "").replace("<br />", " ").replace(";", " ").replace(":", " ")
    return _SPACED.sub(r" \1 ", text).split()


def get_tokenizer(tokenizer: Tokenizer | str | None, language: str = "en") -> Tokenizer:
    """Return a tokenizer: None splits at white space, "basic_english" normalises first, a callable is kept.

    Raises:
        ValueError: the tokenizer is another string, or the language is not English.
    """
    if tokenizer is None:
        return str.split
    if callable(tokenizer):
        return tokenizer
    if tokenizer != "basic_english":
        raise ValueError(f"the tokenizer {tokenizer!r} is unknown; expected basic_english or a function")
    if language != "en":
        raise ValueError(f"basic_english is for English; found language={language!r}")
    return basic_english_tokens


def ngrams_iterator(token_list: Sequence[str], ngrams: int) -> Iterator[str]:
    """Yield the tokens, then their n-grams of two up to `ngrams` tokens, joined by blanks.

    >>> list(ngrams_iterator(["here", "we", "are"], 2))
    ['here', 'we', 'are', 'here we', 'we are']
    """
    yield from token_list
    for size in range(2, ngrams + 1):
        for start in range(len(token_list) - size + 1):
            yield " ".join(token_list[start : start + size])


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
        # No tag ends after the last ">" of its line: a search from each "<" there would take quadratic time.
        lines = [(line, line.rfind(">") + 1) for line in text.split("\n")]
        cleaned = (CLEANUP_REGEX.sub("", line[:end]) + _ENTITY.sub("", line[end:]) for line, end in lines)
        return "\n".join(cleaned)

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
    """A vocabulary in which unknown words have the index of `<unk>`."""

    def __missing__(self, token: str) -> int:
        return self[UNKNOWN]


class TextClassifier(TextHandler):
    """Answers a text with the probability of every class, `{name: probability}`, in class order.

    The model takes (token indices [n], offsets [1]), like `torch.nn.EmbeddingBag`, and returns scores
    [1, classes] before softmax. Only the first request of a batch is read, so the model needs batchSize 1.
    """

    ngrams = 2

    @timed
    def preprocess(self, data: Any) -> Any:
        """Clean the text, and look up its words and word pairs in the vocabulary.

        Returns:
            Their indices [n], int64 on the handler's device, and the words.

        Raises:
            PredictionException: 400, the request has no text or no word, or it is not UTF-8.
            KeyError: a word is unknown, and the vocabulary has no `<unk>`.
        """
        text = _text_of(rows_of(data)[0])
        text = self._expand_contractions(self._remove_html_tags(text).lower())
        text = self._remove_punctuation(self._remove_accented_characters(text))
        words = self._tokenize(text)
        if not words:  # the model would give an answer without a meaning
            raise bad_request("The request has no text: expected at least one word, found none")
        indices = [self.source_vocab[token] for token in ngrams_iterator(words, self.ngrams)]
        return torch.as_tensor(indices, dtype=torch.int64, device=self.device), words

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the model on all tokens as one text."""
        indices, _ = data
        with without_gradients(self.device):
            indices = to_device(indices, self.device)
            return self.model(indices, torch.zeros(1, dtype=torch.int64, device=self.device), *args, **kwargs)

    @timed
    def postprocess(self, data: Any) -> Any:
        """Apply softmax and map class indices to names."""
        return map_class_to_label(torch.softmax(data, dim=1).tolist(), self.mapping)


def _text_of(row: Any) -> str:
    value = value_of(row)
    if isinstance(value, np.ndarray) and value.dtype == object:
        value = sole_element(value, "a text")
    if isinstance(value, (bytes, bytearray)):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError as err:
            raise bad_request(f"The request body is not UTF-8 text: {err}") from err
    if not isinstance(value, str):
        is_form = value is None and isinstance(row, dict)
        found = fields_of(row, takes_text=True) if is_form else f"a {type(value).__name__}"
        raise bad_request(
            f"The request has no text: found {found}; expected text under 'data' or 'body', "
            "or a tensor of BYTES (curl -H 'Content-Type: text/plain' --data-binary @story.txt URL)"
        )
    return value
