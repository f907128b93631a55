"""The text of a batch while a language model generates it, for `transformers`' `generate(streamer=...)`.

`generate` runs in a thread and puts tokens in; the handler takes texts out and sends them on. Nothing here
needs `transformers`: a tokenizer is whatever has `decode(token_ids, **options)`.
"""

from __future__ import annotations

import queue
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

_UNFINISHED = "�"  # what decoders write for a character whose last bytes are still to come
# Written without blanks between words: Hiragana to Hangul, CJK ideographs, their compatibility forms.
_WITHOUT_BLANKS = ((0x3040, 0x30FF), (0x3400, 0x9FFF), (0xAC00, 0xD7A3), (0xF900, 0xFAFF), (0x20000, 0x323AF))


class Tokenizer(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, token_ids: Any, **options: Any) -> str:
        """The text of these tokens."""


class TextIteratorStreamerBatch:
    """Takes tokens from `generate`, and gives lists of new texts, `{"text": ...}` for each row of the batch.

    A text ends at the end of a word, so that no character or word is cut; it may be "". One may serve one
    batch after the other: `end` ends the loop over it, and the next `put` begins anew. One thread puts, one
    thread iterates. When `generate` raises, nobody tells the reader: set `timeout`, or call `end` from the
    thread's `finally`.

    Example:
        streamer = TextIteratorStreamerBatch(self.tokenizer, batch_size=len(data), skip_special_tokens=True)
        options = {**inputs, "streamer": streamer, "max_new_tokens": 100}
        thread = Thread(target=self.model.generate, kwargs=options)
        thread.start()
        for texts in streamer:
            send_intermediate_predict_response(texts, context.request_ids, "", 200, context)
        thread.join()
        return [""] * len(data)

    Args:
        tokenizer: decodes one row at a time.
        batch_size: rows of every `put`.
        skip_prompt: leave out the first `put`, with which `generate` begins.
        timeout: seconds to wait for the next texts; None waits for ever.
        decode_kwargs: go to `tokenizer.decode`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        batch_size: int,
        skip_prompt: bool = False,
        timeout: float | None = None,
        **decode_kwargs: Any,
    ) -> None:
        self.batch_size = batch_size
        self.timeout = timeout
        self._rows = [_Row(tokenizer, decode_kwargs) for _ in range(batch_size)]
        self._skip_prompt = self._skips_next = skip_prompt
        self._texts: queue.Queue[list[dict[str, str]] | None] = queue.Queue()  # None: the end

    def put(self, value: Any) -> None:
        """Take the next tokens: a tensor `[batch]`, or `[batch, tokens]` as for the prompt.

        Raises:
            ValueError: it has another number of rows.
        """
        rows = value.tolist()
        if not isinstance(rows, list) or len(rows) != self.batch_size:
            raise ValueError(f"tokens of shape {tuple(value.shape)} for a batch of {self.batch_size}")
        if self._skips_next:
            self._skips_next = False
            return
        tokens = [row if isinstance(row, list) else [row] for row in rows]
        self._texts.put([{"text": row.feed(new)} for row, new in zip(self._rows, tokens, strict=True)])

    def end(self) -> None:
        """There are no more tokens of this batch; what was held back goes out."""
        self._skips_next = self._skip_prompt
        self._texts.put([{"text": row.rest()} for row in self._rows])
        self._texts.put(None)

    def __iter__(self) -> Iterator[list[dict[str, str]]]:
        return self

    def __next__(self) -> list[dict[str, str]]:
        """The next text of each row.

        Raises:
            queue.Empty: there was none for `timeout` seconds.
        """
        texts = self._texts.get(timeout=self.timeout)
        if texts is None:
            raise StopIteration
        return texts


class _Row:
    """One row: the tokens of the present line, and how much of their text went out."""

    def __init__(self, tokenizer: Tokenizer, options: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._tokens: list[int] = []
        self._sent = 0

    def feed(self, tokens: Iterable[int]) -> str:
        """The text that these tokens complete."""
        self._tokens += tokens
        text = self._tokenizer.decode(self._tokens, **self._options)
        if text.endswith("\n"):  # a new line begins afresh, so that decoding stays cheap
            return self._flush(text)
        end = _end_of_last_word(text)
        new = text[self._sent : end]
        self._sent = max(self._sent, end)
        return new

    def rest(self) -> str:
        """The text that was held back."""
        return self._flush(self._tokenizer.decode(self._tokens, **self._options)) if self._tokens else ""

    def _flush(self, text: str) -> str:
        new = text[self._sent :]
        self._tokens, self._sent = [], 0
        return new


def _end_of_last_word(text: str) -> int:
    """How much of the text can't change any more by further tokens."""
    if text and any(low <= ord(text[-1]) <= high for low, high in _WITHOUT_BLANKS):
        return len(text)
    return text.rstrip(_UNFINISHED).rfind(" ") + 1
