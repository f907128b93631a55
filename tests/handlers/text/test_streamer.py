"""Texts of a batch, as tokens come."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from torchere.handlers.text.streamer import TextIteratorStreamerBatch


class ByteTokenizer:
    """A token is a byte of UTF-8, 0 a special token. `calls` keeps how many tokens were decoded at a time."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def decode(self, token_ids: Any, **options: Any) -> str:
        self.calls.append(len(token_ids))
        kept = [token for token in token_ids if token or not options.get("skip_special_tokens")]
        return bytes(kept).decode("utf-8", "replace")


def columns(*rows: str) -> list[torch.Tensor]:
    """The tokens of each step; short rows are filled with the special token, as `generate` does."""
    encoded = [row.encode() for row in rows]
    length = max(map(len, encoded))
    return list(torch.tensor([list(row.ljust(length, b"\0")) for row in encoded]).T)


def generate(streamer: TextIteratorStreamerBatch, text: str) -> None:
    for column in columns(text):
        streamer.put(column)
    streamer.end()


def streamed(*rows: str, **options: Any) -> list[list[str]]:
    streamer = TextIteratorStreamerBatch(ByteTokenizer(), len(rows), skip_special_tokens=True, **options)
    for column in columns(*rows):
        streamer.put(column)
    streamer.end()
    return texts_of(streamer)


def texts_of(streamer: TextIteratorStreamerBatch) -> list[list[str]]:
    """What comes until the end, each text taken out of its `{"text": ...}`."""
    parts = list(streamer)
    assert all(set(row) == {"text"} for part in parts for row in part)
    return [[row["text"] for row in part] for part in parts]


def test_each_row_gets_its_own_text_whole() -> None:
    parts = streamed("one two three", "a bc", "x")
    assert ["".join(row) for row in zip(*parts, strict=True)] == ["one two three", "a bc", "x"]


def test_words_are_not_cut() -> None:
    texts = [part for (part,) in streamed("one two three") if part]
    assert texts == ["one ", "two ", "three"]


def test_characters_of_several_bytes_are_not_cut() -> None:
    texts = [part for (part,) in streamed("é ü 漢字 end")]
    assert "".join(texts) == "é ü 漢字 end"
    assert not any("�" in text for text in texts)
    assert "漢" in texts


def test_a_line_that_ends_goes_out_and_is_not_decoded_again() -> None:
    tokenizer = ByteTokenizer()
    streamer = TextIteratorStreamerBatch(tokenizer, 1)
    for column in columns("first line\nx"):
        streamer.put(column)
    streamer.end()
    assert "".join(part for (part,) in texts_of(streamer)) == "first line\nx"
    assert tokenizer.calls[-1] == 2  # "\n" and "x"


def test_a_row_that_is_over_costs_no_more_with_each_token_of_the_others() -> None:
    tokenizer = ByteTokenizer()
    streamer = TextIteratorStreamerBatch(tokenizer, 1, skip_special_tokens=True)
    for column in columns("line\n" + 50 * "\0"):
        streamer.put(column)
    assert max(tokenizer.calls[-50:]) == 2


class BlankDroppingTokenizer(ByteTokenizer):
    """As the decoders of SentencePiece's tokens: a blank at the beginning of the text is dropped."""

    def decode(self, token_ids: Any, **options: Any) -> str:
        return super().decode(token_ids, **options).removeprefix(" ")


@pytest.mark.parametrize("between", ["", "\0", "\n", "\0\0"])  # 0 is a special token
def test_a_line_keeps_the_blanks_that_it_begins_with(between: str) -> None:
    tokenizer = BlankDroppingTokenizer()
    streamer = TextIteratorStreamerBatch(tokenizer, 1, skip_special_tokens=True)
    text = f" if x:\n{between}    return\n{between} y"
    for column in columns(text):
        streamer.put(column)
    streamer.end()
    parts = [part for (part,) in texts_of(streamer)]
    assert "".join(parts) == tokenizer.decode(text.encode(), skip_special_tokens=True)


def test_the_prompt_is_put_first_and_may_be_left_out() -> None:
    prompt = torch.tensor([list(b"Hi a "), list(b"Hi b ")])
    for skip, expected in ((True, ["yes", "no"]), (False, ["Hi a yes", "Hi b no"])):
        streamer = TextIteratorStreamerBatch(ByteTokenizer(), 2, skip_prompt=skip, skip_special_tokens=True)
        for _ in ("a batch", "the next one"):
            streamer.put(prompt)
            for column in columns("yes", "no"):
                streamer.put(column)
            streamer.end()
            assert ["".join(row) for row in zip(*texts_of(streamer), strict=True)] == expected


