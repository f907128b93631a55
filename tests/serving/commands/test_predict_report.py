import pytest

from torchere.client import Tensor
from torchere.serving.commands.predict import body_text, tensors_text


def test_scores_are_a_table() -> None:
    assert body_text(b'{"tabby": 0.5, "Egyptian cat": 0.25}', "") == "tabby         0.5\nEgyptian cat  0.25"


def test_other_json_is_indented() -> None:
    assert (
        body_text(b'{"a": [1, true], "b": "\xc3\xa9"}', "")
        == '{\n  "a": [\n    1,\n    true\n  ],\n  "b": "é"\n}'
    )
    assert body_text(b"[]", "") == "[]"


def test_text_is_printed_as_it_is() -> None:
    assert body_text(b"a cat", "text/plain") == "a cat"


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a": 1%s}' % (b"0" * 400), b'{"a": 1'])
def test_json_that_cannot_be_laid_out_is_printed_as_it_is(body: bytes) -> None:
    assert body_text(body, "application/json") == body.decode()


def test_of_other_bytes_the_size_is_told() -> None:
    assert body_text(b"\x89PNG", "image/png") == "4 bytes of image/png"
    assert body_text(b"\xff", "") == "1 bytes of unknown type"


def test_tensors_have_a_line_each_and_their_values() -> None:
    numbers = Tensor("y", "INT32", (1, 2), b"\1\0\0\0\2\0\0\0")
    words = Tensor("z", "BYTES", (1,), b"\2\0\0\0hi")
    assert tensors_text([numbers, words]) == "y  INT32 [1, 2]\n[[1 2]]\n\nz  BYTES [1]\n['hi']"
    assert tensors_text([]) == "no outputs"
