"""Handlers that return or raise nonsense: each request has one outcome, and the handler serves the next.

`docs/bad-inputs.md` names these tests.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from torchere.handlers.loading.weights import SharedModels
from torchere.serving.errors import HandlerFailed, LoadFailed, ServingError
from torchere.serving.types import InferRequest, InferResponse, Parameter
from torchere.serving.workers.executor import LoadSpec
from torchere.serving.workers.host import HandlerHost
from torchere.serving.workers.rank import drop_part

TEMPLATE = """
class Handler:
    def initialize(self, context):
        self.is_first = True

    def handle(self, data, context):
        if not self.is_first:
            return ["fine"] * len(data)
        self.is_first = False
        {body}
"""
FAILS = {
    "nothing": "return None",
    "too few": "return ['a']",
    "too many": "return ['a'] * 3",
    "no list": "return 5",
    "a text": "return 'ab'",
    "a dict": "return {'a': 1, 'b': 2}",
    "a set": "return [{1, 2}, {3}]",
    "a generator": "return (text for text in ('a', 'b'))",
    "an object": "return [object(), object()]",
    "functions": "return [print, print]",
    "lists that contain themselves": "x = []; x.append(x); return [x, x]",
    "deep lists": "x = []\n        for _ in range(5000): x = [x]\n        return [x, x]",
    "half a surrogate": "return [chr(0xd800), chr(0xd800)]",
    "keys that are no texts": "return [{(1, 2): 3}, {b'x': 3}]",
    "more than an answer may have": "return [b'x' * 2**24, b'y' * 2**24]",
    "an error without a text": "raise type('Own', (Exception,), {'__str__': 5, '__repr__': 5})",
    "an exit": "raise SystemExit(3)",
    "an interrupt": "raise KeyboardInterrupt",
    "an error of its own base": "raise type('Own', (BaseException,), {})",
    "an endless recursion": "f = lambda g: g(g)\n        return f(f)",
    "an error of a million characters": "raise ValueError('x' * 10**6)",
    "a chain of errors": "try: 1 / 0\n        except ZeroDivisionError as e: raise ValueError from e",
    "no memory": "raise MemoryError",
    "a generator's end": "raise StopIteration",
}
ANSWERS = {
    "the same object twice": ("x = {'a': [1]}; return [x, x]", b'{\n  "a": [\n    1\n  ]\n}'),
    "its input": ("return [bytes(row['body']) for row in data]", b"in"),
    "numbers that JSON lacks": ("return [float('nan')] * 2", b"NaN"),
    "bytes that are no text": ("return [b'\\xff'] * 2", b"\xff"),
    "empty texts": ("return [''] * 2", b""),
    "None in a list": ("return [None, None]", b"null"),
}


@pytest.fixture
def served(make_spec: Callable[..., LoadSpec]) -> Callable[[str], tuple[list[Any], list[Any]]]:
    """Runs a batch of two with the given body, and then one that has to be answered."""

    def run(body: str) -> tuple[list[Any], list[Any]]:
        host = HandlerHost(make_spec(TEMPLATE.replace("{body}", textwrap.dedent(body))), None, SharedModels())
        host.load()
        requests = [InferRequest(name, (Parameter("body", b"in"),)) for name in "ab"]
        return list(host.run(requests, drop_part).outcomes), list(host.run(requests, drop_part).outcomes)

    return run


@pytest.mark.parametrize("body", FAILS.values(), ids=FAILS)
def test_what_is_no_answer_fails_its_requests_and_the_next_ones_are_answered(served: Any, body: str) -> None:
    failed, answered = served(body)
    assert len(failed) == 2
    assert all(isinstance(one, ServingError) for one in failed)
    assert all(len(one.message) + len(one.detail) < 2 * 2**20 for one in failed)
    assert [bytes(one.body) for one in answered] == [b"fine", b"fine"]


@pytest.mark.parametrize(("body", "text"), ANSWERS.values(), ids=ANSWERS)
def test_odd_answers_are_sent(served: Any, body: str, text: bytes) -> None:
    given, answered = served(body)
    assert [bytes(one.body) for one in given] == [text, text]
    assert all(isinstance(one, InferResponse) for one in answered)


NO_TIMES = (0.0, 0.0, 0.0)
TIMES = {
    "(0.1, 0.2)": NO_TIMES,
    "None": NO_TIMES,
    "'abc'": NO_TIMES,
    "[object()] * 3": NO_TIMES,
    "torch.ones(3, 3)": NO_TIMES,
    "torch.arange(3)": (0.0, 1.0, 2.0),
}


@pytest.mark.parametrize(("stages", "sent"), TIMES.items())
def test_times_of_stages_are_three_plain_numbers(
    make_spec: Callable[..., LoadSpec], stages: str, sent: tuple[float, float, float]
) -> None:
    body = f"import torch; context.stages_s = {stages}\n        return ['set'] * len(data)"
    host = HandlerHost(make_spec(TEMPLATE.replace("{body}", body)), None, SharedModels())
    host.load()
    report = host.run([InferRequest("a", (Parameter("body", b"in"),))], drop_part)
    assert report.stages_s == sent
    assert isinstance(report.outcomes[0], InferResponse)


@pytest.mark.parametrize("part", ["'a text'", "None", "[b'x']", "5"])
def test_a_part_that_is_not_bytes_is_an_exception_in_its_handler(
    make_spec: Callable[..., LoadSpec], part: str
) -> None:
    body = f"context.send_partial(0, {part})\n        return ['end']"
    host = HandlerHost(make_spec(TEMPLATE.replace("{body}", body)), None, SharedModels())
    host.load()
    parts: list[InferResponse] = []
    requests = [InferRequest("a", (Parameter("body", b"in"),))]
    (failed,) = host.run(requests, lambda index, part: parts.append(part)).outcomes
    assert isinstance(failed, HandlerFailed)
    assert failed.detail.startswith("TypeError: a part of the answer is of type")
    (answered,) = host.run(requests, lambda index, part: parts.append(part)).outcomes
    assert isinstance(answered, InferResponse)
    assert not parts


STAGES = {
    "the import": "raise {error}\nclass Handler:\n    initialize = handle = print",
    "the constructor": "class Handler:\n    handle = initialize = id\n    def __init__(self): raise {error}",
    "initialize": "class Handler:\n    handle = print\n    def initialize(self, context): raise {error}",
}


@pytest.mark.parametrize("error", ["ValueError('x')", "SystemExit(3)", "KeyboardInterrupt", "MemoryError"])
@pytest.mark.parametrize("source", STAGES.values(), ids=STAGES)
def test_what_a_handler_raises_while_it_loads_is_a_failed_load(
    make_spec: Callable[..., LoadSpec], source: str, error: str
) -> None:
    with pytest.raises(LoadFailed) as caught:
        HandlerHost(make_spec(source.replace("{error}", error)), None, SharedModels()).load()
    assert error.partition("(")[0] in caught.value.detail
