"""Texts of lists become the bytes that the parsed list becomes, and are refused with the same words."""

import json
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchere.handlers.tensors import DATATYPES, TensorError, list_text
from torchere.handlers.tensors.codec import NO_JSON, array_from_json, bytes_from_tensor
from torchere.handlers.tensors.list_text import ListText, count_members, has_many_items


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_text, "SLICE_ELEMENTS", 3)


def by_text(text: bytes, name: str, shape: list[Any]) -> bytes | str:
    try:
        return ListText(text).tensor_bytes(DATATYPES[name], shape, "x")
    except TensorError as err:
        return str(err)


def by_objects(text: bytes, name: str, shape: list[Any]) -> bytes | str:
    datatype = DATATYPES[name]
    try:
        return bytes_from_tensor(array_from_json(msgspec.json.decode(text), datatype, shape, "x"), datatype)
    except TensorError as err:
        return str(err)


@pytest.mark.parametrize(
    ("text", "name", "shape"),
    [
        (b"[1,2,3,4]", "FP32", [2, 2]),
        (b"[[1,2],[3,4]]", "INT8", [2, 2]),
        (b" [ [ 1 , 2 ] ,\n[ 3 , 4 ] ] ", "BF16", [2, 2]),
        (b"[[[1],[2]],[[3],[4]]]", "UINT64", [2, 2, 1]),
        (b"[[],[ ]]", "FP32", [2, 0]),
        (b"[]", "FP32", [0, 5]),
        (b"[7]", "INT32", []),
        (b"[true,0,1,false]", "BOOL", [4]),
        (rb'["a,[]{}:","\\","\"]\\\"","\u00e9"," "]', "BYTES", [5]),
        (rb'[ ["a" , "]"], [ "[,", "\\\\" ] ]', "BYTES", [2, 2]),
        (b"[1,2,3]", "FP32", [2]),
        (b"[]", "FP32", [2]),
        (b"[[1,2],[3]]", "FP32", [2, 2]),
        (b"[[1],[]]", "FP32", [2, 1]),
        (b"[[1,2],3]", "FP32", [2, 2]),
        (b"[[1,2], null]", "FP32", [2, 2]),
        (b'[[1,2],{"a":[1],"b":2}]', "FP32", [2, 2]),
        (b'[[1,2],"a,b"]', "FP32", [2, 2]),
        (b"[[[1],2]]", "FP32", [1, 2, 1]),
        (b"[[1,2]]", "FP32", [2]),
        (b"[[1,2]]", "FP32", [3]),
        (b"[[1,[2]]]", "FP32", [2]),
        (b"[[[1,2],[3,4]]]", "FP32", [1, 4]),
        (b"[[1],[2],[3],[4]]", "FP32", [1, 4]),
        (b'[["a","b"],["c","d"],["e","f"],["g","h"]]', "BYTES", [2, 4]),
        (b"[[1]]", "FP32", []),
        (b"[[[1]]]", "FP32", [1, 1]),
        (b"[" * 32 + b"1" + b"]" * 32, "FP32", [1]),
        (b"[" * 33 + b"1" + b"]" * 33, "FP32", [1]),
        (b"[1,2,3,[4]]", "FP32", [4]),
        (b'[1,2,3,{"a":[5,6]}]', "FP32", [4]),
        (b"[1,2,3,true]", "FP32", [4]),
        (b"[1,2,3,4.0]", "INT8", [4]),
        (b"[1,2,3,4,300]", "UINT8", [5]),
        (b"[1,2,3,4,1e39]", "FP32", [5]),
        (b"[1,2,3,1" + b"0" * 309 + b"]", "FP64", [4]),
        (b"[1,2,3,4]", "BYTES", [4]),
        (b"[[]]", "FP32", [2**40, 0]),
        (b"[1]", "FP32", [1, -1]),
    ],
)
def test_examples(text: bytes, name: str, shape: list[Any]) -> None:
    assert by_text(text, name, shape) == by_objects(text, name, shape)


@pytest.mark.parametrize("text", [b"[[1,2],[3,4]]", b"[[1],[2],[3],[4]]", b"[[[1,2],[3,4]]]", b"[[1,2,3,4]]"])
@pytest.mark.parametrize("shape", [[4], [1, 4], [2, 2], [2, 1, 2]])
def test_lists_may_be_nested_otherwise_than_the_shape(text: bytes, shape: list[int]) -> None:
    assert by_text(text, "INT8", shape) == bytes([1, 2, 3, 4])


VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-300, 300)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text('a"\\,[]{} é', max_size=3)
)
JSON = st.recursive(
    VALUES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
)


@given(
    st.lists(JSON, max_size=4), st.sampled_from(sorted(DATATYPES)), st.lists(st.integers(-1, 4), max_size=3)
)
def test_any_list_has_the_same_result(data: list[Any], name: str, shape: list[int]) -> None:
    text = json.dumps(data, ensure_ascii=False).encode()
    expected, found = by_objects(text, name, shape), by_text(text, name, shape)
    assert found == expected or (isinstance(found, str) and isinstance(expected, str))


@given(
    st.data(), st.sampled_from(sorted(DATATYPES)), st.lists(st.integers(0, 3), max_size=4), st.integers(0, 20)
)
def test_lists_of_a_shape_have_the_same_result(
    data: st.DataObject, name: str, shape: list[int], seed: int
) -> None:
    elements = st.text('a"\\,[]', max_size=2) if name == "BYTES" else st.integers(0, 1)
    count = math.prod(shape)
    flat = data.draw(st.lists(elements, min_size=count, max_size=count))
    array = np.empty(count, object)
    array[:] = flat
    separators = [(",", ":"), (", ", ": ")][seed % 2]
    text = json.dumps(array.reshape(shape).tolist(), separators=separators).encode()
    if not text.startswith(b"["):
        text = b"[%b]" % text
    found = by_text(text, name, shape)
    assert isinstance(found, bytes)
    assert found == by_objects(text, name, shape)


@pytest.mark.parametrize("text", [b'["a","\xff"]', b"[1,2,3,1" + b"0" * 400 + b"]"])
def test_elements_that_the_parser_of_the_text_does_not_check_are_refused(text: bytes) -> None:
    with pytest.raises((*NO_JSON, TensorError)):
        ListText(text).tensor_bytes(DATATYPES["BYTES"], [text.count(b",") + 1], "x")


@pytest.mark.parametrize(
    ("text", "count", "first"),
    [(b"[]", 0, None), (b"[5]", 1, 5), (b'["a,b", 2]', 2, "a,b"), (b"[[1,2],3]", 2, []), (b"[{},1]", 2, {})],
)
def test_count_and_first_element(text: bytes, count: int, first: Any) -> None:
    found = ListText(text)
    assert found.count == count
    if count:
        assert found.first == first


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"[1, 2]", False),
        (b"[1, 2.5]", True),
        (b"[1, 2E3]", True),
        (b"[1, 2e3]", True),
        (b'[1, "a.e"]', False),
    ],
)
def test_fractions_are_found_outside_strings(text: bytes, found: bool) -> None:
    assert ListText(text).has_fractions is found


def test_lists_deeper_than_16_bits_count_are_told_apart() -> None:
    assert ListText(b"[" * 70_000 + b"]" * 70_000).count == 1


def test_items_and_members_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_text, "MANY_ITEMS", 3)
    assert not has_many_items(b'{"a":[1,2,3]}')
    assert has_many_items(b"[[[[1]]]]")
    assert has_many_items(b"[1,2,3,4,5]")
    assert count_members(rb'{"a:\":":{"b":1},"c":[":",2]}') == 3
    assert count_members(b"[1,2]") == 0
