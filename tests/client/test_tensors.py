import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchere.client import Tensor, UnreadableAnswer, tensor
from torchere.client.tensors import from_json, to_json

ARRAYS = {
    "BOOL": np.array([[True, False]]),
    "UINT8": np.array([[0, 255]], "u1"),
    "UINT16": np.array([[0, 65535]], "u2"),
    "UINT32": np.array([[0, 2**32 - 1]], "u4"),
    "UINT64": np.array([[0, 2**64 - 1]], "u8"),
    "INT8": np.array([[-128, 127]], "i1"),
    "INT16": np.array([[-(2**15), 2**15 - 1]], "i2"),
    "INT32": np.array([[-(2**31), 2**31 - 1]], "i4"),
    "INT64": np.array([[-(2**63), 2**63 - 1]], "i8"),
    "FP16": np.array([[0.5, -65504.0]], "f2"),
    "FP32": np.array([[0.1, 3.4e38]], "f4"),
    "FP64": np.array([[0.1, 1.7e308]], "f8"),
    "BYTES": np.array([["é".encode(), b""]], object),
}


@pytest.mark.parametrize("datatype", ARRAYS)
def test_every_array_comes_back_from_its_bytes(datatype: str) -> None:
    array = ARRAYS[datatype]
    made = tensor("x", array)
    assert (made.datatype, made.shape) == (datatype, array.shape)
    assert (made.numpy() == array).all()
    assert made.numpy().dtype == array.dtype


@pytest.mark.parametrize(
    ("value", "datatype"),
    [([[0.5, 1.0]], "FP32"), (0.5, "FP32"), ([1, 2], "INT64"), ([0.5, 1], "FP32"), (np.float64(0.5), "FP64")],
)
def test_floats_in_no_array_are_what_models_take(value: Any, datatype: str) -> None:
    made = tensor("x", value)
    assert made.datatype == datatype
    assert made.numpy().tolist() == np.asarray(value).tolist()


@pytest.mark.parametrize("datatype", [None, "BYTES"])
@pytest.mark.parametrize(
    ("value", "elements"),
    [
        ([b"a\0", b"\0", b""], [b"a\0", b"\0", b""]),
        (("a\0", "bc"), [b"a\0", b"bc"]),
        ([[b"a\0"], [b"b"]], [b"a\0", b"b"]),
        (b"a\0\0", [b"a\0\0"]),
    ],
)
def test_zeros_at_the_end_of_texts_are_sent(
    value: object, elements: list[bytes], datatype: str | None
) -> None:
    made = tensor("x", value, datatype)
    assert made.datatype == "BYTES"
    assert made.numpy().reshape(-1).tolist() == elements


@pytest.mark.parametrize("datatype", ARRAYS)
def test_every_array_comes_back_from_json(datatype: str) -> None:
    made = tensor("x", ARRAYS[datatype])
    assert from_json("x", datatype, made.shape, to_json(made)) == made


def test_big_endian_and_strided_arrays_are_sent_in_the_protocols_order() -> None:
    assert tensor("x", np.array([1, 2], ">i4")).data == b"\1\0\0\0\2\0\0\0"
    assert tensor("x", np.arange(6, dtype="u1").reshape(2, 3).T).data == bytes([0, 3, 1, 4, 2, 5])


def test_text_is_sent_as_bytes() -> None:
    assert tensor("x", ["a", "bc"]).data == b"\1\0\0\0a\2\0\0\0bc"
    assert tensor("x", "é").shape == ()


def test_bfloat16_is_rounded_to_nearest_and_read_as_float32() -> None:
    values = np.array([1.0, 1.00390625, 3.1415927, np.inf, np.nan, -0.0], "f4")
    made = tensor("x", values, "BF16")
    assert made.data == values.astype(ml_dtypes.bfloat16).tobytes()
    assert np.array_equal(made.numpy(), values.astype(ml_dtypes.bfloat16).astype("f4"), equal_nan=True)
    assert tensor("x", values.astype(ml_dtypes.bfloat16)) == made


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=20))
def test_bfloat16_rounds_as_others_do(values: list[float]) -> None:
    array = np.array(values, "f4")
    with np.errstate(over="ignore"):
        assert tensor("x", array, "BF16").data == array.astype(ml_dtypes.bfloat16).tobytes()


def test_a_tensor_is_sent_as_it_is() -> None:
    assert tensor("new", Tensor("old", "FP32", (1,), b"1234")) == Tensor("new", "FP32", (1,), b"1234")


@pytest.mark.parametrize(
    ("value", "datatype"),
    [
        (300, "UINT8"),
        (1.5, "INT32"),
        (-1, "UINT64"),
        (2, "BOOL"),
        (1e39, "FP32"),
        (10**39, "FP32"),
        (7e4, "FP16"),
        (1 + 2j, "FP32"),
        (1 + 2j, "BF16"),
    ],
)
def test_values_that_do_not_fit_are_refused(value: Any, datatype: str) -> None:
    with pytest.raises(ValueError, match=f"do not fit {datatype}"):
        tensor("x", [value], datatype)


def test_infinite_floats_stay_so_and_those_that_would_become_it_are_refused() -> None:
    assert tensor("x", [np.inf, -np.inf, np.nan, 1.5]).numpy().tolist()[:2] == [np.inf, -np.inf]
    with pytest.raises(ValueError, match="do not fit FP32"):
        tensor("x", [1e39, np.inf])
    assert tensor("x", np.array([1e39])).datatype == "FP64"


def test_what_the_protocol_has_no_name_for_is_refused() -> None:
    with pytest.raises(TypeError, match="complex128 can't be sent"):
        tensor("x", np.array([1j]))
    with pytest.raises(ValueError, match="found datatype 'FP8'"):
        tensor("x", [1], "FP8")
    with pytest.raises(TypeError, match="an element of BYTES is a dict"):
        tensor("x", np.array([{}], object))


@pytest.mark.parametrize(
    "wrong",
    [
        Tensor("x", "FP32", (2,), b"1234"),
        Tensor("x", "FP32", (1,), b"123"),
        Tensor("x", "FP8", (4,), b"1234"),
        Tensor("x", "BYTES", (1,), b"\5\0\0\0abc"),
        Tensor("x", "BYTES", (1,), b"\5\0"),
        Tensor("x", "BYTES", (2,), b"\1\0\0\0a"),
    ],
)
def test_bytes_that_are_no_such_tensor_are_told(wrong: Tensor) -> None:
    with pytest.raises(UnreadableAnswer, match="'x'"):
        wrong.numpy()


@pytest.mark.parametrize(
    ("datatype", "values"), [("FP32", [1]), ("INT8", [1, 300]), ("UINT64", [1, -1]), ("FP32", ["a", "b"])]
)
def test_json_that_is_no_such_tensor_is_told(datatype: str, values: list[object]) -> None:
    with pytest.raises(UnreadableAnswer, match="'x'"):
        from_json("x", datatype, (2,), values)


def test_nested_json_is_read() -> None:
    assert from_json("x", "INT32", (2, 2), [[1, 2], [3, 4]]).numpy().tolist() == [[1, 2], [3, 4]]


def test_without_numpy_everything_but_arrays_works() -> None:
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "import torchere.client as c; c.Client().close(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
