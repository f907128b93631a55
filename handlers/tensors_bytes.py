"""Converts tensors to and from raw little-endian bytes, the form of the binary extension and of gRPC."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from torchere.handlers.tensors import BF16, BYTES, Array, Datatype, TensorError, check_shape

_LENGTH = struct.Struct("<I")  # before each element of BYTES


def tensor_from_bytes(
    raw: bytes | bytearray | memoryview,
    datatype: Datatype,
    shape: Sequence[object],
    field: str = "tensor",
    *,
    writable: bool = False,
) -> Any:
    """Return raw bytes as a tensor for handlers.

    The result is a numpy array; a torch tensor for BF16, an array of `bytes` objects for BYTES. Without
    `writable` a numpy array of numbers is a view of the bytes, which are copied only if they are not aligned.
    There may be zero elements.

    Args:
        raw: all elements in row-major order.
        datatype: the type of the elements.
        shape: the shape, which is checked here.
        field: name for errors: `inputs[0]`.
        writable: copy the bytes, so that the caller may change the result and torch does not warn about it.

    Raises:
        TensorError: the shape, the number of bytes, or an element of BOOL or BYTES is invalid.
    """
    if datatype is BF16:
        sizes = check_shape(shape, f"{field}.shape")
        check_byte_count(len(raw), datatype, sizes, field)
        return _torch_bfloat16(raw, sizes)
    return array_from_bytes(raw, datatype, shape, field, writable=writable)


def array_from_bytes(
    raw: bytes | bytearray | memoryview,
    datatype: Datatype,
    shape: Sequence[object],
    field: str = "tensor",
    *,
    writable: bool = False,
) -> Array:
    """Do as `tensor_from_bytes` without torch: BF16 becomes float32, which can hold all BF16 values."""
    sizes = check_shape(shape, f"{field}.shape")
    check_byte_count(len(raw), datatype, sizes, field)
    if datatype is BYTES:
        return _objects(split_elements(raw, field), sizes, field)
    if datatype is BF16:
        return (np.frombuffer(raw, dtype="<u2").astype("<u4") << 16).view("<f4").reshape(sizes)
    flat = np.frombuffer(raw, dtype=datatype.numpy)
    if datatype.name == "BOOL" and flat.view(np.uint8).max(initial=0) > 1:
        raise TensorError(field, f"the byte {flat.view(np.uint8).max()}", "0 or 1 for each BOOL")
    if writable or not flat.flags.aligned:
        flat = flat.copy()  # numpy releases the GIL while it copies
    return flat.reshape(sizes)


def check_byte_count(found: int, datatype: Datatype, sizes: tuple[int, ...], field: str) -> None:
    """Check the number of bytes against the shape: exact, but for BYTES a minimum.

    Raises:
        TensorError: the number of bytes does not fit the shape.
    """
    count = math.prod(sizes)
    if datatype is BYTES:
        if found < count * _LENGTH.size:
            raise TensorError(field, f"{found} bytes", f"a length of 4 bytes before each of {count} elements")
        return
    expected = count * datatype.item_bytes
    if found != expected:
        what = f"{expected} bytes for {datatype.name} of shape {list(sizes)}"
        raise TensorError(field, f"{found} bytes", what)


def split_elements(raw: bytes | bytearray | memoryview, field: str) -> list[bytes]:
    """Split raw BYTES data into its elements, each of which follows its 4-byte length.

    Raises:
        TensorError: an element goes beyond the end, or the data end within a length.
    """
    view = memoryview(raw)
    elements: list[bytes] = []
    start = 0
    while start < len(view):
        if len(view) - start < _LENGTH.size:
            left = len(view) - start
            raise TensorError(f"{field}[{len(elements)}]", f"{left} bytes of a length", f"{_LENGTH.size}")
        (length,) = _LENGTH.unpack_from(view, start)
        start += _LENGTH.size
        if length > len(view) - start:
            found = f"a length of {length} with {len(view) - start} bytes left"
            raise TensorError(f"{field}[{len(elements)}]", found, "a length within the data")
        elements.append(bytes(view[start : start + length]))
        start += length
    return elements


def join_elements(elements: Sequence[bytes]) -> bytes:
    """Join BYTES elements, each after its 4-byte length."""
    joined = bytearray()  # a list of the parts would take many times the memory of millions of short elements
    for element in elements:
        joined += _LENGTH.pack(len(element))
        joined += element
    return bytes(joined)


def bytes_from_tensor(tensor: Any, datatype: Datatype) -> bytes:
    """Return the raw little-endian bytes of a numpy array in row-major order.

    For BF16 the tensor is a torch tensor on the CPU, or a float32 array, which is rounded. Elements of BYTES
    are `bytes`, or `str`, which is encoded as UTF-8.
    """
    if datatype is BYTES:
        return join_elements([element_bytes(element) for element in tensor.ravel().tolist()])
    return view_of_tensor(tensor, datatype).tobytes()


def view_of_tensor(tensor: Any, datatype: Datatype) -> memoryview:
    """Return the same bytes as `bytes_from_tensor`, without a copy if the tensor's memory has that layout."""
    if datatype is BYTES:
        return memoryview(bytes_from_tensor(tensor, datatype))
    if datatype is BF16:
        is_array = isinstance(tensor, np.ndarray)
        tensor, datatype = _bfloat16_bits(tensor) if is_array else _torch_bits(tensor), _BITS
    array: Array = np.ascontiguousarray(tensor, dtype=datatype.numpy)
    return array.reshape(-1).view(np.uint8).data


