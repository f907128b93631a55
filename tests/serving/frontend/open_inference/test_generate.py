"""The generate extension: plain members in and out."""

import json
from typing import Any

import pytest

from torchere.archiver.signature import Signature, TensorSpec
from torchere.handlers.encode import compact_json, decode_input
from torchere.serving.errors import InvalidRequest
from torchere.serving.frontend.open_inference.generate import (
    generate_request,
    generated,
    joined,
)
from torchere.serving.frontend.open_inference.service import check_signature
from torchere.serving.frontend.open_inference.tensor_request import infer_request

SIGNATURE = Signature(
    (TensorSpec("x", "FP64", (-1, 2)), TensorSpec("n", "INT8", (-1, 1))), (TensorSpec("y", "FP64", (-1,)),)
)


def rows(signature: Signature | None = None, **members: Any) -> dict[str, Any]:
    request = generate_request(json.dumps(members).encode(), signature)
    made = infer_request(request)
    return {p.name: decode_input(p.value, p.content_type) for p in made.parameters}


@pytest.mark.usefixtures("items")
def test_members_are_inputs_of_the_kind_they_look_like() -> None:
    found = rows(text="hi", n=3, ok=True, f=[0.5, 1.5])
    assert {name: (str(array.dtype), array.tolist()) for name, array in found.items()} == {
        "text": ("object", [b"hi"]),
        "n": ("int64", [3]),
        "ok": ("bool", [True]),
        "f": ("float32", [0.5, 1.5]),
    }


@pytest.mark.usefixtures("items")
def test_the_signature_says_what_they_are() -> None:
    found = rows(SIGNATURE, x=[1, 2], n=3)
    assert (str(found["x"].dtype), found["x"].tolist()) == ("float64", [[1, 2]])
    assert (str(found["n"].dtype), found["n"].tolist()) == ("int8", [[3]])


@pytest.mark.usefixtures("items")
def test_id_and_parameters_are_no_inputs() -> None:
    request = generate_request(b'{"id": "7", "parameters": {"temperature": 0.5}, "text": "a"}', None)
    assert (request.id, dict(request.parameters), len(request.inputs)) == ("7", {"temperature": 0.5}, 1)


def test_a_value_that_is_no_input_of_the_signature_is_a_parameter() -> None:
    parameters = {"k": 0.5, "stream": True}
    body = json.dumps({"x": [1, 2], "n": 3, "max_tokens": 20, "stream": False, "parameters": parameters})
    request = generate_request(body.encode(), SIGNATURE)
    assert [one.name for one in request.inputs] == ["x", "n"]
    assert request.parameters == {"max_tokens": 20, **parameters}


@pytest.mark.usefixtures("items")
def test_parameters_that_are_inputs_of_the_signature_are_inputs() -> None:
    found = rows(SIGNATURE, parameters={"x": [1, 2], "n": 3, "k": 0.5})
    assert {name: array.tolist() for name, array in found.items()} == {"x": [[1, 2]], "n": [[3]]}
    body = b'{"x": [1, 2], "parameters": {"n": 3, "k": 0.5, "x": 7}}'
    assert generate_request(body, SIGNATURE).parameters == {"k": 0.5, "x": 7}


def test_a_list_in_parameters_that_is_no_input_of_the_signature_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^parameters\.m: found \['a'\], expected a text"):
        generate_request(b'{"x": [1, 2], "n": 3, "parameters": {"m": ["a"]}}', SIGNATURE)


@pytest.mark.usefixtures("items")
def test_lists_in_parameters_are_inputs_without_a_signature() -> None:
    parameters = {"max_tokens": 20, "bad_words": [""], "stop_words": ["a", "b"]}
    found = rows(text_input="hi", parameters=parameters)
    assert {name: array.tolist() for name, array in found.items()} == {
        "text_input": [b"hi"],
        "bad_words": [b""],
        "stop_words": [b"a", b"b"],
    }
    body = json.dumps({"text_input": "hi", "parameters": parameters}).encode()
    assert generate_request(body, None).parameters == {"max_tokens": 20}