@pytest.mark.parametrize("tokens", [torch.tensor([1, 2, 3]), torch.tensor([[1, 2]]), torch.tensor(1)])
def test_tokens_of_another_batch_are_refused(tokens: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="for a batch of 2"):
        TextIteratorStreamerBatch(ByteTokenizer(), 2).put(tokens)


def test_a_reader_waits_no_longer_than_it_said() -> None:
    with pytest.raises(queue.Empty):
        next(TextIteratorStreamerBatch(ByteTokenizer(), 1, timeout=0.01))


def test_one_thread_may_read_while_another_one_writes() -> None:
    streamer = TextIteratorStreamerBatch(ByteTokenizer(), 1, timeout=20)
    writer = threading.Thread(target=generate, args=(streamer, "a b c"))
    writer.start()
    assert "".join(part for (part,) in texts_of(streamer)) == "a b c"
    writer.join()


def in_a_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=30)


def joined(texts: Iterable[list[dict[str, str]]]) -> str:
    return "".join(part["text"] for (part,) in texts)


def test_a_batch_that_is_left_reaches_no_other_one_and_its_generation_ends() -> None:
    streamer = TextIteratorStreamerBatch(ByteTokenizer(), 1, timeout=20)
    next_is_begun, refused = threading.Event(), threading.Event()

    def generate_left() -> None:
        streamer.put(torch.tensor([list(b"secret one")]))
        next_is_begun.wait(30)
        try:
            with pytest.raises(RuntimeError, match="given up"):
                streamer.put(torch.tensor([list(b" two")]))
            refused.set()
        finally:
            streamer.end()  # a second `end`, or one after a refusal, must not end another iteration

    left = threading.Thread(target=generate_left)
    left.start()
    for texts in streamer:
        assert texts == [{"text": "secret "}]
        break
    own = iter(streamer)
    next_is_begun.set()
    left.join(timeout=30)
    assert refused.is_set()
    for text in ("of the next", "of the last"):
        in_a_thread(lambda text=text: generate(streamer, text))  # type: ignore[misc]
        assert joined(own) == text
        own = iter(streamer)


def test_an_end_after_the_end_is_no_batch_but_one_without_tokens_is() -> None:
    streamer = TextIteratorStreamerBatch(ByteTokenizer(), 1, timeout=20)

    def generate_and_end() -> None:
        generate(streamer, "a b")
        streamer.end()

    in_a_thread(generate_and_end)
    assert joined(streamer) == "a b"
    in_a_thread(streamer.end)
    assert joined(streamer) == ""
    in_a_thread(lambda: generate(streamer, "c d"))
    assert joined(streamer) == "c d"


def test_a_loop_goes_on_after_texts_that_were_taken_singly() -> None:
    streamer = TextIteratorStreamerBatch(ByteTokenizer(), 1, timeout=20)
    for begin in (iter, lambda whole: whole):
        in_a_thread(lambda: generate(streamer, "a b c"))
        texts = begin(streamer)
        assert joined([next(texts), next(texts)]) + joined(texts) == "a b c"


def test_a_thread_that_puts_and_iterates_goes_on_with_its_batch() -> None:
    streamer = TextIteratorStreamerBatch(ByteTokenizer(), 1, timeout=0.01)
    read: list[list[dict[str, str]]] = []
    for column in columns("a b"):
        streamer.put(column)
        with pytest.raises(queue.Empty):
            for texts in streamer:
                read.append(texts)  # `extend` would lose the texts before the error
    streamer.end()
    assert joined([*read, *streamer]) == "a b"


def test_a_thread_may_serve_another_batch_after_one_that_was_left() -> None:
    streamer = TextIteratorStreamerBatch(ByteTokenizer(), 1, timeout=20)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(streamer.put, torch.tensor([list(b"left one")])).result(30)
        next(iter(streamer))
        texts = iter(streamer)
        with pytest.raises(RuntimeError, match="given up"):
            pool.submit(streamer.put, torch.tensor([list(b" two")])).result(30)
        pool.submit(generate, streamer, "a b").result(30)
        assert joined(texts) == "a b"
