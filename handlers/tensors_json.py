"""Converts tensors to and from Open Inference Protocol JSON: a list, flat or nested as the shape.

JSON has no NaN and no infinity, so a request can carry them in binary form only. Answers have them as
Python's `json` and Triton write them: `NaN`, `Infinity`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import orjson

from torchere.handlers.tensors import BF16, BYTES, Array, Datatype, TensorError, check_shape, shown
from torchere.handlers.tensors_bytes import objects_array, rounded_to_bfloat16

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
# The errors of msgspec for invalid JSON; bytes that are not UTF-8 can raise UnicodeDecodeError.
NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


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
        data: a flat list in row-major order, or lists nested as in `shape`.
        datatype: the type of the elements; numbers are never rounded to integers and never wrap around.
        shape: the shape, which is checked here.
        field: name for errors: `inputs[0]`.

    Raises:
        TensorError: the data or the shape is invalid; names the field, and the index of an invalid element.
    """
    sizes = check_shape(shape, f"{field}.shape")
    name = f"{field}.data"
    flat = _flattened(data, sizes, name)
    kind = "f" if datatype.numpy is None else datatype.numpy.kind
    _check_types(flat, kind, datatype, name)
    if datatype is BYTES:
        return objects_array([text.encode("utf-8", "surrogatepass") for text in flat], sizes)
    if kind == "f":
        return _floats(flat, datatype, name, sizes)
    lowest, highest = _range(datatype)
    if flat and not lowest <= min(flat) <= max(flat) <= highest:
        place, item = next((i, item) for i, item in enumerate(flat) if not lowest <= item <= highest)
        raise TensorError(
            f"{name}[{place}]", shown(item), f"{datatype.name}, which is from {lowest} to {highest}"
        )
    return np.array(flat, dtype=datatype.numpy).reshape(sizes)


def json_from_tensor(tensor: Any, datatype: Datatype, field: str) -> msgspec.Raw:
    """Encode a tensor's elements as a flat JSON list in row-major order.

    Raises:
        TensorError: an element of BYTES is not UTF-8, which JSON can't carry.
    """
    if datatype is BYTES:
        texts = [_text(element, field) for element in tensor.flatten().tolist()]
        return msgspec.Raw(msgspec.json.encode(texts))
    if datatype.numpy is None:
        tensor, dtype = tensor.double().numpy(), _FLOAT64
    else:  # orjson writes a float32 with fewer digits, which a client would parse as another double
        dtype = _FLOAT64 if datatype.numpy.kind == "f" else datatype.numpy
    flat = tensor.astype(dtype, order="C").ravel()  # a copy: orjson reads aligned memory without gaps
    if dtype is _FLOAT64 and not np.isfinite(flat).all():
        return msgspec.Raw(json.dumps(flat.tolist()).encode())
    return msgspec.Raw(orjson.dumps(flat, option=orjson.OPT_SERIALIZE_NUMPY))


def _flattened(data: object, sizes: tuple[int, ...], name: str) -> list[Any]:
    count = math.prod(sizes)
    if not isinstance(data, list):
        if not sizes and data is not None and not isinstance(data, dict):
            return [data]  # a scalar tensor may come bare
        raise TensorError(name, _kind_of(data), f"a list of {count} elements")
    flat = data
    if data and type(data[0]) is list:
        flat = _unnested(data, sizes, name)
    if len(flat) != count:
        raise TensorError(name, f"{len(flat)} elements", f"{count} for shape {list(sizes)}")
    return flat


def _unnested(data: list[Any], sizes: tuple[int, ...], name: str) -> list[Any]:
    level = [data]
    for depth, size in enumerate(sizes):
        if not (_LISTS.issuperset(map(type, level)) and {size}.issuperset(map(len, level))):
            place, item = next(
                (i, item) for i, item in enumerate(level) if type(item) is not list or len(item) != size
            )
            found = f"{len(item)} elements" if type(item) is list else _kind_of(item)
            raise TensorError(f"{name}{_index(place, sizes[:depth])}", found, f"a list of {size}")
        level = list(chain.from_iterable(level))
    return level


def _index(place: int, sizes: tuple[int, ...]) -> str:
    """Return the index in nested lists, such as `[1][3]`, of an item of a flattened level."""
    steps = []
    for size in reversed(sizes):
        place, step = divmod(place, size)
        steps.append(f"[{step}]")
    return "".join(reversed(steps))


def _check_types(flat: list[Any], kind: str, datatype: Datatype, name: str) -> None:
    allowed, words = _ALLOWED[kind]
    if allowed.issuperset(map(type, flat)):
        return
    place, item = next((i, item) for i, item in enumerate(flat) if type(item) not in allowed)
    raise TensorError(f"{name}[{place}]", _kind_of(item), f"{words} for {datatype.name}")


def _floats(flat: list[Any], datatype: Datatype, name: str, sizes: tuple[int, ...]) -> Array:
    try:
        exact: Array = np.array(flat, dtype=_FLOAT64)
    except OverflowError as err:  # an integer too large for a float
        place = next(i for i, item in enumerate(flat) if abs(item) >= 2**1024)
        raise TensorError(f"{name}[{place}]", shown(flat[place]), f"a number within {datatype.name}") from err
    if datatype is BF16:
        array = rounded_to_bfloat16(exact)
    else:
        with np.errstate(over="ignore"):
            array = exact.astype(datatype.numpy, copy=False)
    _refuse_infinite(np.isfinite(array), datatype, name, flat)
    return array.reshape(sizes)


def _refuse_infinite(finite: Array, datatype: Datatype, name: str, flat: list[Any]) -> None:
    if not finite.all():
        place = int(np.argmin(finite))
        raise TensorError(f"{name}[{place}]", shown(flat[place]), f"a number within {datatype.name}")


def _range(datatype: Datatype) -> tuple[int, int]:
    if datatype.name == "BOOL":
        return 0, 1
    bits = 8 * datatype.item_bytes
    return (0, 2**bits - 1) if datatype.name.startswith("U") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _text(element: object, field: str) -> str:
    if isinstance(element, str):
        return element
    if not isinstance(element, (bytes, bytearray)):
        return str(element)
    try:
        return bytes(element).decode()
    except UnicodeDecodeError as err:
        expected = "UTF-8, as JSON carries texts only; ask for this output as binary data"
        raise TensorError(field, "bytes that are no UTF-8", expected) from err


def _kind_of(item: object) -> str:
    if isinstance(item, list):
        return "a list"
    if isinstance(item, dict):
        return "an object"
    return "nothing" if item is None else shown(item)
