"""Datatypes, shapes, and the label a tensor has inside the server."""

import numpy as np
import pytest
import torch

from torchere.archiver import signature
from torchere.handlers.tensors import (
    BF16,
    DATATYPES,
    MAX_ELEMENTS,
    TensorError,
    check_shape,
    datatype_named,
    datatype_of_array,
    datatype_of_torch,
    parse_tensor_type,
    shown,
    tensor_type,
    torch_dtype,
)


def test_the_datatypes_are_those_a_signature_may_name() -> None:
    assert set(DATATYPES) == set(signature.DATATYPES)


@pytest.mark.parametrize("name", [name for name in DATATYPES if name not in ("BF16", "BYTES")])
def test_numpy_and_torch_agree_on_every_number(name: str) -> None:
    datatype = DATATYPES[name]
    assert datatype.numpy is not None
    assert datatype.numpy.itemsize == datatype.item_bytes
    assert torch.from_numpy(np.zeros(1, datatype.numpy)).dtype == torch_dtype(datatype)
    assert datatype_of_array(datatype.numpy) is datatype
    assert datatype_of_torch(torch_dtype(datatype)) is datatype


def test_bf16_is_torchs_alone() -> None:
    assert datatype_of_torch(torch.bfloat16) is BF16
    assert BF16.numpy is None


@pytest.mark.parametrize(
    ("code", "name"), [(">f4", "FP32"), ("=i8", "INT64"), ("U3", "BYTES"), ("O", "BYTES")]
)
def test_the_byte_order_of_an_array_does_not_matter(code: str, name: str) -> None:
    assert datatype_of_array(np.dtype(code)) is DATATYPES[name]


@pytest.mark.parametrize("code", ["c8", "M8[s]", [("a", "i4")]])
def test_what_the_protocol_has_no_datatype_for_has_none(code: object) -> None:
    assert datatype_of_array(np.dtype(code)) is None  # type: ignore[call-overload]


@pytest.mark.parametrize("name", ["fp32", "FP8", "", None, 3, ["FP32"], "x" * 1000])
def test_an_unknown_datatype_is_named_with_all_there_are(name: object) -> None:
    with pytest.raises(
        TensorError, match=r"^inputs\[0\]\.datatype: found .{,90}, expected one of BOOL, "
    ) as caught:
        datatype_named(name, "inputs[0].datatype")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("shape", [[], [0], [3, 0, 2**40], [2**56], [1] * 32])
def test_a_shape_may_have_any_sizes_an_array_can_have(shape: list[int]) -> None:
    assert check_shape(shape, "x") == tuple(shape)


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ([-1, 3], r"x\[0\]: found -1, expected a whole number from 0"),
        ([2, 2**63], r"x\[1\]: found 9223372036854775808, expected"),
        ([True], r"x\[0\]: found True, expected"),
        ([1.0], r"x\[0\]: found 1.0, expected"),
        (["1"], r"x\[0\]: found '1', expected"),
        ([None], r"x\[0\]: found None, expected"),
        ([2**32, 2**32], r"x: found \[4294967296, 4294967296\], expected at most"),
        ([2**62, 4, 0], r"x: found \[4611686018427387904, 4, 0\], expected at most"),
        ([10**4000], r"x\[0\]: found a whole number of more than 128 bits"),
        ([1] * 1000, r"x: found 1000 dimensions, expected at most 32"),
    ],
)
def test_a_shape_that_no_array_has_is_refused(shape: list[object], text: str) -> None:
    with pytest.raises(TensorError, match=f"^{text}"):
        check_shape(shape, "x")


def test_a_shape_with_a_zero_is_one_that_numpy_takes() -> None:
    assert np.zeros(0).reshape(check_shape([MAX_ELEMENTS, 0], "x")).size == 0


@pytest.mark.parametrize(("name", "shape"), [("FP32", (1, 64)), ("BYTES", ()), ("BF16", (0,))])
def test_a_label_is_read_as_it_was_written(name: str, shape: tuple[int, ...]) -> None:
    assert parse_tensor_type(tensor_type(DATATYPES[name], shape)) == (DATATYPES[name], shape)


@pytest.mark.parametrize(
    "label",
    [
        "application/vnd.torchere.tensor",
        "application/vnd.torchere.tensor; datatype=FP32",
        "application/vnd.torchere.tensor; datatype=FP32; shape=a",
        "application/vnd.torchere.tensor; datatype=FP31; shape=1",
    ],
)
def test_a_label_that_nobody_wrote_is_refused(label: str) -> None:
    with pytest.raises(ValueError, match=r"names no|invalid literal|expected one of"):
        parse_tensor_type(label)


@pytest.mark.parametrize(
    "value", ["x" * 10**6, list(range(10**5)), [10**9999], {"a": "b" * 10**6}, b"x" * 10**6]
)
def test_what_is_shown_of_a_value_is_short(value: object) -> None:
    assert len(shown(value)) <= 120


def test_of_deep_lists_the_first_levels_are_shown() -> None:
    deep: list[object] = [1]
    for _ in range(2000):
        deep = [deep]
    assert shown(deep) == "[[[[[...]]]]]"
    assert shown([[[[1]]]]) == "[[[[1]]]]"
