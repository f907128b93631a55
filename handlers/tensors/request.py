"""Parses a row, from `/predictions` or the Open Inference Protocol, into the inputs of one example.

A row has a value for each input, under its name (multipart fields, tensors), or one body with all inputs:

* JSON: `{"input": [...]}`, a bare nested list if the model has one input, `{"inputs": [row, ...]}` (or
  `instances`, as in KServe v1) where each row is a list, or an object with one list for each input;
* a `.npy` file, or raw little-endian bytes of exactly the size of the shape, if the model has one input.

A field of a form is one of these, or the text of a number for an input without dimensions.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from torchere.archiver.signature import ANY, Limit, Signature, TensorSpec
from torchere.handlers.rows import fields_of
from torchere.handlers.tensors import (
    DATATYPES,
    Datatype,
    TensorError,
    datatype_of_array,
    datatype_of_torch,
    shown,
)
from torchere.handlers.tensors.codec import (
    NO_JSON,
    check_within,
    quoted_non_finite,
    tensor_from_bytes,
    tensor_from_json,
)
from torchere.handlers.tensors.npy import is_npy, read_npy

_ROWS = ("inputs", "instances")
_OCTETS = "application/octet-stream"
_JSON_BEGINS = (b"[", b"{", b" ", b"\t", b"\r", b"\n")
# One number as text. Raw values of four or more bytes hardly ever look so; those of one or two bytes may.
_NUMBER = re.compile(rb"[-+.0-9][-+.0-9eE]*[ \t\r\n]*|-?Infinity|NaN")
_NUMBER_BYTES = 4
_PRINTABLE = bytes(range(32, 127)) + b"\t\r\n"
_ENCODED = (str, bytes, bytearray)  # types of values that are still encoded
_MAX_DEPTH = 64  # of nested lists, because torch has no more dimensions


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
    most_rows: int | None = None  # that the model takes at once


def layout_of(signature: Signature) -> Layout:
    """Return the layout of a signature's inputs."""
    ranks = tuple(len(spec.shape) for spec in signature.inputs)
    single = tuple(rank - 1 for rank in ranks) if signature.batched else None
    names = tuple(spec.name for spec in signature.inputs)
    most = [limit.most for spec in signature.inputs for limit in spec.limits if limit.dimension == 0]
    most_rows = min((rows for rows in most if rows), default=None) if signature.batched else None
    return Layout(signature.inputs, signature.batched, names, ranks, single, most_rows)


def example_of(row: Mapping[str, Any], layout: Layout, type_of: Callable[[str], str]) -> Example:
    """Return the example that one row of the batch holds.

    Args:
        row: the row as the executor decoded it.
        layout: the layout of the model's inputs.
        type_of: returns the content type of the value with a given name; "" if the client gave none.

    Raises:
        TensorError: the row holds no example for this model; the text names the field.
    """
    if layout.names[0] in row and all(name in row for name in layout.names):
        values = [row[name] for name in layout.names]
        for place, spec in enumerate(layout.specs):
            if isinstance(values[place], _ENCODED):
                values[place] = _value(values[place], spec, _said(spec.name, type_of))
        return _example(values, layout)
    name = "data" if row.get("data") is not None else "body"
    body = row.get(name)
    if body is None:
        raise TensorError("the request", fields_of(row), f"{_names(layout)}, or a body")
    if isinstance(body, _ENCODED):
        body = _value(body, layout.specs[0], _said(name, type_of))
    return _of_body(body, layout)


def _said(name: str, type_of: Callable[[str], str]) -> str:
    """Return the content type of a value, except the one that clients give to any file in a form."""
    said = type_of(name)
    return "" if said == _OCTETS and name != "body" else said


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
    _check_shared_sizes(tensors, layout, example.single)
    return tensors


def _check_shared_sizes(tensors: Sequence[Any], layout: Layout, single: bool) -> None:
    """Raise TensorError unless dimensions of one name have one size, such as those of ids and their mask."""
    first: dict[str, tuple[int, TensorSpec, Limit]] = {}  # the size of a name, and where it was found
    for tensor, spec in zip(tensors, layout.specs, strict=True):
        for limit in spec.limits:
            if not limit.name:
                continue
            size = tensor.shape[limit.dimension]
            wanted, other, there = first.setdefault(limit.name, (size, spec, limit))
            if size != wanted:
                raise TensorError(
                    spec.name,
                    f"the shape {shown(tuple(tensor.shape)[single:])}",
                    f"the size {wanted} of dimension {limit.dimension - single}, as {other.name} "
                    f"has it in dimension {there.dimension - single}",
                )


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
        raise TensorError("the body", found, f"{_names(layout)}, or rows in 'inputs' or 'instances'")
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
    ranks = tuple(
        [len(_shape_of(value)) if type(value) is list else getattr(value, "ndim", 0) for value in values]
    )
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


