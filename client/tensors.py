"""Conversion between Open Inference Protocol tensors and NumPy arrays. NumPy is imported on first use."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchere.client.errors import UnreadableAnswer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

# NumPy type by the protocol's name, little-endian as on the wire. NumPy has no type for BF16 and BYTES.
_NUMPY = {
    "BOOL": "b1",
    "UINT8": "u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "INT8": "i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
}
_DATATYPES = {text.lstrip("<"): name for name, text in _NUMPY.items()}
DATATYPES = frozenset({*_NUMPY, "BF16", "BYTES"})
_LENGTH = struct.Struct("<I")  # before each element of BYTES


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named tensor. `data` holds its elements in row-major order, encoded as in the binary extension."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes

    def numpy(self) -> Array:
        """Return the tensor as an array: BF16 as float32, BYTES as objects of `bytes`.

        The array may be read-only, because it can share the memory of `data`.

        Raises:
            UnreadableAnswer: datatype, shape and data do not match.
        """
        try:
            return _array(self).reshape(self.shape)
        except (ValueError, struct.error) as err:
            raise UnreadableAnswer(
                f"tensor {self.name!r}: {len(self.data)} bytes are no {self.datatype} of shape "
                f"{list(self.shape)}: {err}"
            ) from err


def tensor(name: str, value: object, datatype: str | None = None) -> Tensor:
    """Make a tensor of an array, or of any value that `numpy.asarray` accepts.

    Args:
        name: the name of the input.
        value: an array, a number, a nested list; a `Tensor` is only renamed.
        datatype: the protocol's name; None derives it from the array. Text and `bytes` are BYTES, an array
            of `ml_dtypes.bfloat16` is BF16; "BF16" also accepts floats, and rounds them. Floats outside an
            array are FP32, the default of torch and the input type of nearly all models.

    Raises:
        TypeError: the array's type has no name in the protocol.
        ValueError: `datatype` is unknown, or it can't represent the values.
    """
    if isinstance(value, Tensor):
        return Tensor(name, value.datatype, value.shape, value.data)
    import numpy as np  # noqa: PLC0415 - an optional dependency

    # NumPy's string types strip NUL characters from the end of each element, and pad all to the longest.
    array = np.asarray(value, dtype=object if datatype == "BYTES" or _is_text(value) else None)
    if datatype is None:
        are_floats = array.dtype == np.float64 and not hasattr(value, "dtype")
        datatype = "FP32" if are_floats else _datatype_of(array)
    if datatype not in DATATYPES:
        raise ValueError(f"input {name!r}: found datatype {datatype!r}, expected one of {sorted(DATATYPES)}")
    return Tensor(name, datatype, array.shape, _data(array, datatype))


def _is_text(value: object) -> bool:
    """Return whether the first element of nested lists or tuples is text or `bytes`."""
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return isinstance(value, (str, bytes))


def _datatype_of(array: Array) -> str:
    if array.dtype.kind in "OSU":
        return "BYTES"
    if array.dtype.name == "bfloat16":
        return "BF16"
    found = _DATATYPES.get(array.dtype.str.lstrip("<>|"))
    if found is None:
        raise TypeError(f"an array of {array.dtype} can't be sent; expected one of {sorted(DATATYPES)}")
    return found


def from_json(name: str, datatype: str, shape: Sequence[int], values: object) -> Tensor:
    """Make a tensor from its JSON form; `values` may be flat or nested.

    Raises:
        UnreadableAnswer: datatype, shape and values do not match.
    """
    flat = _flat(values)
    if len(flat) != math.prod(shape):
        raise UnreadableAnswer(f"tensor {name!r}: {len(flat)} values for the shape {list(shape)}")
    try:
        array = flat if datatype == "BYTES" else _numbers(flat, datatype)
        made = tensor(name, array, datatype)
    except (TypeError, ValueError, OverflowError) as err:
        raise UnreadableAnswer(f"tensor {name!r}: the values are no {datatype}: {err}") from err
    return Tensor(name, datatype, tuple(shape), made.data)


def to_json(one: Tensor) -> list[Any]:
    """Return the values of a tensor as a flat list for JSON; BYTES must be UTF-8 text."""
    if one.datatype == "BYTES":
        return [element.decode() for element in _elements(one.data)]
    values: list[Any] = one.numpy().reshape(-1).tolist()
    return values


def _array(one: Tensor) -> Array:
    import numpy as np  # noqa: PLC0415

    if one.datatype == "BYTES":
        elements = list(_elements(one.data))
        array = np.empty(len(elements), dtype=object)
        array[:] = elements
        return array
    if one.datatype == "BF16":
        halves = np.frombuffer(one.data, dtype="<u2")
        return (halves.astype(np.uint32) << 16).view(np.float32)
    if one.datatype not in _NUMPY:
        raise UnreadableAnswer(f"tensor {one.name!r}: unknown datatype {one.datatype!r}")
    return np.frombuffer(one.data, dtype=_NUMPY[one.datatype])


def _data(array: Array, datatype: str) -> bytes:
    if datatype == "BYTES":
        return b"".join(_LENGTH.pack(len(text)) + text for text in map(_bytes, array.reshape(-1).tolist()))
    if array.dtype.kind == "c":
        raise ValueError(f"the values do not fit {datatype}: found complex numbers, expected real ones")
    if datatype == "BF16":
        return _bfloat16(array)
    import numpy as np  # noqa: PLC0415

    with np.errstate(over="ignore"):
        converted = array.astype(_NUMPY[datatype])
    # Rounding is allowed for floats, except to infinity; an integer must keep its exact value.
    if converted.dtype.kind == "f":
        fits = not np.isinf(converted).any() or np.array_equal(
            np.isinf(converted), np.isinf(array.astype(np.float64))
        )
    else:
        fits = (converted == array).all()
    if not fits:
        raise ValueError(f"the values do not fit {datatype}")
    return converted.tobytes()


def _bfloat16(array: Array) -> bytes:
    import numpy as np  # noqa: PLC0415

    if array.dtype.name == "bfloat16":
        return array.tobytes()
    bits = np.ascontiguousarray(array, dtype="<f4").view(np.uint32).astype(np.uint64)
    # Round to nearest, ties to even; a NaN stays a NaN for every payload.
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return np.where(np.isnan(array), np.uint16(0x7FC0), rounded).astype("<u2").tobytes()


def _bytes(element: object) -> bytes:
    if isinstance(element, bytes):
        return element
    if isinstance(element, str):
        return element.encode()
    raise TypeError(f"an element of BYTES is a {type(element).__name__}; expected bytes or str")


def _elements(data: bytes) -> Iterable[bytes]:
    position = 0
    while position < len(data):
        (length,) = _LENGTH.unpack_from(data, position)
        position += _LENGTH.size
        if position + length > len(data):
            raise ValueError(f"an element of {length} bytes, and {len(data) - position} are left")
        yield data[position : position + length]
        position += length


def _flat(values: object) -> list[Any]:
    level = values if isinstance(values, list) else [values]
    while any(isinstance(value, list) for value in level):
        level = [inner for value in level for inner in (value if isinstance(value, list) else [value])]
    return level


def _numbers(flat: list[Any], datatype: str) -> Array:
    import numpy as np  # noqa: PLC0415

    dtype = np.dtype(_NUMPY.get(datatype, "<f4"))
    if dtype.kind in "iu" and flat:
        limits, integers = np.iinfo(dtype), [int(value) for value in flat]
        if min(integers) < limits.min or max(integers) > limits.max:  # NumPy 1 would wrap them
            raise OverflowError(f"they are from {min(integers)} to {max(integers)}")
    return np.array(flat, dtype=dtype)
