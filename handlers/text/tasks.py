"""The built-in handlers of texts with a tokenizer: classes of texts and pairs, and embeddings."""

from __future__ import annotations

import base64
from typing import Any

import torch

from torchere.handlers.encode import compact_json
from torchere.handlers.envelopes import json_body
from torchere.handlers.errors import bad_request
from torchere.handlers.labels import map_class_to_label
from torchere.handlers.rows import fields_of, request_of
from torchere.handlers.tensors import shown
from torchere.handlers.tensors.request import flattened
from torchere.handlers.text.tokens import SETTINGS, Texts, TransformerHandler

_OPENAI_PATH = "v1/embeddings"  # behind the version, as OpenAI's clients add it to their `base_url`


class SequenceClassifier(TransformerHandler):
    """Answers a text with the score of every class, `{name: score}`; a list of texts with a list of these.

    The model's inputs are those of `TransformerHandler`, its first result is [texts, classes]: the logits of
    Hugging Face's `...ForSequenceClassification`. Names of classes come from `index_to_name.json`.

    Requests: as for `TextEmbedding`; two texts that are compared are `{"text": "...", "text_pair": "..."}`.
    The Open Inference Protocol: inputs `text` and, for pairs, `text_pair` (BYTES [texts]), output `scores`
    (FP32 [texts, classes]).

    `handler.sequence_classifier` in model-config.yaml: `scores` made of the logits (softmax; sigmoid, where
    several classes may be right; none, for a regression), `max_tokens` of a text or a pair (the rest is cut
    off), `max_texts` of a request, `max_characters` of a text, `texts_per_run`.
    """

    section = "sequence_classifier"
    defaults = {"scores": "softmax", **SETTINGS}  # noqa: RUF012
    choice = ("scores", ("softmax", "sigmoid", "none"))
    output = "scores"
    takes_pairs = True

    def result_of(self, output: Any, mask: torch.Tensor) -> torch.Tensor:
        """Return the scores; raises RuntimeError for a shape that is not [texts, classes]."""
        logits = flattened(output)[0].float().cpu()
        if logits.dim() != 2 or len(logits) != len(mask):
            raise RuntimeError(
                f"the model gave {tuple(logits.shape)} for {len(mask)} texts; expected [texts, classes]"
            )
        kind = self.settings["scores"]
        if kind == "none":
            return logits
        return torch.sigmoid(logits) if kind == "sigmoid" else torch.softmax(logits, dim=1)

    def answer_of(self, result: torch.Tensor) -> dict[str, object]:
        """Return the scores by the names of the classes."""
        return map_class_to_label([result.tolist()], self.mapping)[0]


class TextEmbedding(TransformerHandler):
    """Answers a text with its embedding (a list of numbers), and a list of texts with a list of embeddings.

    The model's inputs are those of `TransformerHandler`. Its first result is [texts, tokens, size], which is
    pooled over the tokens (by default the mean) and normalized to length one, or [texts, size], which is only
    normalized.

    Requests: plain text as the body or as the field `text`, or JSON: `{"text": "..."}`, `{"text": [...]}`.
    The Open Inference Protocol: input `text` (BYTES [texts]), output `embedding` (FP32 [texts, size]).
    OpenAI's embeddings API at `/predictions/{model}/{version}/v1/embeddings`.

    `handler.text_embedding` in model-config.yaml: `pooling` (mean, first), `normalize`, `max_tokens` of a
    text (the rest is cut off), `max_texts` of a request, `max_characters` of a text, `texts_per_run`.
    """

    names_classes = False
    section = "text_embedding"
    defaults = {"pooling": "mean", "normalize": True, **SETTINGS}  # noqa: RUF012
    choice = ("pooling", ("mean", "first"))
    output = "embedding"

    def result_of(self, output: Any, mask: torch.Tensor) -> torch.Tensor:
        """Pool and normalize the output; raise RuntimeError if its shape is not that of embeddings."""
        found = flattened(output)[0].float()
        if found.dim() == 3:
            found = self._pooled(found, mask.to(found.device))
        found = found.cpu()
        if found.dim() != 2 or len(found) != len(mask):
            raise RuntimeError(
                f"the model gave {tuple(found.shape)} for {len(mask)} texts; expected [texts, tokens, size] "
                "or [texts, size]"
            )
        # A text may have no tokens, for which a model that pools by itself may give NaN.
        is_empty = mask.sum(1, keepdim=True) == 0
        found = found.masked_fill(is_empty & found.isnan(), 0)
        return torch.nn.functional.normalize(found, dim=1) if self.settings["normalize"] else found

    def _pooled(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.settings["pooling"] == "first":
            states, mask = states[:, :1], mask[:, :1]
        kept = mask[:, :, None]
        # A text may have no tokens, for which the model may give NaN, and NaN times 0 is NaN.
        return states.masked_fill(kept == 0, 0).sum(1) / kept.sum(1).clamp(min=1)

    def answer_of(self, result: torch.Tensor) -> list[float]:
        """Return the numbers."""
        numbers: list[float] = result.tolist()
        return numbers

    def _texts(self, place: int, row: Any) -> Texts:
        if not self._is_openai(place):
            return super()._texts(place, row)
        body = json_body(row)
        return super()._texts(place, {"text": _openai_input(body)})._replace(openai=body)

    def _is_openai(self, place: int) -> bool:
        index = request_of(self.context, place)
        if index is None or self.context.request_processor is None:
            return False
        return bool(self.context.get_request_header(index, "url_path") == _OPENAI_PATH)

    def _answer(self, place: int, texts: Texts, results: torch.Tensor) -> Any:
        if texts.openai is None:
            return super()._answer(place, texts, results)
        wanted, size = texts.openai.get("dimensions"), results.shape[1]
        if wanted not in (None, size):
            raise bad_request(
                f"The request has the dimensions {shown(wanted)}; expected {size}, as the model has"
            )
        in_base64 = texts.openai.get("encoding_format") == "base64"
        given = _in_base64 if in_base64 else self.answer_of
        count = sum(len(text.ids) for text in texts.tokens)
        self.context.set_response_content_type(request_of(self.context, place), "application/json")
        return compact_json(
            {
                "object": "list",
                "data": [
                    {"object": "embedding", "index": index, "embedding": given(result)}
                    for index, result in enumerate(results)
                ],
                "model": self.context.model_name,
                "usage": {"prompt_tokens": count, "total_tokens": count},
            }
        )


def _openai_input(body: dict[str, Any]) -> Any:
    """Return the text or texts of a request in OpenAI's form; raise PredictionException for a wrong one."""
    if "input" not in body:
        found = fields_of(body) if body else "an empty object"
        raise bad_request(f"The request has no 'input': found {found}; expected a text or a list of texts")
    items = body["input"] if isinstance(body["input"], list) else [body["input"]]
    if not items or not all(isinstance(item, str) and item for item in items):
        raise bad_request(
            "The request has an 'input' that is empty or no text; expected a text or a list of texts, "
            "none of them empty: this model splits texts into tokens by itself, and takes no token ids"
        )
    encoding = body.get("encoding_format")
    if encoding not in (None, "float", "base64"):
        raise bad_request(f"The request has the encoding_format {shown(encoding)}; expected float or base64")
    return body["input"]


def _in_base64(result: torch.Tensor) -> str:
    return base64.b64encode(result.numpy().astype("<f4").tobytes()).decode()
