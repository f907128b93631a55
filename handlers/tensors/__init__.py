"""Tensors of the Open Inference Protocol: datatypes, shapes and the server's internal content type.

This module, `codec.py` and `list_text.py` validate tensors from clients. Every failure is a `TensorError`
that names the field. Time and memory are bounded by the size of the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

MAX_DIMENSIONS = 32  # the limit of NumPy 1; inputs of models have fewer than ten dimensions
LARGEST_SIZE = 2**63 - 1  # of one dimension, because the protocol's shapes are int64
MAX_ELEMENTS = 2**56  # exceeds any machine's memory, and the size in bytes does not overflow in NumPy
TENSOR_TYPE = "application/vnd.torchere.tensor"
"""Content type of a value that is one tensor's raw bytes; datatype and shape follow as its parameters."""


class TensorError(ValueError):
    """A tensor of a request is invalid; the text names the field, the found and the expected value."""

    def __init__(self, field: str, found: str, expected: str) -> None:
        super().__init__(f"{field}: found {found}, expected {expected}")


@dataclass(frozen=True, slots=True)
class Datatype:
    """One datatype of the protocol.

    `numpy` is the dtype in the protocol's byte order, little-endian; None for BF16, which numpy lacks.
    Handlers get BF16 as torch tensors, and processes without torch hold the values as float32. `item_bytes`
    is 0 for BYTES, whose elements each have their own length.
    """

    name: str
    numpy: np.dtype[Any] | None
    item_bytes: int
    torch_name: str  # the attribute of torch that is its dtype; "" where torch has none


@dataclass(frozen=True, slots=True)
class Output:
    """One output of an answer.

    `tensor` is a numpy array of its datatype; for BF16, a torch CPU tensor or a float32 array. `parameters`
    come from a handler that writes the protocol's JSON itself.
    """

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    tensor: Any
    parameters: Mapping[str, Any] | None = None


def _number(name: str) -> Datatype:
    common = name.lower().replace("fp", "float")  # NumPy and torch share this name
    dtype = np.dtype(np.dtype(common).newbyteorder("<").str)
    return Datatype(name, dtype, dtype.itemsize, common)


# Open Inference Protocol, "Tensor Data Types"; BF16 is the extension that Triton and KServe share.
_NUMBERS = "BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64"
BYTES = Datatype("BYTES", np.dtype("O"), 0, "")
BF16 = Datatype("BF16", None, 2, "bfloat16")
DATATYPES = {datatype.name: datatype for datatype in (*map(_number, _NUMBERS.split()), BYTES, BF16)}
_OF_NUMPY = {datatype.numpy: datatype for datatype in DATATYPES.values() if datatype.numpy is not None}
_OF_TORCH = {datatype.torch_name: datatype for datatype in DATATYPES.values() if datatype.torch_name}


def datatype_named(name: object, field: str) -> Datatype:
    """Return the datatype of that name; case matters.

    Raises:
        TensorError: the protocol has no datatype of that name.
    """
    datatype = DATATYPES.get(name) if isinstance(name, str) else None
    if datatype is None:
        raise TensorError(field, shown(name), f"one of {', '.join(DATATYPES)}")
    return datatype


def datatype_of_array(dtype: np.dtype[Any]) -> Datatype | None:
    """Return the datatype of a numpy dtype in any byte order (strings: BYTES); None for other dtypes."""
    if dtype.kind in "SU":
        return BYTES
    return _OF_NUMPY.get(dtype.newbyteorder("<"))


def datatype_of_torch(dtype: object) -> Datatype | None:
    """Return the datatype of a torch dtype, or None if the protocol has none."""
    return _OF_TORCH.get(str(dtype).removeprefix("torch."))


def check_shape(shape: Sequence[object], field: str) -> tuple[int, ...]:
    """Return a valid shape as a tuple: at most `MAX_DIMENSIONS` sizes from 0 to `LARGEST_SIZE`.

    Raises:
        TensorError: the shape is invalid, or has more than `MAX_ELEMENTS` elements.
    """
    if len(shape) > MAX_DIMENSIONS:
        raise TensorError(field, f"{len(shape)} dimensions", f"at most {MAX_DIMENSIONS}")
    elements = 1
    for index, size in enumerate(shape):
        if type(size) is not int or not 0 <= size <= LARGEST_SIZE:
            raise TensorError(f"{field}[{index}]", shown(size), f"a whole number from 0 to {LARGEST_SIZE}")
        elements *= size or 1  # a single 0 would hide other sizes that are too large for an array
    if elements > MAX_ELEMENTS:
        raise TensorError(field, shown(list(shape)), f"at most {MAX_ELEMENTS} elements")
    return tuple(shape)  # type: ignore[arg-type]  # all are int


def tensor_type(datatype: Datatype, shape: Sequence[int]) -> str:
    """Return the content type that carries a tensor's datatype and shape to the handler."""
    return f"{TENSOR_TYPE}; datatype={datatype.name}; shape={','.join(map(str, shape))}"


@lru_cache(maxsize=1024)  # clients send the same few shapes again and again
def parse_tensor_type(content_type: str) -> tuple[Datatype, tuple[int, ...]]:
    """Return the datatype and shape in a content type that `tensor_type` made.

    Raises:
        ValueError: the content type has another form.
    """
    _, _, rest = content_type.partition("; datatype=")
    name, found, sizes = rest.partition("; shape=")
    if not found:
        raise ValueError(f"{content_type[:80]!r} names no datatype and shape")
    shape = [int(size) for size in sizes.split(",")] if sizes else []
    return datatype_named(name, "datatype"), check_shape(shape, "shape")


def torch_dtype(datatype: Datatype) -> Any:
    """Return the torch dtype of a datatype other than BYTES; imports torch."""
    import torch  # noqa: PLC0415  # other users of this module, such as the frontend, run without torch

    return getattr(torch, datatype.torch_name)


def shown(value: object, levels: int = 4) -> str:
    """Return a short, escaped form of a value for an error text, with at most `levels` nested lists."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return "a whole number of more than 128 bits"
    if isinstance(value, (list, tuple)):
        if not levels:
            return "[...]"
        inner = ", ".join(shown(item, levels - 1) for item in value[:8])
        return f"[{inner}{', ...' if len(value) > 8 else ''}]"[:120]
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, str):
        return ascii(value[:80])
    return ascii(value)[:80]