def test_a_long_list_in_parameters_is_an_input() -> None:
    body = json.dumps({"x": "a", "parameters": {"k": 1, "n": [1] * 300_000}}).encode()
    request = generate_request(body, None)
    assert [(one.name, one.shape) for one in request.inputs] == [("x", (1,)), ("n", (300_000,))]
    assert request.parameters == {"k": 1}


def test_a_list_that_is_no_input_of_the_signature_is_refused_by_its_name() -> None:
    request = generate_request(b'{"x": [1, 2], "n": 3, "m": [1]}', SIGNATURE)
    with pytest.raises(InvalidRequest, match=r"^inputs\[2\]\.name: found 'm', expected one of 'x', 'n'$"):
        check_signature(request, SIGNATURE)


@pytest.mark.parametrize("value", [b"null", b"{}"])
def test_nothing_and_an_object_are_no_parameters(value: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"^m: found .*, expected a text, a number, true or false"):
        generate_request(b'{"x": [1, 2], "n": 3, "m": %b}' % value, SIGNATURE)


def test_null_for_id_and_parameters_is_as_if_they_were_not_there() -> None:
    request = generate_request(b'{"id": null, "parameters": null, "text": "a"}', None)
    assert (request.id, dict(request.parameters), len(request.inputs)) == ("", {}, 1)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"{", "the request is no JSON"),
        (b"[" * 10**4, "the request is no JSON"),
        (b"[" * 10**6, "the request: Expected `object`, got `array`"),
        (b'{"x": [%b[]]}' % (b"[]," * 10**5), "the request: Expected .*, got `array`"),
        (b"[1]", "the request: found no object"),
        (b'{"x": "\xe9"}', "the request is no JSON"),
        (b'{"parameters": 1}', "parameters: found 1"),
        (b'{"id": {}, "x": 1}', "id: found an object"),
        (b'{"parameters": {"a": {}}}', "parameters.a: found an object"),
        (b'{"x": {}}', "x: found an object, expected a text"),
        (b'{"x": null}', "x: found None"),
        (b'{"x": []}', r"x: found \[\]"),
        (b'{"x": [1, "a"]}', r"x\.data\[1\]: found 'a', expected whole numbers"),
    ],
)
def test_what_is_no_input_is_refused_by_its_name(body: bytes, text: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{text}"):
        generate_request(body, None)


def test_too_many_inputs_are_refused_before_the_first_is_converted() -> None:
    members: dict[str, Any] = {"x": {}} | {str(i): 1 for i in range(1000)}
    with pytest.raises(InvalidRequest, match=r"^inputs: found 1001, expected at most 1000$"):
        generate_request(json.dumps(members).encode(), None)


def test_lists_with_many_elements_are_read_as_short_ones() -> None:
    texts = ["a", "b,"] * 200_000
    request = generate_request(json.dumps({"text": texts, "n": list(range(1000))}).encode(), None)
    assert [(one.datatype.name, one.shape) for one in request.inputs] == [
        ("BYTES", (400_000,)),
        ("INT64", (1000,)),
    ]
    assert request.inputs[0].raw[-11:] == b"\1\0\0\0a\2\0\0\0b,"


@pytest.mark.usefixtures("items")
@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, 2.5], "float32"),
        ([0, 2, 1e-7], "float32"),
        ([1.5, 2], "float32"),
        ([1, 2], "int64"),
    ],
)
@pytest.mark.parametrize("length", [0, 300_000])
def test_whole_numbers_among_fractions_are_fractions(values: list[Any], dtype: str, length: int) -> None:
    found = rows(x=[*values, *[values[-1]] * length])["x"]
    assert (str(found.dtype), found[:2].tolist()) == (dtype, values[:2])


def test_many_members_are_refused_before_they_are_made() -> None:
    members = {str(number): 1 for number in range(300_000)}
    with pytest.raises(InvalidRequest, match=r"^the request: found 300000 members, expected at most 65536"):
        generate_request(json.dumps(members).encode(), None)


