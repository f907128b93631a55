"""Tokenizers of `ts.handler_utils.text_utils`, whose behaviour is torchtext's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

Tokenizer = Callable[[str], list[str]]

_STEPS = (
    (re.compile(r"'"), " '  "),
    (re.compile(r'"'), ""),
    (re.compile(r"\."), " . "),
    (re.compile(r"<br \/>"), " "),
    (re.compile(r","), " , "),
    (re.compile(r"\("), " ( "),
    (re.compile(r"\)"), " ) "),
    (re.compile(r"!"), " ! "),
    (re.compile(r"\?"), " ? "),
    (re.compile(r";"), " "),
    (re.compile(r":"), " "),
    (re.compile(r"\s+"), " "),
)


def ngrams_iterator(token_list: Sequence[str], ngrams: int) -> Iterator[str]:
    """Yield the tokens, then their n-grams of two up to `ngrams` tokens, joined by blanks.

    >>> list(ngrams_iterator(["here", "we", "are"], 2))
    ['here', 'we', 'are', 'here we', 'we are']
    """
    yield from token_list
    for size in range(2, ngrams + 1):
        for start in range(len(token_list) - size + 1):
            yield " ".join(token_list[start : start + size])


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
    return _basic_english


def _basic_english(line: str) -> list[str]:
    line = line.lower()
    for pattern, replacement in _STEPS:
        line = pattern.sub(replacement, line)
    return line.split()
