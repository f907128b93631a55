"""The models of the suite, which every target serves under the same names.

identity_<DATATYPE>   x [n, 4] -> y [n, 4], unchanged
echo_thread, _process x of any datatype and shape -> y, unchanged (a handler of the archive's own)
identity_process      x [n, 4] FP32 -> y, in a process
two                   a, b [n, 4] FP32 -> sum, difference
versioned             x [n, 1] FP32 -> y = x + version; versions 1 and 2
failing               x [n, 1] FP32 -> an error
streaming             x [1] INT32 -> y: x parts, each [1] INT32: 0, 1, 2 ...
summing               x [n, 1] INT32 -> y [1, 1]: the sum of its sequence so far
spare                 as identity_FP32; in the repository, not loaded
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

WIDTH = 4
SAMPLES: dict[str, Array] = {
    "BOOL": np.array([[True, False, False, True]]),
    "UINT8": np.array([[0, 1, 128, 255]], "u1"),
    "UINT16": np.array([[0, 1, 2**15, 2**16 - 1]], "u2"),
    "UINT32": np.array([[0, 1, 2**31, 2**32 - 1]], "u4"),
    "UINT64": np.array([[0, 1, 2**63, 2**64 - 1]], "u8"),
    "INT8": np.array([[0, 1, -128, 127]], "i1"),
    "INT16": np.array([[0, 1, -(2**15), 2**15 - 1]], "i2"),
    "INT32": np.array([[0, 1, -(2**31), 2**31 - 1]], "i4"),
    "INT64": np.array([[0, 1, -(2**63), 2**63 - 1]], "i8"),
    "FP16": np.array([[0, 1, -0.5, 65504]], "f2"),
    "BF16": np.array([[0, 1, -0.5, 3.0]], ml_dtypes.bfloat16),
    "FP32": np.array([[0, 1, -0.1, 3.4e38]], "f4"),
    "FP64": np.array([[0, 1, -0.1, 1.7e308]], "f8"),
    "BYTES": np.array([["é".encode(), b"", b"two words", b"x" * 300]], object),
}
TORCH = {
    "BOOL": "bool",
    "FP16": "float16",
    "BF16": "bfloat16",
    "FP32": "float32",
    "FP64": "float64",
    **{f"{sign}INT{bits}": f"{sign.lower()}int{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)},
}
