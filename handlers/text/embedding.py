"""Text embeddings: vectors that are close if the texts have similar meanings."""

from __future__ import annotations

from typing import Any

import torch

from torchere.handlers.tensors.request import flattened
from torchere.handlers.text.tokens import SETTINGS, TransformerHandler

POOLINGS = ("mean", "first")


class TextEmbedding(TransformerHandler):
    """Answers a text with its embedding, a list of numbers; a list of texts with a list of embeddings.

    The model's inputs are those of `TransformerHandler`. Its first result is [texts, tokens, size], which is
    pooled over the tokens (by default the mean) and normalized to length one, or [texts, size], which is only
    normalized.

    Requests: plain text as the body or as the field `text`, or JSON: `{"text": "..."}`, `{"text": [...]}`.
    The Open Inference Protocol: input `text` (BYTES [texts]), output `embedding` (FP32 [texts, size]).

    `handler.text_embedding` in model-config.yaml: `pooling` (mean, first), `normalize`, `max_tokens` of a
    text (the rest is cut off), `max_texts` of a request, `max_characters` of a text, `texts_per_run`.
    """

    names_classes = False
    section = "text_embedding"
    defaults = {"pooling": "mean", "normalize": True, **SETTINGS}  # noqa: RUF012
    output = "embedding"

    def checked(self, settings: dict[str, Any]) -> dict[str, Any]:
        """See the base class."""
        if settings["pooling"] not in POOLINGS:
            raise self.wrong("pooling", f"one of {', '.join(POOLINGS)}", settings)
        return super().checked(settings)

    def result_of(self, output: Any, mask: torch.Tensor) -> torch.Tensor:
        """Pool and normalize; raises RuntimeError for a shape that is no embedding's."""
        found = flattened(output)[0].float()
        if found.dim() == 3:
            found = self._pooled(found, mask.to(found.device))
        found = found.cpu()
        if found.dim() != 2 or len(found) != len(mask):
            raise RuntimeError(
                f"the model gave {tuple(found.shape)} for {len(mask)} texts; expected [texts, tokens, size] "
                "or [texts, size]"
            )
        return torch.nn.functional.normalize(found, dim=1) if self.settings["normalize"] else found

    def _pooled(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.settings["pooling"] == "first":
            return states[:, 0]
        kept = mask[:, :, None].float()
        return (states * kept).sum(1) / kept.sum(1).clamp(min=1)  # a text may have no tokens

    def answer_of(self, result: torch.Tensor) -> list[float]:
        """Return the numbers."""
        numbers: list[float] = result.tolist()
        return numbers
