"""Streams the texts of a batch during generation, for `generate(streamer=...)` of `transformers`.

`generate` runs in a thread and puts tokens in; the handler takes texts out and sends them. This module does
not need `transformers`: a tokenizer is any object with `decode(token_ids, **options)`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

_UNFINISHED = "�"  # decoders give it for a character whose last bytes have not arrived
# Scripts without blanks between words: Hiragana to Hangul, CJK ideographs, their compatibility forms.
_WITHOUT_BLANKS = ((0x3040, 0x30FF), (0x3400, 0x9FFF), (0xAC00, 0xD7A3), (0xF900, 0xFAFF), (0x20000, 0x323AF))


class Tokenizer(Protocol):
    """The interface of a tokenizer."""

    def decode(self, token_ids: Any, **options: Any) -> str:
        """Return the text of these tokens."""


class TextIteratorStreamerBatch:
    """Takes tokens from `generate` and yields lists of new texts, `{"text": ...}` for each row.

    A text ends at the end of a word, so that no character or word is cut; it may be "". One streamer can
    serve several batches in turn: `end` ends the iteration, and the next `put` begins a new batch. One thread
    calls `put` and `end` for a batch, one thread iterates. An iteration that begins before the previous one
    has ended gives up the batch of that one, whose next `put` raises, so that its generation ends. If
    `generate` raises, the iterating thread is not notified: set `timeout`, or call `end` in a `finally` of
    the generating thread.

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
        decode_kwargs: passed to `tokenizer.decode`.
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
        self._tokenizer = tokenizer
        self._options = decode_kwargs
        self._skip_prompt = skip_prompt
        self._generating = threading.local()  # its `batch` takes the tokens of this thread
        self._begun: queue.Queue[_Batch] = queue.Queue()  # batches that are not read yet
        self._reading: _Batch | None = None
        self._is_iterated = False  # an iteration has begun, and has not reached the end of its batch

    def put(self, value: Any) -> None:
        """Take the next tokens: a tensor `[batch]`, or `[batch, tokens]` as for the prompt.

        Raises:
            ValueError: the number of rows is not `batch_size`.
            RuntimeError: the iteration of this batch was given up, and another one has begun.
        """
        rows = value.tolist()
        if not isinstance(rows, list) or len(rows) != self.batch_size:
            raise ValueError(f"tokens of shape {tuple(value.shape)} for a batch of {self.batch_size}")
        batch = self._batch_of_thread()
        if batch is None or batch.is_over:
            batch = self._begin()
        if batch.is_given_up:
            batch.is_over = True  # the thread may serve another batch later
            raise RuntimeError("the iteration of this batch was given up: no further tokens are taken")
        if batch.skips_next:
            batch.skips_next = False
            return
        tokens = [row if isinstance(row, list) else [row] for row in rows]
        batch.texts.put([{"text": row.feed(new)} for row, new in zip(batch.rows, tokens, strict=True)])

    def end(self) -> None:
        """End the batch: emit the text that was held back, and end the iteration."""
        batch = self._batch_of_thread()
        if batch is not None and batch.is_over:
            # A `finally` calls `end` again after `generate`: an empty batch would be read as the next one.
            self._generating.batch = None
            return
        batch = batch or self._begin()
        batch.is_over = True
        batch.texts.put([{"text": row.rest()} for row in batch.rows])
        batch.texts.put(None)

    def _batch_of_thread(self) -> _Batch | None:
        return getattr(self._generating, "batch", None)

    def _begin(self) -> _Batch:
        rows = [_Row(self._tokenizer, self._options) for _ in range(self.batch_size)]
        batch = self._generating.batch = _Batch(rows, self._skip_prompt)
        self._begun.put(batch)
        return batch

    def __iter__(self) -> Iterator[list[dict[str, str]]]:
        """Begin an iteration, and give up the batch of an earlier iteration that did not reach its end.

        If the iterating thread has itself called `put` for that batch, it continues with the batch instead.
        """
        batch = self._reading
        if batch is not None and self._is_iterated and batch is not self._batch_of_thread():
            batch.is_given_up = True
            self._reading = None
        self._is_iterated = True
        return iter(self.__next__, None)  # not `self`, whose `__iter__` a `for` loop would call again

    def __next__(self) -> list[dict[str, str]]:
        """Return the next text of each row.

        Raises:
            queue.Empty: no text arrived for `timeout` seconds.
        """
        timeout = self.timeout
        if self._reading is None:
            started = time.monotonic()
            self._reading = self._begun.get(timeout=timeout)
            if timeout is not None:
                timeout = max(0.0, timeout - (time.monotonic() - started))
        texts = self._reading.texts.get(timeout=timeout)
        if texts is None:
            self._reading = None
            self._is_iterated = False
            raise StopIteration
        return texts


class _Batch:
    """One batch: its rows, and the texts that have not been read.

    Each batch has a queue of its own, so that the tokens of a batch that was given up reach no other answer.
    """

    def __init__(self, rows: list[_Row], skips_next: bool) -> None:
        self.rows = rows
        self.skips_next = skips_next
        self.texts: queue.Queue[list[dict[str, str]] | None] = queue.Queue()  # None: the end
        self.is_over = False  # whether it takes no more tokens
        self.is_given_up = False


class _Row:
    """One row of the batch: the tokens of the current line, and the length of text already emitted.

    The tokens begin with the last ones of the line before, because decoders of SentencePiece's tokens drop a
    blank at the beginning, which would otherwise be part of the indentation.
    """

    def __init__(self, tokenizer: Tokenizer, options: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._tokens: list[int] = []
        self._sent = 0

    def feed(self, tokens: Iterable[int]) -> str:
        """Add tokens and return the text that they complete."""
        before = len(self._tokens)
        self._tokens += tokens
        text = self._decode(self._tokens)
        if text.endswith("\n"):  # drop the tokens of a finished line: decoding only one line stays cheap
            new = text[self._sent :]
            if new:
                self._tokens, self._sent = self._end_of_line()
            else:  # special tokens, with which `generate` fills the rows that are over
                del self._tokens[before:]
            return new
        end = _end_of_last_word(text)
        new = text[self._sent : end]
        self._sent = max(self._sent, end)
        return new

    def rest(self) -> str:
        """Return the text that was held back."""
        return self._decode(self._tokens)[self._sent :] if self._tokens else ""

    def _end_of_line(self) -> tuple[list[int], int]:
        """Return the fewest last tokens that have text, as special tokens may not, and that text's length."""
        for start in range(len(self._tokens) - 1, 0, -1):
            if text := self._decode(self._tokens[start:]):
                return self._tokens[start:], len(text)
        return self._tokens, len(self._decode(self._tokens))

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, **self._options)


def _end_of_last_word(text: str) -> int:
    """Return the length of the text that further tokens can't change."""
    if text and any(low <= ord(text[-1]) <= high for low, high in _WITHOUT_BLANKS):
        return len(text)
    return text.rstrip(_UNFINISHED).rfind(" ") + 1
