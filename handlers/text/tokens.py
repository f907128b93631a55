"""Common parts of text handlers for transformers: requests of texts, tokens, and runs of similar length.

Texts become token ids by the archive's `tokenizer.json` and the package `tokenizers`.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from torchere.archiver.models.inputs.run import run_of_session
from torchere.archiver.signature import ANY, Limit, TensorSpec, archive_signature
from torchere.handlers.base import BaseHandler
from torchere.handlers.context import Context
from torchere.handlers.errors import PredictionException, bad_request
from torchere.handlers.loading.devices import without_gradients
from torchere.handlers.metrics import timed
from torchere.handlers.rows import (
    came_as_tensors,
    config_of,
    fields_of,
    read_each,
    refusal,
    settings_of,
    wrong_setting,
)
from torchere.handlers.tensors import DATATYPES, torch_dtype

TOKENIZER_NAME = "tokenizer.json"
_MAX_TOKENS = 512  # default if neither the operator nor the tokenizer's file sets one: BERT's positions
_ANY_LENGTH = Limit(1)
_LEASTS = (("max_tokens", 0), ("max_texts", 1), ("max_characters", 1), ("texts_per_run", 1))
SETTINGS: dict[str, Any] = {
    "max_tokens": 0,  # 0: the limit of tokenizer.json
    "max_texts": 256,  # of one request
    "max_characters": 100_000,  # of one text
    "texts_per_run": 32,  # through the model together
}
_AS_ARCHIVED = (("ids", torch.int64), ("mask", torch.int64))  # inputs of a model without a signature
_ROLES = {  # names of inputs, by convention
    "ids": "ids",
    "input_ids": "ids",
    "mask": "mask",
    "attention_mask": "mask",
    "types": "types",
    "token_type_ids": "types",
}


class Tokens(NamedTuple):
    """One text: the ids of its tokens, and their token type ids."""

    ids: list[int]
    types: list[int]


class TextTokens:
    """Tokenizes texts and pads several to one length. Thread-safe.

    Args:
        path: the tokenizer's file.
        max_tokens: longer texts are truncated; None: the limit in the file.
        lengths: token counts that the model takes: `max_tokens` is lowered to them, short texts are padded.

    Raises:
        RuntimeError: the package is not installed, or the file is missing or not a tokenizer.
    """

    def __init__(self, path: Path, max_tokens: int | None, lengths: Limit = _ANY_LENGTH) -> None:
        self._tokenizer: Any = _load(path)
        padding, truncation = self._tokenizer.padding or {}, self._tokenizer.truncation or {}
        most = max_tokens or truncation.get("max_length") or _MAX_TOKENS
        # `padded` rounds up to the multiple, and must not exceed the maximum.
        longest = (lengths.most or 0) // lengths.multiple * lengths.multiple
        self.max_tokens: int = min(most, longest or most)
        self._lengths = lengths
        self._pad_id: int = padding.get("pad_id", 0)
        # `padded` pads to the longest text of a run instead of the length set in the file.
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(self.max_tokens)

    def of(self, text: str, pair: str | None = None) -> Tokens:
        """Tokenize a text, or two as a pair, with the special tokens that the model expects around them."""
        # One text at a time: for a batch of texts the package starts a thread for each core.
        found = self._tokenizer.encode(text, pair)
        return Tokens(found.ids, found.type_ids)

    def padded(self, texts: Sequence[Tokens]) -> dict[str, torch.Tensor]:
        """Return `ids`, `mask` (1 for a token) and `types`, each int64 [texts, length].

        The length is that of the longest text, or the next larger one that the model takes.
        """
        longest = max(self._lengths.least, *(len(text.ids) for text in texts))
        step = self._lengths.multiple
        shape = (len(texts), -(-longest // step) * step)
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


class Texts(NamedTuple):
    """The tokenized texts of one request; `single`: the request has one text, not a list."""

    tokens: list[Tokens]
    single: bool
    openai: dict[str, Any] | None = None  # the body, if the answer has the form of OpenAI's API


class Batch(NamedTuple):
    """A batch between two stages: `requests[i]` has the texts of request i, or its error."""

    requests: list[Texts | PredictionException]
    results: torch.Tensor  # float32 [texts of all requests, size], on the CPU; empty before inference


class TransformerHandler(BaseHandler):
    """Base class: tokenizes texts, runs them through the model, and answers each with its row of the result.

    The model takes (ids, mask), int64 [texts, tokens], or the inputs that `signature.json` names, which may
    include `token_type_ids`. The archive has the tokenizer in `tokenizer.json`.

    A subclass implements `result_of` and `answer_of`. It sets `section`, the name of its settings under
    `handler` in model-config.yaml; their `defaults`; `choice`, a setting and its allowed words, if it has
    one; and `output`, the name of its output in the Open Inference Protocol.
    """

    section: ClassVar[str]
    defaults: ClassVar[dict[str, Any]]
    choice: ClassVar[tuple[str, tuple[str, ...]] | None] = None
    output: ClassVar[str]
    takes_pairs: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.settings = dict(self.defaults)
        self.inputs: tuple[tuple[str, torch.dtype], ...] = _AS_ARCHIVED  # role and datatype of each
        self.tokens: Any = None

    def initialize(self, context: Context) -> None:
        """Load the tokenizer and the model, and read the handler's section of model-config.yaml.

        Raises:
            RuntimeError: the package `tokenizers` or the tokenizer is missing, or the signature has inputs
                that a text encoder does not have; or the weights can't be loaded.
            ValueError: a value of the section is wrong.
        """
        self.settings = self.checked(settings_of(config_of(context), self.section, self.defaults))
        model_dir = context.system_properties["model_dir"]
        specs = _specs(model_dir, self.section)
        if specs:
            self.inputs = tuple((_ROLES[spec.name], torch_dtype(DATATYPES[spec.datatype])) for spec in specs)
        super().initialize(context)
        self.model = self.model if callable(self.model) else run_of_session(self.model)
        path = Path(model_dir, TOKENIZER_NAME)
        max_tokens = self.settings["max_tokens"] or None
        self.tokens = self._torchere_shared(
            ("tokens", str(path)), lambda: TextTokens(path, max_tokens, _lengths(specs))
        )

    def checked(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the settings; raise ValueError if one has a wrong value."""
        key, words = self.choice or ("", ())
        if words and settings[key] not in words:
            raise wrong_setting(f"{self.section}.{key}", settings[key], f"one of {', '.join(words)}")
        for name, least in _LEASTS:
            if settings[name] < least:
                raise wrong_setting(f"{self.section}.{name}", settings[name], f"{least} or more")
        return settings

    def warmup_data(self) -> list[dict[str, object]] | None:
        """Return two example rows: a word and a sentence."""
        return [{"body": "warm"}, {"body": "A few more words, so that there is something to pad."}]

    @timed
    def preprocess(self, data: Any) -> Any:
        """Tokenize the texts of each request."""
        places = itertools.count()
        return Batch(read_each(data, lambda row: self._texts(next(places), row)), torch.empty(0))

    def _texts(self, _place: int, row: Any) -> Texts:
        found, pairs = _fields(row)
        if pairs is not None and not self.takes_pairs:
            raise _refused("'text_pair'", f"'text' alone: {self.section} takes no pairs")
        single = not isinstance(found, list)
        items = [found] if single else found
        if not 1 <= len(items) <= self.settings["max_texts"]:
            raise _refused(f"{len(items)} texts", f"1 to {self.settings['max_texts']} in one request")
        texts = [self._text(item) for item in items]
        if pairs is None:
            return Texts([self.tokens.of(text) for text in texts], single)
        others = [self._text(item) for item in (pairs if isinstance(pairs, list) else [pairs])]
        if len(others) != len(texts):
            raise _refused(f"{len(others)} texts in 'text_pair'", f"as many as in 'text', {len(texts)}")
        return Texts([self.tokens.of(*pair) for pair in zip(texts, others, strict=True)], single)

    def _text(self, value: Any) -> str:
        if isinstance(value, (bytes, bytearray)):
            try:
                value = bytes(value).decode()
            except UnicodeDecodeError as err:
                raise _refused(f"text that is not UTF-8 ({err})", "UTF-8") from err
        if not isinstance(value, str):
            raise _refused(f"a {type(value).__name__}", 'a text, {"text": "..."} or {"text": ["...", ...]}')
        try:
            value.encode()
        except UnicodeEncodeError as err:
            raise _refused(f"text that has no form in UTF-8 ({err.reason})", "no lone surrogates") from err
        most = self.settings["max_characters"]
        if len(value) > most:
            raise _refused(f"a text of {len(value)} characters", f"at most {most}")
        return value

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the texts of all requests through the model, texts of similar length together."""
        tokens = [one for texts in data.requests if isinstance(texts, Texts) for one in texts.tokens]
        if not tokens:
            return data
        order = sorted(range(len(tokens)), key=lambda index: len(tokens[index].ids))
        step = self.settings["texts_per_run"]
        with without_gradients(self.device):
            parts = [
                self._results([tokens[index] for index in order[start : start + step]])
                for start in range(0, len(order), step)
            ]
        by_length = torch.cat(parts)
        results = torch.empty_like(by_length)
        results[order] = by_length
        return data._replace(results=results)

    def _results(self, texts: Sequence[Tokens]) -> torch.Tensor:
        padded = self.tokens.padded(texts)
        arguments = [padded[role].to(self.device, dtype) for role, dtype in self.inputs]
        return self.result_of(self.model(*arguments), padded["mask"])

    @abstractmethod
    def result_of(self, output: Any, mask: torch.Tensor) -> torch.Tensor:
        """Return float32 [texts, size] on the CPU, made of the model's output; `mask` is [texts, tokens]."""

    @abstractmethod
    def answer_of(self, result: torch.Tensor) -> Any:
        """Return the answer for one text in JSON; `result` is float32 [size]."""

    @timed
    def postprocess(self, data: Any) -> Any:
        """Return the answer of each request."""
        answers: list[Any] = []
        start = 0
        for place, texts in enumerate(data.requests):
            if isinstance(texts, PredictionException):
                answers.append(refusal(self.context, place, texts))
                continue
            part = data.results[start : start + len(texts.tokens)]
            start += len(texts.tokens)
            try:
                answers.append(self._answer(place, texts, part))
            except PredictionException as err:
                answers.append(refusal(self.context, place, err))
        return answers

    def _answer(self, place: int, texts: Texts, results: torch.Tensor) -> Any:
        if came_as_tensors(self.context, place):
            return {self.output: results}
        found = [self.answer_of(result) for result in results]
        return found[0] if texts.single else found


