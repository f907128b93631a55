"""Parses a row, from `/predictions` or the Open Inference Protocol, into the inputs of one example.

A row holds one value for each input by its name (multipart fields, tensors), or all inputs in one body:

* JSON: `{"input": [...]}`, a bare nested list if the model has one input, `{"inputs": [row, ...]}` (or
  `instances`, as in KServe v1) where each row is a list, or an object with one list for each input;
* a `.npy` file, or raw little-endian bytes of exactly the size of the shape, if the model has one input.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from torchere.archiver.signature import ANY, Signature, TensorSpec
from torchere.handlers.row_value import fields_of
from torchere.handlers.tensors import (
    DATATYPES,
    Datatype,
    TensorError,
    datatype_of_array,
    datatype_of_torch,
    shown,
)
from torchere.handlers.tensors_bytes import tensor_from_bytes
from torchere.handlers.tensors_json import NO_JSON, tensor_from_json
from torchere.handlers.tensors_npy import is_npy, read_npy

_ROWS = ("inputs", "instances")
_OCTETS = "application/octet-stream"
_JSON_BEGINS = (b"[", b"{", b" ", b"\t", b"\r", b"\n")
_MAX_DEPTH = 64  # of lists in lists: torch has no more dimensions


class Example(NamedTuple):
    """The inputs of one request, in the signature's order, not validated yet.

    A value is nested lists, a numpy array or a torch tensor. With `single` the values have no batch
    dimension, and the answer has none either. `instances` asks for an answer in the KServe v1 format.
    """

    values: tuple[Any, ...]
    single: bool
    instances: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """A signature with derived values that are computed once, for parsing rows."""

    specs: tuple[TensorSpec, ...]  # of the inputs
    batched: bool
    names: tuple[str, ...]
    ranks: tuple[int, ...]
    single_ranks: tuple[int, ...] | None  # without the batch dimension; None: the model has none


def layout_of(signature: Signature) -> Layout:
    """Return the layout of a signature's inputs."""
    ranks = tuple(len(spec.shape) for spec in signature.inputs)
    single = tuple(rank - 1 for rank in ranks) if signature.batched else None
    names = tuple(spec.name for spec in signature.inputs)
    return Layout(signature.inputs, signature.batched, names, ranks, single)


def example_of(row: Mapping[str, Any], layout: Layout, content_type: str) -> Example:
    """Return the example in one row.

    Args:
        row: the row as the executor decoded it.
        layout: the layout of the model's inputs.
        content_type: the content type of the row's `body`, if it has one.

    Raises:
        TensorError: the row holds no example for this model; the text names the field.
    """
    if layout.names[0] in row and all(name in row for name in layout.names):
        return _example([_value(row[spec.name], spec, "") for spec in layout.specs], layout)
    body = row.get("data")
    if body is None:
        body = row.get("body")
    if body is None:
        raise TensorError("the request", fields_of(row), f"{_names(layout)}, or a body")
    return _of_body(_value(body, layout.specs[0], content_type), layout)


def tensors_of(example: Example, layout: Layout) -> list[Any]:
    """Return the validated inputs with the batch dimension, as numpy arrays (BF16: torch tensors).

    Raises:
        TensorError: the datatype or shape of an input does not match the signature, or the inputs have
            different numbers of rows.
    """
    tensors = [
        _tensor(value, spec, example.single) for value, spec in zip(example.values, layout.specs, strict=True)
    ]
    if layout.batched:
        rows = {len(tensor) for tensor in tensors}
        if len(rows) > 1:
            raise TensorError("the inputs", f"{sorted(rows)} rows", "the same number in each")
    return tensors


def _of_body(body: Any, layout: Layout) -> Example:
    if isinstance(body, dict):
        return _of_object(body, layout)
    if len(layout.names) > 1:
        raise TensorError("the body", _kind(body), f"an object with the inputs {_names(layout)}")
    return _example([body], layout)


def _of_object(body: dict[str, Any], layout: Layout) -> Example:
    if all(name in body for name in layout.names):
        return _example([body[name] for name in layout.names], layout)
    key = next((key for key in _ROWS if isinstance(body.get(key), list)), None)
    if key is None:
        found = ", ".join(map(shown, list(body)[:20])) or "an empty object"
        raise TensorError("the body", found, f"{_names(layout)}, or a list of rows in 'inputs'")
    if not layout.batched:
        raise TensorError(f"body.{key}", "a list of rows", "one example: the model takes no batches")
    return Example(_columns(body[key], key, layout.names), single=False, instances=key == "instances")


