"""Converts tensors to and from raw little-endian bytes, the form of the binary extension and of gRPC."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import orjson

from torchere.handlers.tensors import (
    BF16,
    BYTES,
    DATATYPES,
    MAX_DIMENSIONS,
    Array,
    Datatype,
    TensorError,
    check_shape,
    shown,
)

_LENGTH = struct.Struct("<I")  # before each element of BYTES
_NUMPYS_MAX_DIMENSIONS = 64


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
        elements = split_elements(raw, field)
        if len(elements) != math.prod(sizes):
            expected = f"{math.prod(sizes)} for shape {list(sizes)}"
            raise TensorError(field, f"{len(elements)} elements of BYTES", expected)
        return objects_array(elements, sizes)
    if datatype is BF16:
        return (np.frombuffer(raw, dtype="<u2").astype("<u4") << 16).view("<f4").reshape(sizes)
    flat = np.frombuffer(raw, dtype=datatype.numpy)
    if datatype.name == "BOOL" and flat.view(np.uint8).max(initial=0) > 1:
        raise TensorError(field, f"the byte {flat.view(np.uint8).max()}", "0 or 1 for each BOOL")
    if writable or not flat.flags.aligned:
        flat = flat.copy()  # numpy releases the GIL while it copies
    return flat.reshape(sizes)


def check_byte_count(found: int, datatype: Datatype, sizes: tuple[int, ...], field: str) -> None:
    """Check the number of bytes against the shape, which gives the exact number, or for BYTES a minimum.

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
        TensorError: an element goes beyond the end of the data, or the data end within a length.
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
        tensor, datatype = _bfloat16_bits(tensor) if is_array else _torch_bits(tensor), DATATYPES["UINT16"]
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


def begins_with_text(value: object) -> bool:
    """Return whether a value, or the first element of its nested lists, is a text or bytes.

    Then `np.array` needs `dtype=object`, because an array of texts stores each at the length of the longest,
    and cuts zeros off their ends.
    """
    for _ in range(_NUMPYS_MAX_DIMENSIONS):
        if not (isinstance(value, (list, tuple)) and value):
            break
        value = value[0]
    return isinstance(value, (str, bytes))


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


# Converts tensors to and from Open Inference Protocol JSON: a list, flat or nested.
#
# JSON has no NaN and no infinity. Requests may have them as strings or, within limits, without quotes
# (`quoted_non_finite`). Answers have them as Python's `json` and Triton write them: `NaN`, `Infinity`.

_NUMBERS = frozenset({int, float})
_LISTS = frozenset({list})
# The JSON types that each kind of datatype accepts, and their name for errors.
_ALLOWED: dict[str, tuple[frozenset[type], str]] = {
    "b": (frozenset({bool, int}), "true, false, 0 or 1"),
    "u": (frozenset({int}), "whole numbers"),
    "i": (frozenset({int}), "whole numbers"),
    "f": (_NUMBERS, "numbers"),
    "O": (frozenset({str}), "texts"),
}
_FLOAT64 = np.dtype("<f8")
# The names of numbers that JSON lacks, as proto3's JSON mapping writes them.
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_MARKS = {b"-Infinity": b"\x01", b"Infinity": b"\x02", b"NaN": b"\x03"}  # bytes that JSON can't contain
# An unterminated string matches to the end of the body; else the search would begin again at its next quote.
_TEXT_OR_NAME = re.compile(rb'("(?:[^"\\]+|\\.)*"?)|-?Infinity|NaN')
# Limit on the quotes, on the escapes, and on the names if strings may hold some: with more of them, it takes
# milliseconds to tell the names of numbers from strings.
_MAX_FOUND = 10_000
# The errors of msgspec for invalid JSON; bytes that are not UTF-8 can raise UnicodeDecodeError.
NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def quoted_non_finite(text: bytes | memoryview) -> bytes | None:
    """Return the JSON text with `NaN`, `Infinity` and `-Infinity` as strings; None if it contains none.

    Python and Triton write these numbers without quotes, and parsers of strict JSON refuse them. A text that
    exceeds a limit (`_MAX_FOUND`) also gives None; long tensors have few quotes.
    """
    text = bytes(text)
    if (b"NaN" not in text and b"Infinity" not in text) or text.count(b'"') > _MAX_FOUND:
        return None
    quoted = text.split(b'"')[1::2]  # the strings, if no quote is escaped
    if b"\\" not in text and not any(b"NaN" in part or b"Infinity" in part for part in quoted):
        for name, mark in _MARKS.items():
            text = text.replace(name, mark)
        for name, mark in _MARKS.items():
            text = text.replace(mark, b'"%b"' % name)
        return text
    if text.count(b"NaN") + text.count(b"Infinity") > _MAX_FOUND or text.count(b"\\") > _MAX_FOUND:
        return None
    return _TEXT_OR_NAME.sub(lambda found: found[1] or b'"%b"' % found[0], text)