_FIELDS = ("text", "data", "body")


def _fields(row: Any) -> tuple[Any, Any]:
    """Return the text or list of texts, and the second texts if the request has pairs, otherwise None."""
    while isinstance(row, dict) and (name := next(filter(row.__contains__, _FIELDS), None)) is not None:
        if not isinstance(row[name], dict):
            return _listed(row[name]), _listed(row.get("text_pair"))
        row = row[name]
    if not isinstance(row, dict):
        return _listed(row), None
    raise _refused(fields_of(row, takes_text=True), '\'text\' (JSON: {"text": "..."}), or a text as the body')


def _listed(value: Any) -> Any:
    """Return a tensor of the Open Inference Protocol as a list, and any other value unchanged."""
    return value.ravel().tolist() if isinstance(value, np.ndarray) else value


def _refused(found: str, expected: str) -> PredictionException:
    return bad_request(f"The request has {found}; expected {expected}")


def _specs(model_dir: str, section: str) -> tuple[TensorSpec, ...]:
    """Return the inputs of the signature, if there is one; raise RuntimeError if an input has no role."""
    signature = archive_signature(model_dir)
    for spec in signature.inputs if signature else ():
        if spec.name not in _ROLES or spec.datatype not in ("INT64", "INT32"):
            raise RuntimeError(
                f"signature.json has the input {spec.name!r} ({spec.datatype}); the handler {section!r} "
                f"gives {', '.join(_ROLES)} (INT64 or INT32)"
            )
    return signature.inputs if signature else ()


def _lengths(specs: Sequence[TensorSpec]) -> Limit:
    """Return the limit that the signature sets for the number of tokens of a text."""
    for spec in specs:
        if len(spec.shape) == 2 and _ROLES[spec.name] == "ids":
            size = spec.shape[1]
            if size != ANY:
                return Limit(1, size, size)
            return next((limit for limit in spec.limits if limit.dimension == 1), _ANY_LENGTH)
    return _ANY_LENGTH