def _columns(rows: list[Any], key: str, names: Sequence[str]) -> tuple[list[Any], ...]:
    if len(names) == 1 and not any(isinstance(row, dict) for row in rows):
        return (rows,)
    for index, row in enumerate(rows):
        missing = [name for name in names if not isinstance(row, dict) or name not in row]
        if missing:
            raise TensorError(f"body.{key}[{index}]", _kind(row), f"an object with {shown(missing[0])}")
    return tuple([row[name] for row in rows] for name in names)


def _example(values: Sequence[Any], layout: Layout) -> Example:
    ranks = tuple([len(_shape_of(value)) if type(value) is list else _rank(value) for value in values])
    if ranks == layout.ranks:
        return Example(tuple(values), single=False)
    if ranks == layout.single_ranks:
        return Example(tuple(values), single=True)
    place = next(
        i for i, (rank, wanted) in enumerate(zip(ranks, layout.ranks, strict=True)) if rank != wanted
    )
    raise TensorError(layout.names[place], f"{ranks[place]} dimensions", _wanted(layout.specs[place]))


def _names(layout: Layout) -> str:
    return ", ".join(map(shown, layout.names))


def _rank(value: Any) -> int:
    return getattr(value, "ndim", 0)


def _value(value: Any, spec: TensorSpec, content_type: str) -> Any:
    """Parse bytes or text into an array or JSON; other values are returned unchanged."""
    if isinstance(value, str):
        return _parsed(value.encode(), spec.name)
    if not isinstance(value, (bytes, bytearray)):
        return value
    if not value:
        raise TensorError(spec.name, "an empty body", "JSON, a .npy file or raw bytes")
    if is_npy(value):
        return read_npy(value, spec.name)
    if content_type == _OCTETS or value[:1] not in _JSON_BEGINS:
        return _of_raw(value, spec)
    try:
        return _parsed(bytes(value), spec.name)
    except TensorError:
        with contextlib.suppress(TensorError):  # the first raw byte may equal a bracket
            return _of_raw(value, spec)
        raise


def _parsed(text: bytes, field: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except NO_JSON as err:
        raise TensorError(field, f"text that is no JSON ({err})", "JSON, a .npy file or raw bytes") from err


def _of_raw(value: bytes | bytearray, spec: TensorSpec) -> Any:
    """Return raw bytes as a tensor; the batch size follows from the number of bytes."""
    datatype = DATATYPES[spec.datatype]
    inner = spec.shape[1:] if spec.batched else spec.shape
    if ANY in inner:
        expected = f"JSON or a .npy file, as {_wanted(spec)}"
        raise TensorError(spec.name, f"{len(value)} raw bytes", expected)
    row_bytes = math.prod(inner) * datatype.item_bytes
    rows = max(1, len(value) // row_bytes) if row_bytes else 0
    shape_now = (rows, *inner) if spec.batched else inner
    return tensor_from_bytes(value, datatype, shape_now, spec.name, writable=True)


def _tensor(value: Any, spec: TensorSpec, single: bool) -> Any:
    datatype = DATATYPES[spec.datatype]
    if type(value) is list or not hasattr(value, "dtype"):
        tensor = tensor_from_json(value, datatype, _shape_of(value), spec.name)
    else:
        tensor = _cast(value, datatype, spec.name)
    if single:
        tensor = tensor[None]
    shape = tuple(tensor.shape)
    if len(shape) != len(spec.shape) or any(
        wanted not in (ANY, size) for size, wanted in zip(shape, spec.shape, strict=True)
    ):
        raise TensorError(spec.name, f"the shape {shown(shape[1:] if single else shape)}", _wanted(spec))
    return tensor


def _cast(value: Any, datatype: Datatype, field: str) -> Any:
    """Return an array or torch tensor in the wanted datatype; numpy floats are cast between precisions."""
    if isinstance(value, np.ndarray):
        found = datatype_of_array(value.dtype)
        if value.dtype.kind == "f" and datatype.numpy is not None and datatype.numpy.kind == "f":
            found = datatype
    else:
        found = datatype_of_torch(value.dtype)
    if found is not datatype:
        raise TensorError(field, found.name if found else str(value.dtype), datatype.name)
    if not isinstance(value, np.ndarray) or value.dtype == datatype.numpy:
        return value
    with np.errstate(over="ignore"):
        return value.astype(datatype.numpy)


def _wanted(spec: TensorSpec) -> str:
    return f"the shape {shown(spec.shape)} (-1 is any size)"


def _shape_of(value: Any) -> list[int]:
    """Return the sizes of nested lists, from the first item of each; at most `_MAX_DEPTH`."""
    shape: list[int] = []
    while type(value) is list and len(shape) < _MAX_DEPTH:
        shape.append(len(value))
        value = value[0] if value else None
    return shape


def _kind(value: object) -> str:
    if isinstance(value, list):
        return "a list"
    return shown(value)
