"""Raw bytes and JSON data to tensors and back."""

import json
import math
import struct
from typing import Any

import numpy as np
import numpy.testing  # NumPy 1 starts a process at this import, which no unit test may
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchere.handlers.tensors import BF16, BYTES, DATATYPES, TensorError
from torchere.handlers.tensors.codec import (
    array_from_bytes,
    array_from_json,
    bytes_from_tensor,
    join_elements,
    json_from_tensor,
    objects_array,
    quoted_non_finite,
    rounded_to_bfloat16,
    split_elements,
    tensor_from_bytes,
    tensor_from_json,
)

FP32, BOOL, INT64 = DATATYPES["FP32"], DATATYPES["BOOL"], DATATYPES["INT64"]
RAW = np.arange(6, dtype="<f4").tobytes()


def test_an_array_is_a_view_of_the_bytes_unless_it_is_to_be_changed() -> None:
    view = tensor_from_bytes(RAW, FP32, [2, 3])
    copy = tensor_from_bytes(RAW, FP32, [2, 3], writable=True)
    assert view.tolist() == copy.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert not view.flags.writeable
    assert not view.flags.owndata
    assert torch.from_numpy(copy).sum() == 15


def test_bytes_that_lie_askew_are_copied() -> None:
    array = tensor_from_bytes(memoryview(b"x" + RAW)[1:], FP32, [6])
    assert array.flags.aligned
    assert array.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", list(DATATYPES))
def test_no_elements_are_fine(name: str) -> None:
    tensor = tensor_from_bytes(b"", DATATYPES[name], [0, 4])
    assert tuple(tensor.shape) == (0, 4)
    assert bytes_from_tensor(tensor, DATATYPES[name]) == b""


@given(st.sampled_from(sorted(set(DATATYPES) - {"BYTES", "BOOL"})), st.binary(max_size=64))
def test_numbers_come_back_bit_by_bit(name: str, raw: bytes) -> None:
    datatype = DATATYPES[name]
    raw = raw[: len(raw) // datatype.item_bytes * datatype.item_bytes]
    shape = [len(raw) // datatype.item_bytes]
    assert bytes_from_tensor(tensor_from_bytes(raw, datatype, shape), datatype) == raw


@given(st.lists(st.binary(max_size=20)))
def test_elements_of_bytes_come_back(elements: list[bytes]) -> None:
    raw = join_elements(elements)
    tensor = tensor_from_bytes(raw, BYTES, [len(elements)])
    assert tensor.tolist() == elements == split_elements(raw, "x")
    assert bytes_from_tensor(tensor, BYTES) == raw


@given(st.binary(max_size=40), st.integers(0, 6))
def test_bytes_of_any_layout_are_read_or_refused(raw: bytes, count: int) -> None:
    try:
        assert tensor_from_bytes(raw, BYTES, [count], "x").shape == (count,)
    except TensorError as err:
        assert str(err).startswith("x")


@pytest.mark.parametrize(
    ("raw", "datatype", "shape", "text"),
    [
        (RAW, FP32, [5], r"x: found 24 bytes, expected 20 bytes for FP32 of shape \[5\]"),
        (RAW[:-1], FP32, [6], "x: found 23 bytes, expected 24 bytes"),
        (RAW, FP32, [-6], r"x\.shape\[0\]: found -6"),
        (b"\x01\x07", BOOL, [2], "x: found the byte 7, expected 0 or 1 for each BOOL"),
        (struct.pack("<I", 9) + b"ab", BYTES, [1], r"x\[0\]: found a length of 9 with 2 bytes left"),
        (struct.pack("<I", 2**32 - 1), BYTES, [1], r"x\[0\]: found a length of 4294967295 with 0 bytes left"),
        (struct.pack("<I", 0) + b"abc", BYTES, [1], r"x\[1\]: found 3 bytes of a length, expected 4"),
        (struct.pack("<II", 0, 0), BYTES, [1], "x: found 2 elements of BYTES, expected 1"),
        (b"\0\0\0\0", BYTES, [2**50], "x: found 4 bytes, expected a length of 4 bytes before each of"),
    ],
)
def test_bytes_that_do_not_fit_are_refused(raw: bytes, datatype: object, shape: list[int], text: str) -> None:
    with pytest.raises(TensorError, match=f"^{text}"):
        tensor_from_bytes(raw, datatype, shape, "x")  # type: ignore[arg-type]


def test_nul_and_empty_elements_are_elements() -> None:
    assert tensor_from_bytes(join_elements([b"a\0b", b""]), BYTES, [2]).tolist() == [b"a\0b", b""]


def test_bf16_is_a_torch_tensor() -> None:
    raw = bytes_from_tensor(torch.tensor([[1.0, -2.5]], dtype=torch.bfloat16), BF16)
    tensor = tensor_from_bytes(raw, BF16, [1, 2])
    assert raw == b"\x80\x3f\x20\xc0"
    assert tensor.dtype == torch.bfloat16
    assert tensor.tolist() == [[1.0, -2.5]]


def test_every_bf16_survives_a_process_without_torch() -> None:
    raw = np.arange(2**16, dtype="<u2").tobytes()
    array = array_from_bytes(raw, BF16, [256, 256])
    of_torch = tensor_from_bytes(raw, BF16, [256, 256]).float().numpy()
    assert array.tobytes() == of_torch.tobytes()
    assert bytes_from_tensor(array, BF16) == raw


@given(st.lists(st.floats(width=64) | st.floats(min_value=-(2.0**128), max_value=2.0**128), max_size=20))
def test_numbers_are_rounded_to_bf16_as_torch_rounds(numbers: list[float]) -> None:
    exact = np.array(numbers, dtype=np.float64)
    wanted = torch.from_numpy(exact).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(rounded_to_bfloat16(exact), wanted)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3).T,
        np.arange(12)[::-2],
        np.arange(6, dtype=">i8"),
        np.asfortranarray(np.eye(2, dtype=int)),
    ],
)
def test_arrays_of_any_layout_go_out_row_by_row(array: np.ndarray) -> None:
    back = tensor_from_bytes(bytes_from_tensor(array, INT64), INT64, array.shape)
    assert back.tolist() == array.tolist()


