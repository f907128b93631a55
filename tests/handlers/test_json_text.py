"""JSON has the bytes of Python's `json`, save for the spelling of small numbers."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchere.handlers.encode import indented_json, one_line_json, parse_json

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


def _endless() -> list[object]:
    items: list[object] = []
    items.append(items)
    return items


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
