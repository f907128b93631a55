from __future__ import annotations

import enum
import io
import json
import math
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchere.handlers.encode import (
    Lent,
    decode_input,
    encode_answer,
    indented_json,
    one_line_json,
    parse_json,
)
from torchere.handlers.errors import UnsupportedOutput
from torchere.handlers.tensors import DATATYPES, TensorError, tensor_type

_scalars = (
    st.floats(0.01, 100) | st.floats() | st.integers() | st.booleans() | st.none() | st.text(max_size=3)
)


def _expected(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else json.dumps(value, indent=2).encode()


class _Colour(enum.IntEnum):
    RED = 3


_Pair = namedtuple("_Pair", "a b")


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        [[]],
        {"a": {}},
        {"a": [], "b": [{}]},
        ({},),
        [1, [2, [3]]],
        [[0.5, 1.25], [3.0], [-7.5e10, 0.0]],
        [[[0.5, 1.25], [3.0]], [[1.0]]],
        [[0.5], [math.nan], [1e-7]],
        [[0.5], [1]],
        {"a": [1, {"b": None}], "c": "é\u2028\U0001f600"},
        {1: "int", 1.5: "float", False: [1], None: {"x": 1}},
        [_Colour.RED, {"c": _Colour.RED}],
        _Pair(1, [2]),
        OrderedDict(b=1, a=[2]),
        [np.float64(0.1)] * 10,
        {"x": np.float64(0.25)},
        0.5,
        True,
        None,
        10**40,
    ],
)
def test_special_values_are_encoded_like_the_standard_library_does(value: object) -> None:
    assert encode_answer(value) == _expected(value)


def test_bytes_and_text_go_out_as_they_are() -> None:
    assert encode_answer(b"\x00\x01") == b"\x00\x01"
    assert encode_answer(bytearray(b"ab")) == b"ab"
    assert encode_answer("é") == b"\xc3\xa9"


def test_a_tensor_is_saved_and_reads_back() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    again = torch.load(io.BytesIO(encode_answer(tensor)), weights_only=True)
    assert torch.equal(again, tensor)


def test_a_row_of_a_batch_does_not_carry_the_other_rows() -> None:
    batch = torch.zeros(1000, 4)
    batch[1] = 7.0
    body = encode_answer(batch[0])
    assert len(body) < 4000
    assert torch.equal(torch.load(io.BytesIO(body), weights_only=True), batch[0])


def _endless() -> list[object]:
    items: list[object] = []
    items.append(items)
    return items


def _deep(levels: int) -> list[object]:
    items: list[object] = []
    for _ in range(levels):
        items = [items]
    return items


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1, 2},
        [np.float32(0.5)],
        [0.5] * 9 + [np.float32(0.5)],
        np.zeros(3),
        {"a": np.int64(1)},
        {(1, 2): 3},
        {(1, 2): [3]},
        [b"bytes inside"],
        [torch.zeros(1)],
        "\ud800",
        _endless(),
        _deep(5_000),  # on Python 3.14 `json.dumps` writes 50 MB of spaces for it
        _deep(100_000),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_sent_is_refused(value: object) -> None:
    with pytest.raises(UnsupportedOutput, match="can't be sent"):
        encode_answer(value)


@pytest.mark.parametrize("value", [np.ones(2), np.int64(1), {"scores": torch.ones(2)}])
def test_arrays_and_tensors_within_an_answer_are_refused_with_the_remedy(value: Any) -> None:
    with pytest.raises(UnsupportedOutput, match=r"call \.tolist\(\)"):
        encode_answer(value)


@pytest.mark.parametrize(
    ("lent", "is_same_memory", "may_change"),
    [("own", False, True), ("write", True, True), ("read", True, False)],
)
def test_a_tensor_lies_in_memory_of_its_own_unless_it_is_lent(
    lent: Lent, is_same_memory: bool, may_change: bool
) -> None:
    memory = np.zeros(4, np.float32)
    value: Any = memory.view(np.uint8).data

    array = decode_input(value, tensor_type(DATATYPES["FP32"], [4]), lent=lent)

    assert isinstance(array, np.ndarray)
    assert np.shares_memory(array, memory) == is_same_memory
    assert array.flags.writeable == may_change


