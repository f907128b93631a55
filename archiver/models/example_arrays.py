"""Reads numpy's files, `.npy` and `.npz`, without pickle and without believing a header about sizes."""

from __future__ import annotations

import io
import math
import zipfile
from typing import Any

import numpy as np

_SUFFIX = ".npy"
_KINDS = "biuf"


def array_of(data: bytes) -> Any:
    """The array of a `.npy` file.

    Raises:
        ValueError: it holds no numbers, or fewer or more bytes than its header says.
        Exception: whatever numpy makes of a damaged header.
    """
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"a .npy file of format {version}; expected 1.0 or 2.0")
    shape, fortran_order, dtype = readers[version](file)
    check_numbers(dtype)
    start = file.tell()
    needed = math.prod(map(int, shape)) * dtype.itemsize
    if min(shape, default=0) < 0 or needed != len(data) - start:
        raise ValueError(f"a .npy file of {needed} bytes by its header, and of {len(data) - start} in truth")
    # The bytes of the file are not to be written.
    flat = np.frombuffer(data, dtype=dtype, offset=start).copy()
    return flat.reshape(shape, order="F" if fortran_order else "C")


def check_numbers(dtype: Any) -> None:
    """Raise ValueError for arrays of anything but numbers and truth values."""
    if dtype.kind not in _KINDS:
        raise ValueError(f"an array of {dtype}; expected numbers")


def arrays_of(package: zipfile.ZipFile) -> dict[str, Any]:
    """The arrays of a `.npz` file by name; raises as `array_of` does."""
    found = {}
    for info in package.infolist():
        if not info.filename.endswith(_SUFFIX):
            raise ValueError(f"{ascii(info.filename)[:60]} in it is no .npy")
        found[info.filename.removesuffix(_SUFFIX)] = array_of(package.read(info))
    return found


def holds_arrays(package: zipfile.ZipFile) -> bool:
    """Whether a zip is a `.npz`, and not a `.pt`."""
    return any(name.endswith(_SUFFIX) for name in package.namelist())
