from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from torchere.handlers.errors import PredictionException
from torchere.handlers.rows import fields_of, read_each, refusal, rows_of, settings_of, sole_element, value_of
from torchere.handlers.sagemaker.transformer import DefaultPytorchInferenceHandler, Transformer

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
        (SimpleNamespace(get={"data": b"d"}.get), b"d"),
        (SimpleNamespace(get={"x": b"1"}.get), None),
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


def test_each_row_is_read_or_keeps_what_is_wrong_with_it() -> None:
    def read(row: int) -> int:
        if row < 0:
            raise PredictionException("negative", 400)
        return row * 2

    one, two, three = read_each([1, -1, 3], read)
    assert (one, three) == (2, 6)
    assert isinstance(two, PredictionException)


def test_a_refusal_sets_the_status_and_the_type_of_its_request_only(
    tmp_path: Path, make_context: Any, begin: Any
) -> None:
    context = make_context(tmp_path)
    begin(context, 2)
    answer = refusal(context, 1, PredictionException("too large", 413))
    assert answer == {"code": 413, "type": "RequestEntityTooLargeException", "message": "too large"}
    assert [context.get_response_status(index)[0] for index in range(2)] == [200, 413]
    assert [context.get_response_content_type(index) for index in range(2)] == [None, "application/json"]


def test_a_request_that_the_script_of_sagemaker_answers_wrongly_fails_alone(
    tmp_path: Path, make_context: Any, begin: Any
) -> None:
    script = ModuleType("inference")
    vars(script)["transform_fn"] = lambda model, body, kind, accept: (body, 7 if body == "bad" else accept)
    transformer = Transformer(DefaultPytorchInferenceHandler())
    transformer._model, transformer._initialized = None, True
    transformer._take_functions(script)
    context = make_context(tmp_path)
    begin(context, 3, accept="text/csv", Accept={"content-type": ""})  # the latter is a form field
    good, bad, other = transformer.transform([{"body": "good"}, {"body": "bad"}, {"body": "other"}], context)
    assert (good, other) == ("good", "other")
    assert "convert it with str()" in bad
    assert [context.get_response_status(index)[0] for index in range(3)] == [200, 500, 200]
    assert context.get_response_content_type(0) == "text/csv"


def test_settings_are_the_defaults_with_what_the_configuration_says() -> None:
    defaults = {"a": 1, "b": 0.5}
    assert settings_of({}, "x", defaults) == defaults
    assert settings_of({"handler": {"x": {"b": 2}, "y": {"a": 5}}}, "x", defaults) == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ([1], r"handler\.x in model-config\.yaml is \[1\]; expected keys and values"),
        ({"c": 1}, r"handler\.x\.c in model-config\.yaml is unknown; expected one of a, b"),
        ({"a": 0.5}, r"handler\.x\.a in model-config\.yaml is 0\.5; expected a whole number"),
        ({"b": True}, r"handler\.x\.b in model-config\.yaml is True; expected a number"),
    ],
)
def test_settings_of_another_kind_are_refused(block: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings_of({"handler": {"x": block}}, "x", {"a": 1, "b": 0.5})
