"""Raw bytes to tensors and back."""

import struct

import numpy as np
import numpy.testing  # NumPy 1 starts a process at this import, which no unit test may
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchere.handlers.tensors import BF16, BYTES, DATATYPES, TensorError
from torchere.handlers.tensors.codec import (
    array_from_bytes,
    bytes_from_tensor,
    join_elements,
    objects_array,
    quoted_non_finite,
    rounded_to_bfloat16,
    split_elements,
    tensor_from_bytes,
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
