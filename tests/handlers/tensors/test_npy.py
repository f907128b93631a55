"""`.npy` files: numpy's own are read back, others are refused without being believed."""

import io
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchere.handlers.tensors import TensorError
from torchere.handlers.tensors.npy import is_npy, read_npy, write_npy


def saved(array: object) -> bytes:
    file = io.BytesIO()
    np.save(file, array)  # type: ignore[arg-type]
    return file.getvalue()


def with_header(header: str, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + data


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.asfortranarray(np.eye(3)[:2]),
        np.zeros((0, 4)),
        np.array(True),
    ],
)
def test_numpys_files_are_read_back(array: np.ndarray) -> None:
    for raw in (saved(array), write_npy(array)):
        assert is_npy(raw)
        back = read_npy(raw, "x")
        assert back.dtype == array.dtype
        assert back.shape == array.shape
        assert np.array_equal(back, array)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (saved(np.array([{}], dtype=object)), "a .npy file of object"),
        (saved(np.array([(1, 2.0)], dtype="i4,f8")), r"a .npy file of \[\('f0'"),
        (saved(np.array(["a"])), "a .npy file of <U1"),
        (saved(np.zeros(4))[:-1], r"shape \[4\] with 31 bytes, expected 32 bytes"),
        (saved(np.zeros(4)) + b"x", r"shape \[4\] with 33 bytes, expected 32 bytes"),
        (
            with_header("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }"),
            "with 0 bytes",
        ),
        (with_header("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,), }"), r"shape \[-1\]"),
        (with_header("{'descr': '<f8', 'shape': (1,)}"), "a broken .npy file"),
        (with_header("__import__('os').getpid()"), "a broken .npy file"),
        (with_header("(" * 200), "a broken .npy file"),
        (with_header("-" * 7000 + "1"), "a broken .npy file"),  # MemoryError of Python's parser before 3.14
        (with_header("{'descr': ('<f4',), 'fortran_order': False, 'shape': (1,)}"), "a broken .npy file"),
        (with_header(" " * 60000), "a broken .npy file"),
        (b"\x93NUMPY\x09\x00", r"a broken .npy file"),
        (b"\x93NUMPY", "a broken .npy file"),
    ],
)
def test_what_is_no_array_of_numbers_is_refused(raw: bytes, text: str) -> None:
    with pytest.raises(TensorError, match=f"^x: found .*{text}"):
        read_npy(raw, "x")


@pytest.mark.parametrize(
    "array",
    [
        np.array(["two words", "one"]),
        np.array("text"),
        np.array(1 + 2j),
        np.array(["2020-02-29"], dtype="M8[D]"),
        np.array([(1, "a")], dtype=[("number", "i4"), ("text", "U3")]),
        np.asfortranarray(np.eye(3)[:2]),
        np.zeros((0, 4)),
    ],
)
def test_all_that_numpy_takes_without_pickles_is_read_where_it_is_asked_for(array: np.ndarray) -> None:
    for behind in (b"", b"more"):
        back = read_npy(saved(array) + behind, "x", as_numpy=True)
        assert back.dtype == array.dtype
        assert back.shape == array.shape
        assert (back == array).all()


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (saved(np.array([{}], dtype=object)), "object, expected values that are no Python objects"),
        (
            saved(np.array([(1, {})], dtype=[("number", "i4"), ("any", "O")])),
            "expected values that are no Python objects",
        ),
        (saved(np.array(["a"]))[:-1], r"shape \[1\] with 3 bytes, expected 4 bytes of <U1"),
        (
            with_header("{'descr': '<U9', 'fortran_order': False, 'shape': (1000000000000,), }"),
            "with 0 bytes",
        ),
        (
            with_header("{'descr': '<U0', 'fortran_order': False, 'shape': (10000000000000000000000,), }"),
            "expected sizes that arrays have",
        ),
    ],
)
def test_objects_and_sizes_that_no_data_follows_are_refused_there_too(raw: bytes, text: str) -> None:
    with pytest.raises(TensorError, match=f"^x: found .*{text}"):
        read_npy(raw, "x", as_numpy=True)


@given(st.integers(0, 200), st.binary(min_size=1, max_size=3))
def test_a_damaged_file_is_read_or_refused(place: int, damage: bytes) -> None:
    raw = bytearray(saved(np.arange(8)))
    raw[place : place + len(damage)] = damage
    try:
        assert read_npy(bytes(raw), "x").size <= len(raw)
        assert read_npy(bytes(raw), "x", as_numpy=True).nbytes <= len(raw)
    except TensorError as err:
        assert str(err).startswith("x: found")
