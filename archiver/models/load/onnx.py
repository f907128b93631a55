"""Reads the inputs and outputs of an ONNX model from its bytes; needs no onnx package, runs nothing.

ONNX is Protocol Buffers. This module knows only the parts of onnx.proto that a signature needs:
ModelProto.graph, the graph's inputs, outputs and initializers with their names, types and shapes, and the
nodes that look an input up in an initializer. It also knows the messages that may hold a tensor, to check the
location of external data: onnxruntime before 1.24 reads such data from any path, and its last release for
Python 3.10 is older than that.
"""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchere.archiver.container.entries import problem_with
from torchere.archiver.errors import ModelRefused
from torchere.archiver.signature import ANY, Signature, SignatureError, TensorSpec, Values

_MAX_MODEL_BYTES = 2**31  # limit of Protocol Buffers; larger models have their weights in other files
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_NEGATIVE = 2**63  # numbers are read as unsigned; this one and larger ones stand for negative numbers
_MOST_KEY = 2**32 - 1
_GRAPH = 7  # a field number in ModelProto
_NODE, _INITIALIZER, _INPUT, _OUTPUT = 1, 5, 11, 12  # field numbers in GraphProto
_SHAPE = 2  # a field number in TypeProto.Tensor
_EXTERNAL_DATA, _KEY, _VALUE = 13, 1, 2  # the first in TensorProto, the others in StringStringEntryProto
_IN_MEMORY = "*/"  # the prefix of locations that onnxruntime takes for addresses in its memory
# Messages that may contain a tensor, with the messages in their fields by field number.
_HOLDERS: Mapping[str, Mapping[int, str]] = {
    "ModelProto": {7: "GraphProto", 20: "TrainingInfoProto", 25: "FunctionProto"},
    "TrainingInfoProto": {1: "GraphProto", 2: "GraphProto"},
    "FunctionProto": {7: "NodeProto", 11: "AttributeProto"},
    "GraphProto": {1: "NodeProto", 5: "TensorProto", 15: "SparseTensorProto"},
    "NodeProto": {5: "AttributeProto"},
    "AttributeProto": {
        **{5: "TensorProto", 6: "GraphProto", 10: "TensorProto", 11: "GraphProto"},
        **{22: "SparseTensorProto", 23: "SparseTensorProto"},
    },
    "SparseTensorProto": {1: "TensorProto", 2: "TensorProto"},
}
_OF_SHAPES = ("Shape", "Size")  # operators that read no values: a runtime may leave out those before them
_Fields = dict[int, list[Any]]  # the fields of one message, by number
# TensorProto.DataType to the names of the Open Inference Protocol
_DATATYPES = {
    1: "FP32",
    2: "UINT8",
    3: "INT8",
    4: "UINT16",
    5: "INT16",
    6: "INT32",
    7: "INT64",
    8: "BYTES",
    9: "BOOL",
    10: "FP16",
    11: "FP64",
    12: "UINT32",
    13: "UINT64",
    16: "BF16",
}


class _Malformed(ValueError):
    """The bytes are not a valid Protocol Buffers message."""


