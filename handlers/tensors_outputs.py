"""Converts a handler's answer to named outputs of the Open Inference Protocol.

A dict gives one output for each member, a tuple or a list of arrays one for each item, any other answer a
single output. Arrays and tensors keep their datatype. Plain Python numbers take the datatype of the archive's
signature if it can hold them, else FP64, INT64 or BOOL. Other values become BYTES: texts unchanged, the rest
as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchere.archiver.signature import TensorSpec
from torchere.handlers.errors import UnsupportedOutput
from torchere.handlers.tensors import (
    BF16,
    BYTES,
    DATATYPES,
    Array,
    Datatype,
    TensorError,
    datatype_named,
    datatype_of_array,
    datatype_of_torch,
)
from torchere.handlers.tensors_bytes import objects_array
from torchere.handlers.tensors_json import tensor_from_json


@dataclass(frozen=True, slots=True)
class Output:
    """One output: `tensor` is a numpy array of the datatype (BF16: a torch tensor on the CPU, or float32)."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    tensor: Any


def outputs_of(answer: object, specs: Sequence[TensorSpec]) -> list[Output]:
    """Return the outputs of one answer, in order; an answer of None has no outputs.

    Args:
        answer: the handler's answer to one request. A dict in the protocol's response format, with a list of
            `outputs`, keeps the names, datatypes and shapes in it.
        specs: the outputs of the archive's signature, which name outputs without a name; may be empty.

    Raises:
        UnsupportedOutput: a member has a type that the protocol can't carry, or an invalid protocol output.
    """
    if answer is None:
        return []
    if isinstance(answer, dict):
        if _is_protocol_answer(answer):
            return [_as_said(item, index) for index, item in enumerate(answer["outputs"])]
        members = [(str(name), value) for name, value in answer.items()]
    elif isinstance(answer, (tuple, list)) and answer and all(map(_is_array, answer)):
        members = [(_name(index, specs), value) for index, value in enumerate(answer)]
    else:
        members = [(_name(0, specs), answer)]
    datatypes = {spec.name: DATATYPES[spec.datatype] for spec in specs}
    return [_output(name, value, datatypes.get(name)) for name, value in members]


def _name(index: int, specs: Sequence[TensorSpec]) -> str:
    return specs[index].name if index < len(specs) else f"output_{index}"


def _is_array(value: object) -> bool:
    return isinstance(value, np.ndarray) or _is_torch(value)


def _is_torch(value: object) -> bool:
    torch = sys.modules.get("torch")  # a process that has not imported torch has no tensors
    return torch is not None and isinstance(value, torch.Tensor)


def _output(name: str, value: object, wanted: Datatype | None) -> Output:
    if _is_torch(value):
        return _of_torch(name, value)
    if isinstance(value, (np.ndarray, np.generic)):
        return _of_array(name, np.asarray(value))
    if isinstance(value, (bytes, bytearray, str)):
        return _of_objects(name, [value], (1,))
    if isinstance(value, (bool, int, float)):
        value = [value]
    if isinstance(value, (list, tuple)):
        return _of_list(name, value, wanted)
    return _of_objects(name, [_json_text(value)], (1,))


def _of_torch(name: str, value: Any) -> Output:
    datatype = datatype_of_torch(value.dtype)
    if datatype is None:
        raise _unsupported(name, str(value.dtype))
    tensor = value.detach().cpu().resolve_neg()  # numpy can't read torch's lazy negation
    return Output(name, datatype, tuple(tensor.shape), tensor if datatype is BF16 else tensor.numpy())


def _of_array(name: str, array: Array) -> Output:
    datatype = datatype_of_array(array.dtype)
    if datatype is None:
        raise _unsupported(name, f"numpy's {array.dtype}")
    tensor = objects_array(array.ravel().tolist(), array.shape) if datatype is BYTES else array
    return Output(name, datatype, tuple(array.shape), tensor)


def _of_objects(name: str, elements: Sequence[object], shape: tuple[int, ...]) -> Output:
    return Output(name, BYTES, shape, objects_array(elements, shape))


def _of_list(name: str, value: Sequence[Any], wanted: Datatype | None) -> Output:
    try:
        array = np.array(value)
    except (ValueError, OverflowError):  # ragged nesting, or an integer too large
        return _of_objects(name, [_json_text(value)], (1,))
    if array.dtype.kind in "biuf":
        return _of_array(name, _as_wanted(array, wanted))
    texts = _texts(value, array.shape)
    if texts is None:
        return _of_objects(name, [_json_text(value)], (1,))
    return _of_objects(name, texts, array.shape)


def _as_wanted(array: Array, wanted: Datatype | None) -> Array:
    """Cast an array to the wanted datatype, or return it unchanged if that can't hold its values."""
    dtype = wanted.numpy if wanted is not None else None
    if dtype is None or not np.can_cast(array.dtype, dtype, "same_kind"):
        return array
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    if cast.dtype.kind == "f":  # rounded, but not to infinity
        return cast if np.array_equal(np.isfinite(cast), np.isfinite(array)) else array
    return cast if np.array_equal(cast, array) else array


def _texts(value: Sequence[Any], shape: tuple[int, ...]) -> list[Any] | None:
    """Return the items of nested lists if all are texts or bytes, else None."""
    flat = list(value)
    for _ in shape[1:]:
        if not all(isinstance(item, (list, tuple)) for item in flat):
            return None
        flat = [item for items in flat for item in items]
    return flat if all(isinstance(item, (str, bytes, bytearray)) for item in flat) else None


def _json_text(value: object) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as err:
        raise UnsupportedOutput(
            f"an answer of type {type(value).__name__} can't be sent as a tensor: {err}; expected arrays, "
            "tensors, numbers, texts, bytes, or what json.dumps takes"
        ) from err


def _unsupported(name: str, found: str) -> UnsupportedOutput:
    return UnsupportedOutput(
        f"output {name!r} is of {found}, which the Open Inference Protocol has no datatype for; "
        f"expected one of {', '.join(DATATYPES)}"
    )


def _is_protocol_answer(answer: dict[Any, Any]) -> bool:
    outputs = answer.get("outputs")
    return isinstance(outputs, list) and all(
        isinstance(item, dict) and {"name", "datatype", "shape", "data"} <= item.keys() for item in outputs
    )


def _as_said(item: dict[str, Any], index: int) -> Output:
    field = f"outputs[{index}]"
    try:
        datatype = datatype_named(item["datatype"], f"{field}.datatype")
        shape = tuple(item["shape"])
        tensor = tensor_from_json(item["data"], datatype, shape, field)
    except (TensorError, TypeError) as err:
        raise UnsupportedOutput(f"the handler answered with an {field} that is none: {err}") from err
    return Output(str(item["name"]), datatype, shape, tensor)