def tensor_from_json(data: object, datatype: Datatype, shape: Sequence[object], field: str) -> Any:
    """Return parsed JSON as a numpy array for handlers; BF16 as a torch tensor, BYTES as `bytes` objects.

    Arguments and errors are those of `array_from_json`.
    """
    array = array_from_json(data, datatype, shape, field)
    if datatype is not BF16:
        return array
    import torch  # noqa: PLC0415  # numpy has no such type

    return torch.from_numpy(array).to(torch.bfloat16)


def array_from_json(data: object, datatype: Datatype, shape: Sequence[object], field: str) -> Array:
    """Return parsed JSON as a numpy array; BF16 as rounded float32, BYTES as UTF-8 `bytes` objects.

    Args:
        data: a list in row-major order, flat or nested; the lists of a level have one size, which may be
            another than that of `shape`, as in Triton.
        datatype: the type of the elements; numbers are never rounded to integers and never wrap around.
        shape: the shape, which is checked here.
        field: name for errors: `inputs[0]`.

    Raises:
        TensorError: the data or the shape is invalid; names the field, and the index of an invalid element.
    """
    sizes = check_shape(shape, f"{field}.shape")
    name = f"{field}.data"
    return array_from_elements(_flattened(data, sizes, name), datatype, name).reshape(sizes)


def array_from_elements(flat: list[Any], datatype: Datatype, name: str, first: int = 0) -> Array:
    """Return parsed elements as an array of one dimension; `first` is the index of `flat[0]` in errors.

    Raises:
        TensorError: an element is not one of the datatype; names its index.
    """
    kind = _kind(datatype)
    allowed = _ALLOWED[kind][0]
    types = set(map(type, flat))
    if kind == "f" and str in types:
        flat = [_NON_FINITE.get(item, item) if type(item) is str else item for item in flat]
        types = set(map(type, flat))
    if not types <= allowed:
        place, item = next((i, item) for i, item in enumerate(flat) if type(item) not in allowed)
        raise wrong_type(kind_of(item), datatype, name, first + place)
    if datatype is BYTES:
        return objects_array([text.encode("utf-8", "surrogatepass") for text in flat], (len(flat),))
    if kind == "f":
        return _floats(flat, datatype, name, first)
    lowest, highest = _range(datatype)
    if flat and not lowest <= min(flat) <= max(flat) <= highest:
        place, item = next((i, item) for i, item in enumerate(flat) if not lowest <= item <= highest)
        raise TensorError(
            f"{name}[{first + place}]", shown(item), f"{datatype.name}, which is from {lowest} to {highest}"
        )
    return np.array(flat, dtype=datatype.numpy)


def wrong_type(found: str, datatype: Datatype, name: str, place: int) -> TensorError:
    """Return the error for an element whose JSON type the datatype does not accept."""
    return TensorError(f"{name}[{place}]", found, f"{_ALLOWED[_kind(datatype)][1]} for {datatype.name}")


_AS_BINARY = "ask for this output as binary data"


def json_from_tensor(tensor: Any, datatype: Datatype, field: str, advice: str = _AS_BINARY) -> msgspec.Raw:
    """Encode a tensor's elements as a flat JSON list in row-major order.

    `advice` ends the text of the error.

    Raises:
        TensorError: an element of BYTES is not UTF-8, which JSON can't carry.
    """
    if datatype is BYTES:
        texts = [_text(element, field, advice) for element in tensor.flatten().tolist()]
        return msgspec.Raw(msgspec.json.encode(texts))
    if datatype is BF16 and not isinstance(tensor, np.ndarray):  # see `bytes_from_tensor`
        tensor = tensor.double().numpy()
    # orjson writes a float32 with fewer digits, which a client would parse as another double.
    dtype = _FLOAT64 if datatype.numpy is None or datatype.numpy.kind == "f" else datatype.numpy
    flat = tensor.astype(dtype, order="C").ravel()  # a copy: orjson reads aligned memory without gaps
    if dtype is _FLOAT64 and not np.isfinite(flat).all():
        return msgspec.Raw(json.dumps(flat.tolist()).encode())
    return msgspec.Raw(orjson.dumps(flat, option=orjson.OPT_SERIALIZE_NUMPY))