def test_texts_go_out_as_utf8() -> None:
    assert bytes_from_tensor(objects_array(["é", b"\xff"], (2,)), BYTES) == b"\2\0\0\0\xc3\xa9\1\0\0\0\xff"


def test_a_text_without_an_end_is_read_once_and_not_from_each_of_its_quotes() -> None:
    without_end = b'\\"' * 9_000 + b"x" * 6_000_000  # read from each quote it takes more than half an hour
    assert quoted_non_finite(b"[NaN," + without_end) == b'["NaN",' + without_end


def test_names_beside_many_escapes_are_left_as_they_are() -> None:
    assert quoted_non_finite(b'[NaN, "' + b"\\n" * 10_001 + b'"]') is None


DEEP = json.loads("[" * 33 + "1" + "]" * 33)  # one level more than a tensor has dimensions


def read(data: object, name: str, shape: list[Any]) -> Any:
    return tensor_from_json(data, DATATYPES[name], shape, "inputs[0]")


@pytest.mark.parametrize(
    "data",
    [
        [1, 2, 3, 4],
        [[1, 2], [3, 4]],
        [[1, 2, 3, 4]],
        [[1], [2], [3], [4]],
        [[[1, 2], [3, 4]]],
        [[[[1]], [[2]], [[3]], [[4]]]],
    ],
)
@pytest.mark.parametrize("name", ["INT8", "UINT64", "FP16", "FP32", "FP64"])
def test_data_may_be_flat_or_nested(data: object, name: str) -> None:
    array = read(data, name, [2, 2])
    assert array.dtype == DATATYPES[name].numpy
    assert array.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("data", "name", "shape", "wanted"),
    [
        ([True, 0], "BOOL", [2], [True, False]),
        ([["a"], ["é"]], "BYTES", [2, 1], [[b"a"], ["é".encode()]]),
        ([], "FP32", [0, 5], []),
        ([[], []], "FP32", [2, 0], [[], []]),
        (7, "INT32", [], 7),
        ([7], "INT32", [], 7),
        ([-0.0], "FP64", [1], [-0.0]),
        ([2**64 - 1], "UINT64", [1], [2**64 - 1]),
    ],
)
def test_elements_are_of_their_kind(data: object, name: str, shape: list[int], wanted: object) -> None:
    assert read(data, name, shape).tolist() == wanted


