"""The built-in handler for text classification."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torchere.handlers.errors import PredictionException
from torchere.handlers.labels import map_class_to_label
from torchere.handlers.rows import sole_element, value_of
from torchere.handlers.text import TextHandler, ngrams
from torchere.handlers.timer import timed


class TextClassifier(TextHandler):
    """Answers a text with the probability of every class, `{name: probability}`, in class order.

    The model takes (token indices [n], offsets [1]), like `torch.nn.EmbeddingBag`, and returns scores
    [1, classes] before softmax. Only the first request of a batch is read, so the model needs batchSize 1.
    """

    ngrams = 2

    @timed
    def preprocess(self, data: Any) -> Any:
        """Clean the text up and look its words and word pairs up in the vocabulary.

        Returns:
            Their indices [n], int64 on the handler's device, and the words.

        Raises:
            PredictionException: 400, the request has no text, or it is not UTF-8.
            KeyError: a word is unknown, and the vocabulary has no `<unk>`.
        """
        text = _text_of(data[0])
        text = self._expand_contractions(self._remove_html_tags(text).lower())
        text = self._remove_punctuation(self._remove_accented_characters(text))
        words = self._tokenize(text)
        indices = [self.source_vocab[token] for token in ngrams(words, self.ngrams)]
        return torch.as_tensor(indices, dtype=torch.int64, device=self.device), words

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the model on all tokens as one text."""
        indices, _ = data
        with torch.inference_mode():
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
            raise PredictionException(f"The request body is not UTF-8 text: {err}", 400) from err
    if not isinstance(value, str):
        raise PredictionException(
            f"The request has no text: found a {type(value).__name__}; expected text under 'data' or 'body', "
            "or a tensor of BYTES (curl -H 'Content-Type: text/plain' --data-binary @story.txt URL)",
            400,
        )
    return value