def _flattened(data: object, sizes: tuple[int, ...], name: str) -> list[Any]:
    count = math.prod(sizes)
    if not isinstance(data, list):
        if not sizes and data is not None and not isinstance(data, dict):
            return [data]  # a scalar tensor may have no list
        raise TensorError(name, kind_of(data), f"a list of {count} elements")
    flat = data
    if data and type(data[0]) is list:
        flat = _unnested(data, name)
    if len(flat) != count:
        raise TensorError(name, f"{len(flat)} elements", f"{count} for shape {list(sizes)}")
    return flat


def _unnested(data: list[Any], name: str) -> list[Any]:
    level, sizes = data, [len(data)]
    while level and type(level[0]) is list and len(sizes) < MAX_DIMENSIONS:
        size = len(level[0])
        if not (_LISTS.issuperset(map(type, level)) and {size}.issuperset(map(len, level))):
            place, item = next(
                (i, item) for i, item in enumerate(level) if type(item) is not list or len(item) != size
            )
            found = f"{len(item)} elements" if type(item) is list else kind_of(item)
            raise irregular(found, name, place, (*sizes, size))
        sizes.append(size)
        level = list(chain.from_iterable(level))
    return level


def irregular(found: str, name: str, place: int, sizes: Sequence[int]) -> TensorError:
    """Return the error for an item of a flattened level that is not a list of the last of `sizes`."""
    expected = f"a list of {sizes[-1]}, as the list before it"
    return TensorError(f"{name}{_index_of(place, sizes[:-1])}", found, expected)


def _index_of(place: int, sizes: Sequence[int]) -> str:
    """Return the index in nested lists, such as `[1][3]`, of an item of a flattened level."""
    steps = []
    for size in reversed(sizes):
        place, step = divmod(place, size)
        steps.append(f"[{step}]")
    return "".join(reversed(steps))


def _kind(datatype: Datatype) -> str:
    return "f" if datatype.numpy is None else datatype.numpy.kind


def _floats(flat: list[Any], datatype: Datatype, name: str, first: int) -> Array:
    try:
        exact: Array = np.array(flat, dtype=_FLOAT64)
    except OverflowError as err:  # an integer too large for a float
        place = next(i for i, item in enumerate(flat) if abs(item) >= 2**1024)
        raise _beyond(flat[place], datatype, name, first + place) from err
    if datatype is BF16:
        array = rounded_to_bfloat16(exact)
    else:
        with np.errstate(over="ignore"):
            array = exact.astype(datatype.numpy, copy=False)
    check_within(array, exact, datatype, name, first)
    return array


def check_within(cast: Array, exact: Array, datatype: Datatype, name: str, first: int = 0) -> None:
    """Raise TensorError if a number of `exact`, the elements from `first` on, became infinite in `cast`."""
    infinite = ~np.isfinite(cast)
    if infinite.any() and (overflows := infinite & np.isfinite(exact)).any():
        place = int(np.argmax(overflows))
        raise _beyond(float(exact.flat[place]), datatype, name, first + place)


def _beyond(item: float, datatype: Datatype, name: str, place: int) -> TensorError:
    return TensorError(f"{name}[{place}]", shown(item), f"a number within {datatype.name}")


def _range(datatype: Datatype) -> tuple[int, int]:
    if datatype.name == "BOOL":
        return 0, 1
    bits = 8 * datatype.item_bytes
    return (0, 2**bits - 1) if datatype.name.startswith("U") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _text(element: object, field: str, advice: str) -> str:
    if isinstance(element, str):
        return element
    if not isinstance(element, (bytes, bytearray)):
        return str(element)
    try:
        return bytes(element).decode()
    except UnicodeDecodeError as err:
        expected = f"UTF-8, as JSON carries texts only; {advice}"
        raise TensorError(field, "bytes that are no UTF-8", expected) from err


def kind_of(item: object) -> str:
    """Return a short form of parsed JSON for error texts."""
    if isinstance(item, list):
        return "a list"
    return "nothing" if item is None else shown(item)
