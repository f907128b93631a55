"""Reads and writes numpy's `.npy` files: without pickle; header sizes are checked against the data."""

from __future__ import annotations

import io
import math
from tokenize import TokenError

import numpy as np

from torchere.handlers.tensors import Array, TensorError, shown

MAGIC = b"\x93NUMPY"
NPY_TYPE = "application/x-npy"
MAX_HEADER_BYTES = 10_000  # numpy's own limit: the header is parsed as Python literals
# numpy's errors for a broken header; Python's parser raises MemoryError for deeply nested text.
_BROKEN = (ValueError, TypeError, LookupError, SyntaxError, TokenError, RecursionError, EOFError, MemoryError)


def is_npy(value: bytes | bytearray) -> bool:
    """Whether the bytes begin with the magic number of a `.npy` file."""
    return value[: len(MAGIC)] == MAGIC


def read_npy(value: bytes | bytearray, field: str, *, as_numpy: bool = False) -> Array:
    """Return the array of a `.npy` file, as a view of the file's bytes.

    Args:
        value: the file.
        field: names the file in errors.
        as_numpy: also take other types without Python objects, and bytes behind the array, as `numpy.load`.

    Raises:
        TensorError: the file is broken, does not hold numbers or booleans, or has the wrong size.
    """
    file = io.BytesIO(value)
    try:
        shape, fortran_order, dtype = _header(file)
    except _BROKEN as err:
        raise TensorError(field, f"a broken .npy file ({err!s:.200})", "one of format 1.0 or 2.0") from err
    if dtype.hasobject or not (as_numpy or dtype.kind in "biuf"):
        wanted = "values that are no Python objects" if as_numpy else "numbers or truth values"
        raise TensorError(field, f"a .npy file of {dtype!s:.80}", wanted)
    start, count = file.tell(), math.prod(shape)
    needed = count * dtype.itemsize
    left = len(value) - start - needed
    if min(shape, default=0) < 0 or left < 0 or (left and not as_numpy):
        raise TensorError(
            field,
            f"a .npy file of shape {shown(shape)} with {len(value) - start} bytes",
            f"{needed} bytes of {dtype!s:.80}",
        )
    try:
        flat = np.frombuffer(value, dtype=dtype, count=count, offset=start)
        return flat.reshape(shape[::-1]).transpose() if fortran_order else flat.reshape(shape)
    except (ValueError, OverflowError) as err:  # beside a size of 0, the others may be too large
        raise TensorError(field, f"a .npy file of shape {shown(shape)}", "sizes that arrays have") from err


def write_npy(array: Array) -> bytes:
    """Encode an array as a `.npy` file."""
    file = io.BytesIO()
    np.lib.format.write_array(file, array, allow_pickle=False)
    return file.getvalue()


def _header(file: io.BytesIO) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    version = np.lib.format.read_magic(file)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"format {version}")
    shape, fortran_order, dtype = readers[version](file, max_header_size=MAX_HEADER_BYTES)
    return tuple(map(int, shape)), bool(fortran_order), dtype