def test_bf16_is_rounded_by_torch() -> None:
    tensor = read([1.0, 0.1], "BF16", [2])
    assert tensor.dtype == torch.bfloat16
    assert tensor.tolist() == [1.0, 0.10009765625]


def test_without_torch_bf16_is_the_same_numbers_as_float32() -> None:
    array = array_from_json([1.0, 0.1], BF16, [2], "inputs[0]")
    assert array.dtype == np.float32
    assert array.tolist() == [1.0, 0.10009765625]


@pytest.mark.parametrize(
    ("data", "name", "shape", "text"),
    [
        ([1, 2, 3], "FP32", [2], r"inputs\[0\]\.data: found 3 elements, expected 2 for shape \[2\]"),
        (
            [[1, 2], [3]],
            "FP32",
            [2, 2],
            r"inputs\[0\]\.data\[1\]: found 1 elements, expected a list of 2, as the list before it$",
        ),
        ([[1, 2], 3], "FP32", [2, 2], r"inputs\[0\]\.data\[1\]: found 3, expected a list of 2"),
        ([[[1], 2]], "FP32", [1, 2, 1], r"inputs\[0\]\.data\[0\]\[1\]: found 2, expected a list of 1"),
        ([[1, 2]], "FP32", [3], r"inputs\[0\]\.data: found 2 elements, expected 3 for shape \[3\]"),
        ([[1], [2, 3]], "FP32", [3], r"inputs\[0\]\.data\[1\]: found 2 elements, expected a list of 1"),
        ([[1, [2]]], "FP32", [2], r"inputs\[0\]\.data\[1\]: found a list, expected numbers for FP32"),
        (DEEP, "FP32", [1], r"inputs\[0\]\.data\[0\]: found a list, expected numbers for FP32"),
        ([1, [2]], "FP32", [2], r"inputs\[0\]\.data\[1\]: found a list, expected numbers for FP32"),
        ([1, True], "FP32", [2], r"inputs\[0\]\.data\[1\]: found True, expected numbers"),
        ([True], "INT8", [1], r"inputs\[0\]\.data\[0\]: found True, expected whole numbers"),
        ([None], "FP64", [1], r"inputs\[0\]\.data\[0\]: found nothing, expected numbers"),
        (["1"], "INT64", [1], r"inputs\[0\]\.data\[0\]: found '1', expected whole numbers"),
        ([1.0], "INT64", [1], r"inputs\[0\]\.data\[0\]: found 1.0, expected whole numbers"),
        ([1, {}], "BYTES", [2], r"inputs\[0\]\.data\[0\]: found 1, expected texts for BYTES"),
        ([0, 7], "BOOL", [2], r"inputs\[0\]\.data\[1\]: found 7, expected BOOL, which is from 0 to 1"),
        ([-1], "UINT8", [1], r"inputs\[0\]\.data\[0\]: found -1, expected UINT8, which is from 0 to 255"),
        ([2**63], "INT64", [1], r"inputs\[0\]\.data\[0\]: found 9223372036854775808, expected INT64"),
        ([2**9000], "INT64", [1], r"inputs\[0\]\.data\[0\]: found a whole number of more than 128 bits"),
        ([1, 2**1024], "FP64", [2], r"inputs\[0\]\.data\[1\]: found a whole number of more than 128 bits"),
        ([1e39], "FP32", [1], r"inputs\[0\]\.data\[0\]: found 1e\+39, expected a number within FP32"),
        ([1, 1e5], "FP16", [2], r"inputs\[0\]\.data\[1\]: found 100000.0, expected a number within FP16"),
        ([3.39e38, 3.4e38], "BF16", [2], r"inputs\[0\]\.data\[1\]: found 3.4e\+38, expected a number within"),
        ([1e39], "BF16", [1], r"inputs\[0\]\.data\[0\]: found 1e\+39, expected a number within BF16"),
        ({"a": 1}, "FP32", [1], r"inputs\[0\]\.data: found an object, expected a list of 1 elements"),
        (None, "FP32", [], r"inputs\[0\]\.data: found nothing, expected a list of 1 elements"),
        ([], "FP32", [2**40], r"inputs\[0\]\.data: found 0 elements, expected 1099511627776"),
        ([[1]], "FP32", [2**40, 0], r"inputs\[0\]\.data: found 1 elements, expected 0 for shape"),
        ([1], "FP32", [1, -1], r"inputs\[0\]\.shape\[1\]: found -1"),
    ],
)
def test_data_that_does_not_fit_is_refused_by_its_place(
    data: object, name: str, shape: list[Any], text: str
) -> None:
    with pytest.raises(TensorError, match=f"^{text}"):
        read(data, name, shape)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=2),
)