@dataclass(frozen=True, slots=True)
class OnnxForm:
    """An ONNX file's inputs and outputs; in `signature`, dimensions with a name or no size are free."""

    signature: Signature
    names_batch: bool  # the first dimensions of all inputs and outputs share one name
    is_quantised: bool
    unshaped: frozenset[str] = frozenset()  # inputs and outputs of any rank; `signature` has () for them
    beside: tuple[Path, ...] = ()  # files in the same folder that hold its weights

    def signature_by_names(self) -> Signature:
        """Return the signature; without `names_batch`, a free first dimension gets the fixed size 1."""
        return self.signature if self.names_batch or not self.signature.batched else self.with_rows(1)

    def with_ranks(self, ranks: Mapping[str, int]) -> OnnxForm:
        """Return a copy in which each input and output in `ranks` has that many dimensions, of any size."""

        def ranked(specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
            return tuple(
                dataclasses.replace(spec, shape=(ANY,) * ranks[spec.name]) if spec.name in ranks else spec
                for spec in specs
            )

        signature = Signature(ranked(self.signature.inputs), ranked(self.signature.outputs))
        return dataclasses.replace(self, signature=signature, unshaped=self.unshaped - ranks.keys())

    def with_rows(self, rows: int) -> Signature:
        """Return the signature with the batch dimension of the inputs fixed to this size."""
        inputs = (
            dataclasses.replace(spec, shape=(rows, *spec.shape[1:])) if spec.batched else spec
            for spec in self.signature.inputs
        )
        return dataclasses.replace(self.signature, inputs=tuple(inputs))


def read_onnx(path: Path) -> OnnxForm:
    """Read the inputs and outputs of the graph, and which files beside the model hold its weights.

    Raises:
        ModelRefused: the file is damaged; its inputs or outputs are missing, are not all tensors, or have a
            name that a signature can't have; or a file of weights is missing or lies elsewhere.
    """
    with _read(path) as model:
        graph = _graph(path, model)
        initializers = list(_messages(graph, _INITIALIZER))
        constants = {_text(tensor, 8) for tensor in initializers}
        inputs = [item for item in _messages(graph, _INPUT) if _text(item, 1) not in constants]
        outputs = list(_messages(graph, _OUTPUT))
        nodes = list(_messages(graph, _NODE))
        rows = _table_rows(nodes, initializers, {_text(item, 1) for item in outputs})
        signature = Signature(
            tuple(_with_range(_spec(path, item), rows) for item in inputs),
            tuple(_spec(path, item) for item in outputs),
        )
        try:
            signature.check()
        except SignatureError as error:
            raise ModelRefused(f"{path}: no client could be told its inputs and outputs: {error}") from error
        first = {_first_name(item) for item in (*inputs, *outputs)}
        operators = [_text(node, 4) for node in nodes]
        return OnnxForm(
            signature,
            names_batch=len(first) == 1 and "" not in first,
            is_quantised=any("Quantize" in name or "Integer" in name for name in operators),
            unshaped=frozenset(_text(item, 1) for item in (*inputs, *outputs) if _SHAPE not in _tensor(item)),
            beside=_external_files(path, model),
        )


def check_external_files(path: Path) -> None:
    """Check that all tensors of a model lie in its folder or in subfolders; `read_onnx` checks more.

    Raises:
        ModelRefused: a tensor lies elsewhere, or the file is damaged.
    """
    with _read(path) as model:
        names = _external_names(model)
    for name in names:
        problem = problem_with(name.removeprefix("./"))
        if name.startswith(_IN_MEMORY):
            problem = "the runtime takes it for an address in its memory"
        if problem:
            raise ModelRefused(
                f"{path}: its weights are said to lie in {name!a}: {problem}; expected a file beside it"
            )


@contextmanager
def _read(path: Path) -> Iterator[_Fields]:
    """Yield the fields of a model file; refuse a file that is too large, or that the block finds damaged."""
    size = path.stat().st_size
    if size > _MAX_MODEL_BYTES:
        raise ModelRefused(f"{path}: larger than 2 GiB, which no ONNX model is; keep its weights beside it")
    with path.open("rb") as file:
        # Mapped, because it may hold gigabytes of weights; an empty file can't be mapped.
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    try:
        yield _fields(memoryview(data))
    except _Malformed as error:
        raise ModelRefused(f"{path}: damaged ONNX: {error}; export it again") from error


def _with_range(spec: TensorSpec, rows: Mapping[str, int]) -> TensorSpec:
    size = rows.get(spec.name, 0)
    return dataclasses.replace(spec, values=Values(-size, size - 1)) if size else spec


def _table_rows(
    nodes: Sequence[_Fields], initializers: Sequence[_Fields], outputs: Iterable[str]
) -> dict[str, int]:
    """Return, for each name that Gather uses as indices, the number of rows of the smallest table it indexes.

    Gather fails on numbers outside of -rows ... rows - 1 (onnx/docs/Operators.md). Nodes that no output needs
    do not count, because a runtime may leave them out.
    """
    shapes = {_text(tensor, 8): list(_integers(tensor, 1)) for tensor in initializers}
    found: dict[str, int] = {}
    needed = set(outputs)
    for node in reversed(nodes):  # a node comes after the nodes that it reads
        if needed.isdisjoint(_texts(node, 2)):
            continue
        kind, names = _text(node, 4), list(_texts(node, 1))
        if kind in _OF_SHAPES:
            continue
        needed.update(names)
        if kind == "Gather" and len(names) == 2 and _text(node, 7) in ("", "ai.onnx"):
            shape, axis = shapes.get(names[0], []), _axis(node)
            if -len(shape) <= axis < len(shape) and 0 < shape[axis] < _NEGATIVE:
                found[names[1]] = min(shape[axis], found.get(names[1], shape[axis]))
    return found


def _axis(node: _Fields) -> int:
    axis = next((_number(one, 3) for one in _messages(node, 5) if _text(one, 1) == "axis"), 0)
    return axis if axis < _NEGATIVE else axis - 2 * _NEGATIVE


def _external_files(path: Path, model: _Fields) -> tuple[Path, ...]:
    names = _external_names(model)
    for name in names:
        if problem_with(name) or "/" in name:
            raise ModelRefused(f"{path}: its weights are said to lie in {name!a}; expected a file beside it")
        if not (path.parent / name).is_file():
            raise ModelRefused(
                f"{path}: its weights should lie in {name!a} beside it, where there is no such file; "
                "put it there"
            )
    return tuple(path.parent / name for name in names)


def _external_names(model: _Fields) -> list[str]:
    """Return the sorted locations of external data, also for the tensors in nodes and functions."""
    names: set[str] = set()
    waiting = [("ModelProto", model)]
    while waiting:
        kind, fields = waiting.pop()
        if kind == "TensorProto":
            names.update(_locations(fields))
        for number, inner in _HOLDERS.get(kind, {}).items():
            waiting += ((inner, message) for message in _messages(fields, number))
    return sorted(names)


def _locations(tensor: _Fields) -> Iterator[str]:
    for entry in _messages(tensor, _EXTERNAL_DATA):
        if "location" in _texts(entry, _KEY):  # the runtime takes the last of several; all are checked
            yield from _texts(entry, _VALUE)


def _graph(path: Path, model: _Fields) -> _Fields:
    graphs = list(_messages(model, _GRAPH))
    if len(graphs) != 1:
        raise ModelRefused(
            f"{path}: damaged ONNX, or none: it has {len(graphs)} graphs; expected one: export it again"
        )
    return graphs[0]


def _spec(path: Path, item: _Fields) -> TensorSpec:
    name = _text(item, 1)
    datatype = _DATATYPES.get(_number(_tensor(item), 1))
    if datatype is None:
        raise ModelRefused(
            f"{path}: {name!a} is no tensor of a type known here, and can't be sent to a server: name "
            "a --handler of your own that makes it"
        )
    return TensorSpec(name, datatype, tuple(_size(dimension) for dimension in _dimensions(item)))


def _tensor(item: _Fields) -> _Fields:
    """Return the TypeProto.Tensor of an input or output, or {} if it is not a tensor.

    Without the field `_SHAPE`, the tensor's rank is free; a scalar has the field, without dimensions in it.
    """
    return next((tensor for kind in _messages(item, 2) for tensor in _messages(kind, 1)), {})


def _dimensions(item: _Fields) -> list[_Fields]:
    return [dimension for shape in _messages(_tensor(item), _SHAPE) for dimension in _messages(shape, 1)]


def _first_name(item: _Fields) -> str:
    """Return the name of the first dimension; "" if it has no name."""
    found = _dimensions(item)
    return _text(found[0], 2) if found and 2 in found[0] else ""


def _size(dimension: _Fields) -> int:
    size = _number(dimension, 1)
    return size if 0 < size < _NEGATIVE else ANY  # some exporters write -1 for a size that is free


def _messages(fields: _Fields, number: int) -> Iterator[_Fields]:
    for value in fields.get(number, ()):
        if isinstance(value, memoryview):
            yield _fields(value)


def _text(fields: _Fields, number: int) -> str:
    return ["", *_texts(fields, number)][-1]


def _texts(fields: _Fields, number: int) -> Iterator[str]:
    for value in fields.get(number, ()):
        if isinstance(value, memoryview):
            yield bytes(value).decode("utf-8", "replace")


def _integers(fields: _Fields, number: int) -> Iterator[int]:
    """Yield the numbers of a repeated field, whether packed or not."""
    for value in fields.get(number, ()):
        if isinstance(value, int):
            yield value
            continue
        at = 0
        while at < len(value):
            one, at = _varint(value, at)
            yield one


def _number(fields: _Fields, number: int) -> int:
    value = fields.get(number, [0])[-1]
    return value if isinstance(value, int) else 0


def _fields(data: memoryview) -> _Fields:
    """Return the fields of one message by number; nested messages, strings and packed numbers are bytes."""
    found: _Fields = {}
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        if key > _MOST_KEY:  # other readers drop the higher bits, and so read another field
            raise _Malformed("the number of a field is too large")
        value, at = _value(data, at, key & 7)
        found.setdefault(key >> 3, []).append(value)
    return found


def _value(data: memoryview, at: int, kind: int) -> tuple[Any, int]:
    if kind == _VARINT:
        return _varint(data, at)
    if kind == _BYTES:
        size, at = _varint(data, at)
    elif kind in (_FIXED64, _FIXED32):
        size = 8 if kind == _FIXED64 else 4
    else:
        raise _Malformed(f"a field of the unknown wire type {kind}")
    if at + size > len(data):
        raise _Malformed("it is cut off")
    return data[at : at + size], at + size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise _Malformed("it is cut off, or a number in it is too long")
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if not data[at - 1] & 0x80:
            return value, at