@pytest.mark.parametrize(
    ("member", "text"),
    [
        ('"id": [1]', "id: found a list, expected a text"),
        ('"parameters": [1]', "parameters: found a list, expected an object"),
        ('"x": [[1]]', "x: found a list, expected a text"),
        ('"x": {"a": []}', "x: found an object, expected a text"),
        ('"x": {"a": {}}', "the request: Expected"),
        ('"z": [1], "parameters": {"z": [2]}', r"parameters\.z: found a list, expected a text"),
        ('"x": [1, "2.5"]', r"x.data\[1\]: found '2.5', expected whole numbers"),
        ('"x": [1%s]' % ("0" * 400), "x.*"),
    ],
)
def test_bad_members_of_requests_with_many_items(member: str, text: str) -> None:
    many = ", ".join(["1"] * 300_000)
    with pytest.raises(InvalidRequest, match=f"^{text}"):
        generate_request(b'{%b, "y": [%b]}' % (member.encode(), many.encode()), None)


def test_outputs_of_one_element_are_no_lists() -> None:
    part = {
        "id": "7",
        "model_name": "m",
        "model_version": "1",
        "outputs": [
            {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]},
            {"name": "y", "datatype": "INT8", "shape": [2], "data": [1, 2]},
        ],
    }
    assert generated(json.dumps(part).encode()) == {
        "id": "7",
        "model_name": "m",
        "model_version": "1",
        "text": "a",
        "y": [1, 2],
    }


def test_parts_are_joined_where_they_are_texts() -> None:
    parts = [{"model_name": "m", "text": "a", "n": 1}, {"model_name": "m", "text": "b", "n": 2}]
    assert joined(parts) == {"model_name": "m", "text": "ab", "n": 2}


@pytest.mark.parametrize(
    ("values", "whole"),
    [
        (["a", 1, "b", "c"], "bc"),
        (["a", "b", [1, 2]], [1, 2]),
        ([["a", "b"], "c", "d"], "cd"),
        (["", "a", ""], "a"),
        (["a", None], None),
    ],
)
def test_a_value_that_is_no_text_replaces_the_texts_before_it(values: list[Any], whole: Any) -> None:
    found = joined([{"model_name": "m", "id": "7", "x": value, "y": 1} for value in values])
    assert list(found.items()) == [("model_name", "m"), ("id", "7"), ("x", whole), ("y", 1)]


class Whole(str):
    """A text that may not be extended, which would copy it."""

    __slots__ = ()

    def __add__(self, other: str) -> str:
        raise AssertionError("a text was copied for one part")

    __radd__ = __add__


def test_joining_does_not_copy_the_text_for_each_part() -> None:
    parts = [{"model_name": "m", "text": Whole("ab")} for _ in range(1000)]
    assert joined(parts) == {"model_name": "m", "text": "ab" * 1000}


def test_numbers_that_json_lacks_are_read_and_written() -> None:
    part = b'{"model_name":"m","outputs":[{"name":"y","shape":[3],"data":[NaN,-Infinity,1.5]}]}'
    assert compact_json(generated(part)) == b'{"model_name":"m","y":[NaN,-Infinity,1.5]}'


@pytest.mark.usefixtures("items")
@pytest.mark.parametrize("given", [2.5, [2.5]])
def test_an_input_without_dimensions_is_one_number(given: Any) -> None:
    array = rows(Signature((TensorSpec("a", "FP32", ()),), ()), a=given)["a"]
    assert (array.shape, array.tolist()) == ((), 2.5)


@pytest.mark.usefixtures("items")
def test_an_input_without_dimensions_is_no_list_of_several() -> None:
    with pytest.raises(InvalidRequest, match=r"^a\.data: found 2 elements, expected 1 for shape \[\]"):
        rows(Signature((TensorSpec("a", "FP32", ()),), ()), a=[2.5, 1])