def element_bytes(element: object) -> bytes:
    """Return one element of BYTES; a value that is not bytes is converted by `str` to UTF-8."""
    if isinstance(element, (bytes, bytearray)):
        return bytes(element)
    return str(element).encode("utf-8", "surrogatepass")


def objects_array(elements: Sequence[object], sizes: tuple[int, ...]) -> Array:
    """Return an array of Python objects; `np.array` would make fixed-width strings and unpack sequences."""
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array.reshape(sizes)


_BITS = Datatype("UINT16", np.dtype("<u2"), 2, "uint16")


def _objects(elements: list[bytes], sizes: tuple[int, ...], field: str) -> Array:
    if len(elements) != math.prod(sizes):
        expected = f"{math.prod(sizes)} for shape {list(sizes)}"
        raise TensorError(field, f"{len(elements)} elements of BYTES", expected)
    return objects_array(elements, sizes)


def rounded_to_bfloat16(array: Array) -> Array:
    """Round to BF16, as float32: ties to even; values too large for BF16 become infinite."""
    with np.errstate(over="ignore"):
        exact = array.astype("<f4")
    return (_bfloat16_bits(exact).astype("<u4") << 16).view("<f4")


def _bfloat16_bits(array: Array) -> Array:
    """Return the upper 16 bits of each float32, rounded to nearest, ties to even, as torch rounds."""
    bits = np.ascontiguousarray(array, dtype="<f4").view("<u4")
    upper = bits >> 16
    rounded = (bits + (0x7FFF + (upper & 1))) >> 16
    # Rounding a NaN can overflow into its sign bit, and truncating a NaN can give an infinity.
    of_nan = np.where(upper & 0x7F, upper, upper | 0x40)
    return np.where(np.isnan(array), of_nan, rounded).astype("<u2")


def _torch_bits(tensor: Any) -> Array:
    import torch  # noqa: PLC0415  # the caller has a tensor, so its process has imported torch

    bits: Array = tensor.contiguous().view(torch.int16).numpy().view("<u2")
    return bits


def _torch_bfloat16(raw: bytes | bytearray | memoryview, sizes: tuple[int, ...]) -> Any:
    import torch  # noqa: PLC0415  # numpy has no such type

    if not len(raw):
        return torch.empty(sizes, dtype=torch.bfloat16)
    return torch.frombuffer(bytearray(raw), dtype=torch.bfloat16).reshape(sizes)