@pytest.mark.parametrize(
    ("body", "content_type", "expected"),
    [
        (b'{"a": [1, 2.5, null]}', "application/json", {"a": [1, 2.5, None]}),
        (b"NaN", "application/json", None),
        (b'{"a": 1}', "application/JSON", bytearray(b'{"a": 1}')),
        (b'{"a": 1}', "application/json; charset=utf-8", bytearray(b'{"a": 1}')),
        (b"{broken", "application/json", bytearray(b"{broken")),
        (b'"\xff"', "application/json", bytearray(b'"\xff"')),
        (b"", "application/json", bytearray()),
        (b"hello", "text/plain", "hello"),
        (b"a,b", "text/csv", "a,b"),
        (b"\xff\xfe", "text/plain", bytearray(b"\xff\xfe")),
        (b"hello", "", bytearray(b"hello")),
        (b"\xff\xd8", "image/jpeg", bytearray(b"\xff\xd8")),
        (b"", "", bytearray()),
    ],
)
def test_the_content_type_decides_what_the_handler_reads(
    body: bytes, content_type: str, expected: object
) -> None:
    decoded = decode_input(body, content_type)
    if expected is None:
        assert isinstance(decoded, float)
        assert math.isnan(decoded)
    else:
        assert decoded == expected
        assert type(decoded) is type(expected)


def test_without_decoding_everything_stays_bytes() -> None:
    assert decode_input(b"{}", "application/json", decode=False) == bytearray(b"{}")


def test_what_is_not_what_it_claims_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    decode_input(b"{broken", "application/json")
    assert "application/json can't be decoded" in caplog.text


@pytest.mark.parametrize(("name", "raw"), [("BYTES", b"\2\0\0\0x"), ("BOOL", b"\2")])
def test_elements_of_a_tensor_that_are_none_are_told(name: str, raw: bytes) -> None:
    with pytest.raises(TensorError, match=r"^tensor.*: found .*, expected "):
        decode_input(raw, tensor_type(DATATYPES[name], [1]))


def test_json_nested_too_deeply_stays_bytes() -> None:
    body = b"[" * 200_000 + b"]" * 200_000
    assert decode_input(body, "application/json") == bytearray(body)


def test_a_number_with_too_many_digits_stays_bytes() -> None:
    body = b"1" * 10_000
    assert decode_input(body, "application/json") == bytearray(body)


@given(st.recursive(_scalars, lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner))))
@settings(max_examples=150)
def test_json_requests_read_as_the_standard_library_reads_them(value: object) -> None:
    body = json.dumps(value).encode()
    assert repr(decode_input(body, "application/json")) == repr(json.loads(body))


@given(st.from_regex(r"\s*-?[0-9]{1,25}(\.[0-9]{1,25})?([eE][+-]?[0-9]{1,3})?\s*", fullmatch=True))
def test_so_do_numbers_in_any_notation(text: str) -> None:
    try:
        expected: object = json.loads(text)
    except ValueError:
        expected = bytearray(text.encode())
    assert repr(decode_input(text.encode(), "application/json")) == repr(expected)


_magnitudes = st.floats(1e-4, 1e16, exclude_max=True)
_ordinary = st.just(0.0) | st.just(-0.0) | _magnitudes | _magnitudes.map(lambda number: -number)
_plain = (
    st.integers()
    | st.booleans()
    | st.none()
    | st.text(max_size=5)
    | st.sampled_from(["null", '",', "\x7f", "é"])
)
_keys = st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.none())


def _values(floats: st.SearchStrategy[float], keys: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        floats | _plain | st.lists(floats, min_size=6, max_size=20),
        lambda inner: st.lists(inner) | st.dictionaries(keys, inner) | st.tuples(inner, inner),
        max_leaves=20,
    )


@given(_values(_ordinary | st.just(math.nan) | st.just(-math.inf), _keys))
@settings(max_examples=200)
def test_the_bytes_are_those_of_the_standard_library_for_ordinary_numbers(value: Any) -> None:
    assert indented_json(value) == json.dumps(value, indent=2).encode()
    assert one_line_json(value) == json.dumps(value)