def _value(value: str | bytes | bytearray, spec: TensorSpec, content_type: str) -> Any:
    """Parse bytes or text into an array or JSON."""
    if isinstance(value, str):
        return _parsed(value.encode(), spec.name)
    if not value:
        raise TensorError(spec.name, "an empty body", "JSON, a .npy file or raw bytes")
    if is_npy(value):
        return read_npy(value, spec.name)
    if _is_json(content_type):
        return _parsed(bytes(value), spec.name, f"JSON, or raw bytes with the content type {_OCTETS}")
    if content_type == _OCTETS:
        return _of_raw(value, spec)
    return _of_json_or_raw(value, spec)


def _of_json_or_raw(value: bytes | bytearray, spec: TensorSpec) -> Any:
    """Parse bytes that look like JSON; return them as a tensor if they can't be JSON."""
    item_bytes = DATATYPES[spec.datatype].item_bytes
    is_number = item_bytes >= _NUMBER_BYTES and _NUMBER.fullmatch(value)
    if not is_number and value[:1] not in _JSON_BEGINS:
        return _of_raw(value, spec)
    try:
        return _parsed(bytes(value), spec.name)
    except TensorError:
        # The first raw byte may equal a bracket; but numbers of several bytes are not all printable.
        if item_bytes > 1 and not bytes(value).translate(None, _PRINTABLE):
            raise
        with contextlib.suppress(TensorError):
            return _of_raw(value, spec)
        raise


def _is_json(content_type: str) -> bool:
    """Return whether a content type, without parameters, is that of JSON."""
    lowered = content_type.lower()
    return lowered == "application/json" or lowered.endswith("+json")


def _parsed(text: bytes, field: str, expected: str = "JSON, a .npy file or raw bytes") -> Any:
    try:
        return msgspec.json.decode(text)
    except NO_JSON as err:
        quoted = quoted_non_finite(text)
        if quoted is not None:
            with contextlib.suppress(*NO_JSON):
                return msgspec.json.decode(quoted)
        raise TensorError(field, f"text that is no JSON ({err})", expected) from err


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
    elif tuple(tensor.shape) == (0,) and spec.batched and ANY not in spec.shape[1:]:
        tensor = tensor.reshape((0, *spec.shape[1:]))  # an empty list of rows
    shape = tuple(tensor.shape)
    if len(shape) != len(spec.shape) or any(
        wanted not in (ANY, size) for size, wanted in zip(shape, spec.shape, strict=True)
    ):
        raise TensorError(spec.name, f"the shape {shown(shape[1:] if single else shape)}", _wanted(spec))
    if spec.limits and (limit := spec.exceeded(shape)) is not None:
        raise TensorError(spec.name, f"the shape {shown(shape)}", str(limit))
    if (values := spec.values) is not None and math.prod(shape):
        for found in (int(tensor.min()), int(tensor.max())):
            if not values.least <= found <= values.most:
                raise TensorError(spec.name, f"the number {found}", str(values))
    return tensor


def _cast(value: Any, datatype: Datatype, field: str) -> Any:
    """Return an array or torch tensor in the wanted datatype; numpy floats are cast between precisions."""
    if isinstance(value, np.ndarray):
        if datatype.numpy is not None and value.dtype == datatype.numpy:  # numpy takes None for float64
            return value
        found = datatype_of_array(value.dtype)
        if value.dtype.kind == "f" and datatype.numpy is not None and datatype.numpy.kind == "f":
            found = datatype
    else:
        found = datatype_of_torch(value.dtype)
    if found is not datatype:
        raise TensorError(field, found.name if found else str(value.dtype), datatype.name)
    if not isinstance(value, np.ndarray):
        return value
    with np.errstate(over="ignore"):
        cast = value.astype(datatype.numpy)
    check_within(cast, value, datatype, f"{field}.data")
    return cast


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


class Member(NamedTuple):
    """The rows of one request in a group: `rows` rows from `start`."""

    place: int  # index of the request in the batch
    start: int
    rows: int


class Group(NamedTuple):
    """Requests that run through the model together; `inputs` are torch tensors on the CPU."""

    members: tuple[Member, ...]
    inputs: tuple[torch.Tensor, ...]


