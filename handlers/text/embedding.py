"""Text embeddings: vectors that are close if the texts have similar meanings.

Texts become token ids by the archive's `tokenizer.json` and the package `tokenizers`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from torchere.archiver.signature import archive_signature
from torchere.handlers.base import BaseHandler
from torchere.handlers.context import Context
from torchere.handlers.errors import PredictionException
from torchere.handlers.loading import onnx
from torchere.handlers.loading.devices import without_gradients
from torchere.handlers.metrics import timed
from torchere.handlers.rows import came_as_tensors, fields_of, read_each, refusal, settings_of
from torchere.handlers.tensors import DATATYPES, torch_dtype
from torchere.handlers.tensors.request import flattened

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


POOLINGS = ("mean", "first")
_DEFAULTS: dict[str, Any] = {
    "pooling": "mean",
    "normalize": True,
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


class Texts(NamedTuple):
    """The tokenized texts of one request; `single`: the request has one text, not a list."""

    tokens: list[Tokens]
    single: bool


class Batch(NamedTuple):
    """A batch between two stages: `requests[i]` has the texts of request i, or its error."""

    requests: list[Texts | PredictionException]
    embeddings: torch.Tensor  # float32 [texts of all requests, size], on the CPU; empty before inference


class TextEmbedding(BaseHandler):
    """Answers a text with its embedding, a list of numbers; a list of texts with a list of embeddings.

    The model takes (ids, mask), int64 [texts, tokens], or the inputs that `signature.json` names, which may
    include `token_type_ids`. Its first result is [texts, tokens, size], which is pooled over the tokens (by
    default the mean) and normalized to length one, or [texts, size], which is only normalized. The archive
    has the tokenizer in `tokenizer.json`.

    Requests: plain text as the body or as the field `text`, or JSON: `{"text": "..."}`, `{"text": [...]}`.
    The Open Inference Protocol: input `text` (BYTES [texts]), output `embedding` (FP32 [texts, size]).

    `handler.text_embedding` in model-config.yaml: `pooling` (mean, first), `normalize`, `max_tokens` of a
    text (the rest is cut off), `max_texts` of a request, `max_characters` of a text, `texts_per_run`.
    """

    names_classes = False

    def __init__(self) -> None:
        super().__init__()
        self.settings = dict(_DEFAULTS)
        self.inputs: tuple[tuple[str, torch.dtype], ...] = _AS_ARCHIVED  # role and datatype of each
        self.tokens: Any = None

    def initialize(self, context: Context) -> None:
        """Load tokenizer and model, and read `handler.text_embedding`.

        Raises:
            RuntimeError: the package `tokenizers` or the tokenizer is missing, or the signature has inputs
                that a text encoder does not have; or the weights can't be loaded.
            ValueError: a value under `handler.text_embedding` is wrong.
        """
        self.settings = _checked(settings_of(context.model_yaml_config, "text_embedding", _DEFAULTS))
        model_dir = context.system_properties["model_dir"]
        self.inputs = _inputs(model_dir)
        super().initialize(context)
        self.model = self.model if callable(self.model) else onnx.as_function(self.model)
        path = Path(model_dir, TOKENIZER_NAME)
        max_tokens = self.settings["max_tokens"] or None
        self.tokens = self._shared(("tokens", str(path)), lambda: TextTokens(path, max_tokens))

    def warmup_data(self) -> list[dict[str, object]] | None:
        """Return two example rows: a word and a sentence."""
        return [{"body": "warm"}, {"body": "A few more words, so that there is something to pad."}]

    @timed
    def preprocess(self, data: Any) -> Any:
        """Tokenize the texts of each request."""
        return Batch(read_each(data, self._texts), torch.empty(0))

    def _texts(self, row: Any) -> Texts:
        value = _text_field(row)
        if isinstance(value, np.ndarray):  # an Open Inference Protocol tensor
            value = value.ravel().tolist()
        single = not isinstance(value, list)
        items = [value] if single else value
        if not 1 <= len(items) <= self.settings["max_texts"]:
            raise _refused(f"{len(items)} texts", f"1 to {self.settings['max_texts']} in one request")
        return Texts([self.tokens.of(self._text(item)) for item in items], single)

    def _text(self, value: Any) -> str:
        if isinstance(value, (bytes, bytearray)):
            try:
                value = bytes(value).decode()
            except UnicodeDecodeError as err:
                raise _refused(f"text that is not UTF-8 ({err})", "UTF-8") from err
        if not isinstance(value, str):
            raise _refused(f"a {type(value).__name__}", 'a text, {"text": "..."} or {"text": ["...", ...]}')
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
                self._embeddings([tokens[index] for index in order[start : start + step]])
                for start in range(0, len(order), step)
            ]
        sorted_embeddings = torch.cat(parts)
        embeddings = torch.empty_like(sorted_embeddings)
        embeddings[order] = sorted_embeddings
        return data._replace(embeddings=embeddings)

    def _embeddings(self, texts: Sequence[Tokens]) -> torch.Tensor:
        padded = self.tokens.padded(texts)
        arguments = [padded[role].to(self.device, dtype) for role, dtype in self.inputs]
        found = flattened(self.model(*arguments))[0].float()
        if found.dim() == 3:
            found = self._pooled(found, padded["mask"].to(found.device))
        found = found.cpu()
        if found.dim() != 2 or len(found) != len(texts):
            raise RuntimeError(
                f"the model gave {tuple(found.shape)} for {len(texts)} texts; expected [texts, tokens, size] "
                "or [texts, size]"
            )
        return torch.nn.functional.normalize(found, dim=1) if self.settings["normalize"] else found

    def _pooled(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.settings["pooling"] == "first":
            return states[:, 0]
        kept = mask[:, :, None].float()
        return (states * kept).sum(1) / kept.sum(1).clamp(min=1)  # a text may have no tokens

    @timed
    def postprocess(self, data: Any) -> Any:
        """Return the embeddings of each request."""
        answers: list[Any] = []
        start = 0
        for place, texts in enumerate(data.requests):
            if isinstance(texts, PredictionException):
                answers.append(refusal(self.context, place, texts))
                continue
            part = data.embeddings[start : start + len(texts.tokens)]
            start += len(texts.tokens)
            if came_as_tensors(self.context, place):
                answers.append({"embedding": part})
            else:
                answers.append(part[0].tolist() if texts.single else part.tolist())
        return answers


def _text_field(row: Any) -> Any:
    for name in ("text", "data", "body"):
        if isinstance(row, dict) and name in row:
            return _text_field(row[name]) if isinstance(row[name], dict) else row[name]
    if isinstance(row, dict):
        raise _refused(fields_of(row), '\'text\' (JSON: {"text": "..."}), or a text as the body')
    return row


def _refused(found: str, expected: str) -> PredictionException:
    return PredictionException(f"The request has {found}; expected {expected}", 400)


def _inputs(model_dir: str) -> tuple[tuple[str, torch.dtype], ...]:
    signature = archive_signature(model_dir)
    if signature is None:
        return _AS_ARCHIVED
    for spec in signature.inputs:
        if spec.name not in _ROLES or spec.datatype not in ("INT64", "INT32"):
            raise RuntimeError(
                f"signature.json has the input {spec.name!r} ({spec.datatype}); the handler 'text_embedding' "
                f"gives {', '.join(_ROLES)} (INT64 or INT32)"
            )
    return tuple((_ROLES[spec.name], torch_dtype(DATATYPES[spec.datatype])) for spec in signature.inputs)


def _checked(settings: dict[str, Any]) -> dict[str, Any]:
    where = "handler.text_embedding.{} in model-config.yaml is {!r}; expected {}"
    if settings["pooling"] not in POOLINGS:
        raise ValueError(where.format("pooling", settings["pooling"], f"one of {', '.join(POOLINGS)}"))
    for key, least in (("max_tokens", 0), ("max_texts", 1), ("max_characters", 1), ("texts_per_run", 1)):
        if settings[key] < least:
            raise ValueError(where.format(key, settings[key], f"{least} or more"))
    return settings