@given(_values(_ordinary, st.text(st.characters(exclude_categories=["Cs"]))))
def test_characters_stay_as_they_are_where_nothing_is_escaped(value: Any) -> None:
    expected = json.dumps(value, indent=2, ensure_ascii=False)
    try:
        encoded = expected.encode()
    except UnicodeEncodeError:
        with pytest.raises(UnicodeEncodeError):
            indented_json(value, ascii_only=False)
        return
    assert indented_json(value, ascii_only=False) == encoded


@given(_values(st.floats(), _keys))
@settings(max_examples=200)
def test_every_number_reads_back_as_itself(value: Any) -> None:
    expected = repr(json.loads(json.dumps(value)))
    assert repr(json.loads(indented_json(value))) == expected
    assert repr(json.loads(one_line_json(value))) == expected


@given(st.lists(st.floats(-1e-4, 1e-4, exclude_min=True, exclude_max=True), min_size=1))
def test_small_numbers_are_the_same_doubles(values: list[float]) -> None:
    written = json.loads(indented_json(values))
    assert list(map(float.hex, map(float, written))) == list(map(float.hex, values))


@pytest.mark.parametrize("exponent", range(-3, 16))
def test_the_notation_is_that_of_the_standard_library_around_every_power_of_ten(exponent: int) -> None:
    power = float(f"1e{exponent}")
    for number in (power, math.nextafter(power, 0.0), math.nextafter(power, math.inf), -1.5 * power):
        assert one_line_json([number]) == json.dumps([number])


@dataclass
class _Record:
    x: int


def _reordered() -> OrderedDict[str, int]:
    items = OrderedDict(a=1, b=2)
    items.move_to_end("a")
    return items


@pytest.mark.parametrize("write", [indented_json, one_line_json])
@pytest.mark.parametrize(
    "value",
    [
        {1.0},
        b"bytes",
        object(),
        Decimal("1.5"),
        msgspec.Raw(b"1"),
        _Record(1),
        datetime(2026, 1, 1),
        np.float32(1),
        np.ones(2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_the_standard_library_refuses_are_refused(write: Any, value: object) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        write([[value]])


@pytest.mark.parametrize("write", [indented_json, one_line_json])
def test_a_list_that_contains_itself_is_refused(write: Any) -> None:
    with pytest.raises(ValueError, match="Circular"):
        write(_endless())


@pytest.mark.parametrize(
    "value",
    [
        _reordered(),
        [2**64],
        [-(2**63) - 1],
        {1: 0, "1": 0},
        ["\ud800"],
        [np.float64(0.1)],
        [None, [(math.nan,)]],
    ],
    ids=repr,
)
def test_values_that_orjson_writes_otherwise_are_left_to_the_standard_library(value: Any) -> None:
    assert indented_json(value) == json.dumps(value, indent=2).encode()
    assert one_line_json(value) == json.dumps(value)


def test_lists_deeper_than_orjson_goes_are_written() -> None:
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    assert one_line_json(deep) == json.dumps(deep)


@pytest.mark.parametrize(
    "text", ["[NaN, -Infinity]", "1e400", '"\\ud800"', str(2**64), str(-(2**70)), '{"a": 1, "a": 2}', " 1 "]
)
def test_texts_are_read_as_the_standard_library_reads_them(text: str) -> None:
    expected = repr(json.loads(text))
    for given_as in (text, text.encode(), bytearray(text.encode()), memoryview(text.encode())):
        assert repr(parse_json(given_as)) == expected
        assert repr(parse_json(given_as, utf8_only=True)) == expected


def test_other_encodings_are_read_unless_they_are_excluded() -> None:
    text = '{"a": 1}'.encode("utf-16")
    assert parse_json(text) == {"a": 1}
    with pytest.raises(UnicodeDecodeError):
        parse_json(text, utf8_only=True)


@pytest.mark.parametrize("text", [b"", b"{", b'"\xff"', b"[1] 2", b"nul", b"1" * 5000])
def test_errors_have_the_words_of_the_standard_library(text: bytes) -> None:
    with pytest.raises(ValueError) as expected:
        json.loads(text)
    with pytest.raises(type(expected.value)) as found:
        parse_json(text)
    assert str(found.value) == str(expected.value)