def grouped(
    examples: Sequence[tuple[int, list[Any]]], batched: bool, most_rows: int | None = None
) -> list[Group]:
    """Group the examples whose inputs differ only in the number of rows, in order of arrival.

    Args:
        examples: (index of the request, its tensors in the signature's order, batch dimension included).
        batched: whether rows of several requests can go together; otherwise each request is its own group.
        most_rows: the most rows in a group; no request has more.
    """
    alike: dict[object, list[tuple[int, list[Any]]]] = {}
    for place, tensors in examples:
        key = tuple(tuple(tensor.shape[1:]) for tensor in tensors) if batched else place
        alike.setdefault(key, []).append((place, tensors))
    groups = alike.values()
    parts = groups if most_rows is None else [part for items in groups for part in _parts(items, most_rows)]
    return [_group(items, batched) for items in parts]


def _parts(items: Sequence[tuple[int, list[Any]]], most_rows: int) -> list[list[tuple[int, list[Any]]]]:
    """Split requests into lists that have at most `most_rows` rows each."""
    parts: list[list[tuple[int, list[Any]]]] = [[]]
    rows = 0
    for item in items:
        count = len(item[1][0])
        if parts[-1] and rows + count > most_rows:
            parts.append([])
            rows = 0
        parts[-1].append(item)
        rows += count
    return parts


def whole_group(inputs: Sequence[Any]) -> Group:
    """Return the group of requests with one row each, from `inputs` that hold all the rows."""
    members = tuple([Member(place, place, 1) for place in range(len(inputs[0]))])
    return Group(members, tuple(_joined([tensor]) for tensor in inputs))


def array_of(result: torch.Tensor) -> Any:
    """Return a result on the CPU as an array of the same memory; if numpy lacks its datatype, as it is."""
    datatype = datatype_of_torch(result.dtype)
    return result if datatype is None or datatype.numpy is None else result.detach().numpy()


def flattened(result: Any) -> list[torch.Tensor]:
    """Return the tensors of a model's result in order; tuples, lists and dict values are flattened.

    None is left out: models return it for values that they did not compute.

    Raises:
        TypeError: an item is not a tensor, or is a sparse or quantised one.
    """
    if isinstance(result, torch.Tensor):
        if result.layout is not torch.strided or result.is_quantized:
            kind = "quantised" if result.is_quantized else str(result.layout)
            raise TypeError(
                f"the model gave a {kind} tensor; expected dense ones: call dequantize() or to_dense() in it"
            )
        return [result]
    if result is None:
        return []
    if isinstance(result, Mapping):
        result = list(result.values())
    if isinstance(result, (tuple, list)):
        return [tensor for item in result for tensor in flattened(item)]
    raise TypeError(f"the model gave a {type(result).__name__}; expected tensors, or tuples or dicts of them")


def check_results(results: Sequence[torch.Tensor], group: Group, signature: Signature) -> None:
    """Check results against the signature; a mismatch would send answers to the wrong clients.

    Raises:
        ValueError: the number of results, or the number of rows in a result, is wrong.
    """
    if len(results) != len(signature.outputs):
        raise ValueError(
            f"the model gave {len(results)} results; signature.json names {len(signature.outputs)} outputs"
        )
    if not signature.batched:
        return
    rows = sum(member.rows for member in group.members)
    for spec, result in zip(signature.outputs, results, strict=True):
        if result.ndim == 0 or result.shape[0] != rows:
            raise ValueError(
                f"the model gave {spec.name!r} with the shape {list(result.shape)} for {rows} rows; "
                "signature.json says that its first dimension is the batch"
            )


def _group(items: Sequence[tuple[int, list[Any]]], batched: bool) -> Group:
    members = []
    start = 0
    for place, tensors in items:
        rows = len(tensors[0]) if batched else 1
        members.append(Member(place, start, rows))
        start += rows
    columns = zip(*(tensors for _, tensors in items), strict=True)
    return Group(tuple(members), tuple(_joined(column) for column in columns))


def _joined(parts: Sequence[Any]) -> torch.Tensor:
    if isinstance(parts[0], torch.Tensor):
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))
    array = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if not array.flags.writeable or not array.flags.c_contiguous:
        # torch warns about read-only arrays, and rejects negative strides.
        array = np.array(array, order="C")
    # numpy sets arbitrary strides for dimensions of 0 or 1; some operators and compiled code reject them.
    return torch.from_numpy(array.reshape(-1)).view(array.shape)
