from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from torchere.handlers.errors import PredictionException
from torchere.handlers.rows import fields_of, read_each, rows_of, sole_element, value_of

NUMBERS = np.zeros(3)


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"data": b"d", "body": b"b"}, b"d"),
        ({"data": b"", "body": b"b"}, b"b"),
        ({"body": b""}, b""),
        ({"data": b""}, b""),
        ({"data": b"", "x": b"1"}, b""),
        ({"data": NUMBERS, "body": b"b"}, NUMBERS),
        ({"image": NUMBERS}, NUMBERS),
        ({"image": NUMBERS, "other": NUMBERS}, None),
        ({"image": b"x"}, None),
        ({}, None),
        (b"from an envelope", b"from an envelope"),
    ],
)
def test_the_value_is_data_or_body_or_the_only_tensor(row: Any, found: Any) -> None:
    assert value_of(row) is found or value_of(row) == found


def test_a_tensor_of_torch_counts_as_one() -> None:
    tensor = torch.zeros(2, dtype=torch.bfloat16)
    assert value_of({"x": tensor}) is tensor
    assert value_of({"data": tensor, "body": b""}) is tensor


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({}, "the fields none"),
        ({"a": 1, "b": b"x"}, "the fields 'a', 'b'"),
        ({"\xff" * 1000: b""}, "the fields '" + "\\xff" * 80 + "'"),
        (dict.fromkeys(map(str, range(1000))), "the fields " + ", ".join(f"'{n}'" for n in range(20))),
    ],
)
def test_fields_are_named_in_short(row: dict[str, Any], found: str) -> None:
    assert fields_of(row) == found


@pytest.mark.parametrize("text", ['{"data": [1, 2]}', " [[1, 2]]", '{"text": "a'])
def test_json_that_was_sent_as_a_form_is_told_what_to_say_of_itself(text: str) -> None:
    found = fields_of({text: b""})
    assert found.startswith(
        f"the fields {text!r} of a form: JSON that came as application/x-www-form-urlencoded"
    )
    assert found.endswith("send it with -H 'Content-Type: application/json'")


def test_a_text_that_was_sent_as_a_form_is_told_what_to_say_of_itself() -> None:
    found = fields_of({"I like it": b""}, takes_text=True)
    assert found.startswith("the fields 'I like it' of a form: a text that came as application/x-www-form-")
    assert found.endswith("send it with -H 'Content-Type: text/plain'")
    for row in ({"text_": b"x"}, {"text_": ""}):  # the latter as JSON has it
        assert fields_of(row, takes_text=True) == "the fields 'text_'"
    assert fields_of({"cat.jpg": b""}) == "the fields 'cat.jpg'"


def test_a_file_that_was_sent_as_a_form_is_told_what_to_say_of_itself() -> None:
    found = fields_of({"\ufffdPNG\r\n": b"", "\0\0IHDR": b"7"})
    assert found.startswith("a file that came as application/x-www-form-urlencoded")
    assert "curl -T FILE" in found and "PNG" not in found


def test_a_sole_element_comes_as_bytes() -> None:
    assert sole_element(np.array([[b"x"]], object), "a text") == b"x"
    assert sole_element(np.array(["é"], object), "a text") == "é".encode()


@pytest.mark.parametrize("elements", [[], [b"a", b"b"]])
def test_several_elements_are_refused(elements: list[bytes]) -> None:
    with pytest.raises(PredictionException, match=f"has {len(elements)} elements of BYTES") as caught:
        sole_element(np.array(elements, object), "a text")
    assert caught.value.error_code == 400


@pytest.mark.parametrize("data", ["text", "", {"prompt": "a"}, 3, 0.5, True])
def test_one_value_has_no_rows(data: Any) -> None:
    with pytest.raises(PredictionException, match="expected a list") as caught:
        rows_of(data)
    assert caught.value.error_code == 400
    with pytest.raises(PredictionException, match="expected a list"):
        read_each(data, str)


def test_the_rows_of_a_list_are_its_items() -> None:
    assert (rows_of([1, 2]), read_each([1, 2], str)) == ([1, 2], ["1", "2"])