@given(JSON, st.sampled_from(sorted(DATATYPES)), st.lists(st.integers(-1, 4), max_size=3))
def test_any_data_is_taken_or_refused(data: object, name: str, shape: list[int]) -> None:
    try:
        tensor = read(data, name, shape)
    except TensorError as err:
        assert str(err).startswith("inputs[0].")
    else:
        assert list(tensor.shape) == shape


@given(st.lists(st.floats(width=32), max_size=8))
def test_floats_are_written_as_python_writes_them(values: list[float]) -> None:
    array = np.array(values, dtype=np.float32)
    text = bytes(json_from_tensor(array, DATATYPES["FP32"], "x"))
    back = json.loads(text)
    assert len(back) == len(values)
    assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(back, array.tolist(), strict=True))


@pytest.mark.parametrize(
    ("tensor", "name", "text"),
    [
        (np.array([[True, False]]), "BOOL", b"[true,false]"),
        (np.array([[1], [2]]), "INT64", b"[1,2]"),
        (np.array([math.nan, math.inf]), "FP64", b"[NaN, Infinity]"),
        (np.array(3.5), "FP64", b"[3.5]"),
        (np.array([0.1], np.float32), "FP32", b"[0.10000000149011612]"),
        (np.array([0.1], np.float16), "FP16", b"[0.0999755859375]"),
        (np.array([[1, 2], [3, 4]], np.int8, order="F").T, "INT8", b"[1,3,2,4]"),
        (np.arange(6, dtype=np.uint64)[::-2], "UINT64", b"[5,3,1]"),
        (np.frombuffer(b"\0" + np.array([7, 8], "<i4").tobytes(), "<i4", 2, 1), "INT32", b"[7,8]"),
        (np.zeros((0, 3), np.float32), "FP32", b"[]"),
    ],
)
def test_answers_are_flat(tensor: Any, name: str, text: bytes) -> None:
    assert bytes(json_from_tensor(tensor, DATATYPES[name], "x")) == text


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1))
def test_finite_floats_read_back_as_themselves(values: list[float]) -> None:
    text = bytes(json_from_tensor(np.array(values), DATATYPES["FP64"], "x"))
    assert list(map(float.hex, map(float, json.loads(text)))) == list(map(float.hex, values))


def test_bf16_that_is_not_finite_is_written_as_python_writes_it() -> None:
    tensor = torch.tensor([math.nan, 0.1], dtype=torch.bfloat16)
    assert bytes(json_from_tensor(tensor, BF16, "x")) == b"[NaN, 0.10009765625]"


def test_texts_and_bf16_are_written() -> None:
    texts = objects_array([b"a", "é", 3], (3,))
    assert json.loads(bytes(json_from_tensor(texts, BYTES, "x"))) == ["a", "é", "3"]
    assert bytes(json_from_tensor(torch.tensor([[1.5]], dtype=torch.bfloat16), BF16, "x")) == b"[1.5]"


def test_bytes_that_are_no_text_have_to_be_asked_for_as_binary_data() -> None:
    with pytest.raises(
        TensorError, match=r"^output 'y': found bytes that are no UTF-8.*ask for this output as binary"
    ):
        json_from_tensor(objects_array([b"\xff"], (1,)), BYTES, "output 'y'")
