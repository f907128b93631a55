"""Response bodies of the Open Inference Protocol, encoded from a handler's answers.

A body is JSON, or JSON followed by binary tensors. For callers without headers the length of the JSON comes
first in the body. The executor encodes the body, so the frontend only forwards it.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np

from torchere.archiver.signature import TensorSpec, archive_signature
from torchere.handlers.context import RequestProcessor
from torchere.handlers.encode import encode_answer
from torchere.handlers.errors import UnsupportedOutput
from torchere.handlers.tensors import (
    BF16,
    BYTES,
    DATATYPES,
    Array,
    Datatype,
    Output,
    TensorError,
    datatype_named,
    datatype_of_array,
    datatype_of_torch,
    shown,
)
from torchere.handlers.tensors.codec import (
    begins_with_text,
    json_from_tensor,
    objects_array,
    tensor_from_json,
    view_of_tensor,
)
from torchere.handlers.tensors.enveloped import BytesAs, read_answer

OPEN_INFERENCE = ":open-inference"
"""Header with a `Wish` as JSON, for a handler that reads tensors. HTTP allows no header of this name."""
IN_JSON = ":open-inference-in-json"
"""The same header for a handler that reads and writes tensors as JSON, as behind an envelope."""
HEADER_LENGTH = "inference-header-content-length"  # response header: bytes of JSON at the body's start
SEQUENCE_END = "ts_request_sequence_end"
FRAME = struct.Struct("<I")  # length of the JSON in a framed body
_BAD_REQUEST = 400


class WantedOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """An output the client asks for by name."""

    name: str
    binary: bool = False
    classes: int = 0  # above 0: send only this many of the largest values, as `value:index[:label]`


class Wish(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields of a protocol request other than its inputs; handlers may read them, too."""

    id: str = ""
    parameters: dict[str, bool | int | float | str] = {}
    outputs: tuple[WantedOutput, ...] = ()  # empty: all outputs
    binary: bool = False  # when `outputs` is empty: whether all outputs are binary
    framed: bool = False  # all outputs are binary, and the body begins with the length of its JSON
    ends_sequence: str = ""  # id of the sequence that this request ends
    json_bytes_as: BytesAs | None = None  # None unless the handler reads and writes JSON


class Encoded(NamedTuple):
    """A body, and the length of its JSON in bytes; None if all of the body is JSON or the body is framed."""

    body: bytes
    json_bytes: int | None


_wish_decoder = msgspec.json.Decoder(Wish)
_encoder = msgspec.json.Encoder()


class AnswerEncoder:
    """Encodes the answers of one handler. Not thread-safe: belongs to one executor.

    Args:
        model_name: as registered.
        model_version: likewise.
        model_dir: the unpacked archive; its signature, which names the outputs, is read at the first request
            with tensors.
    """

    labels: object = None  # the handler's `mapping`: names of classes by index, if it is a dict or a list

    def __init__(self, model_name: str, model_version: str, model_dir: str) -> None:
        self._identity = {"model_name": model_name, "model_version": model_version}
        self._model_dir = model_dir
        self._specs: tuple[TensorSpec, ...] | None = None

    def encode(self, answer: object, processor: RequestProcessor) -> bytes:
        """Encode one answer: as tensors if the request came as tensors, else by `encode_answer`.

        Raises:
            UnsupportedOutput: the answer has a type that can't be encoded.
        """
        wish_text = processor.get_request_property(OPEN_INFERENCE) or processor.get_request_property(IN_JSON)
        return encode_answer(answer) if wish_text is None else self._tensors(answer, wish_text, processor)

    def _tensors(self, answer: object, wish_text: str, processor: RequestProcessor) -> bytes:
        """Encode an answer as tensors and set the headers; status 400 if the wish can't be met.

        An answer whose status the handler set to 400 or more is an error text, and is not encoded as tensors.
        """
        wish = read_wish(wish_text)
        if wish.ends_sequence:
            processor.response_headers.setdefault(SEQUENCE_END, wish.ends_sequence)
        if processor.status_code >= _BAD_REQUEST:
            return encode_answer(answer)
        try:
            encoded = self._encoded(answer, wish)
        except TensorError as err:
            processor.report_status(_BAD_REQUEST)
            return str(err).encode()
        _set_headers(processor.response_headers, encoded)
        return encoded.body

    def _encoded(self, answer: object, wish: Wish) -> Encoded:
        if wish.json_bytes_as is not None:
            written = read_answer(encode_answer(answer), wish.json_bytes_as)
            wanted = wish.outputs
            if wish.framed:
                # An envelope names outputs after inputs, and gRPC clients may only know the model's names.
                names = {output.name for output in written.outputs}
                wanted = tuple([output for output in wanted if output.name in names])
            wish = msgspec.structs.replace(wish, id=written.id, outputs=wanted)
            return encode_outputs(written.identity, wanted_outputs(written.outputs, wish, self.labels), wish)
        if self._specs is None:
            signature = archive_signature(self._model_dir)
            self._specs = signature.outputs if signature else ()
        outputs = outputs_of(answer, self._specs)
        return encode_outputs(self._identity, wanted_outputs(outputs, wish, self.labels), wish)


def read_wish(text: str) -> Wish:
    """Parse the wish that the frontend put into the header."""
    return _wish_decoder.decode(text)


def wish_header(wish: Wish) -> tuple[str, str]:
    """Return the header that carries a wish to the executor."""
    name = OPEN_INFERENCE if wish.json_bytes_as is None else IN_JSON
    return name, _encoder.encode(wish).decode()


def encode_outputs(
    identity: Mapping[str, str], outputs: Sequence[tuple[Output, bool]], wish: Wish
) -> Encoded:
    """Encode a body from (output, whether it is sent as binary data) pairs.

    Raises:
        TensorError: an output to be sent as JSON has BYTES that are not UTF-8.
    """
    blobs = []
    members = []
    for output, is_binary in outputs:
        size, data = -1, None
        if is_binary:
            blobs.append(view_of_tensor(output.tensor, output.datatype))  # copied only once, by `join`
            size = blobs[-1].nbytes
        else:
            data = json_from_tensor(output.tensor, output.datatype, f"output {output.name!r}")
        members.append((output.name, output.datatype.name, output.shape, size, data, output.parameters))
    is_repeated = len(blobs) == len(outputs) <= _MOST_KNOWN_OUTPUTS and not wish.id
    is_repeated = is_repeated and not any(output.parameters for output, _ in outputs)
    encode = _head_of_binary if is_repeated else _head
    head = encode(identity["model_name"], identity["model_version"], wish.id, tuple(members))
    if wish.framed:
        return Encoded(b"".join([FRAME.pack(len(head)), head, *blobs]), None)
    if not blobs:
        return Encoded(head, None)
    return Encoded(b"".join([head, *blobs]), len(head))


# Name, datatype, shape, number of bytes (-1: sent as JSON), the JSON, parameters.
_Member = tuple[str, str, tuple[int, ...], int, Any, Mapping[str, Any] | None]


def _head(model: str, version: str, call_id: str, members: tuple[_Member, ...]) -> bytes:
    """Encode the JSON of an answer."""
    outputs = []
    for name, datatype, shape, size, data, parameters in members:
        output: dict[str, Any] = {"name": name, "datatype": datatype, "shape": shape}
        if parameters:
            output["parameters"] = parameters
        if size < 0:
            output["data"] = data
        else:
            output["parameters"] = {**(parameters or {}), "binary_data_size": size}
        outputs.append(output)
    identity = {"model_name": model, "model_version": version}
    named = {"id": call_id, **identity} if call_id else identity
    return _encoder.encode({**named, "outputs": outputs})


_MOST_KNOWN_OUTPUTS = 16  # of an answer whose head is cached
_head_of_binary = lru_cache(maxsize=256)(_head)  # answers have few shapes; those with an id are not cached


def wanted_outputs(outputs: list[Output], wish: Wish, labels: object) -> list[tuple[Output, bool]]:
    """Return each output that the request asks for, and whether it is sent as binary data.

    They are in the order of the request; if it names none, all outputs are returned.

    Raises:
        TensorError: the wish names an unknown output, or asks for the classes of a BYTES output.
    """
    if not wish.outputs:
        return [(output, wish.binary or wish.framed) for output in outputs]
    named = {output.name: output for output in outputs}
    chosen = []
    for index, wanted in enumerate(wish.outputs):
        output = named.get(wanted.name)
        if output is None:
            known = ", ".join(map(shown, list(named)[:20])) or "nothing: the model gave no outputs"
            raise TensorError(f"outputs[{index}].name", shown(wanted.name), f"one of {known}")
        if wanted.classes:
            output = classified(output, wanted.classes, labels, f"outputs[{index}]")
        chosen.append((output, wanted.binary or wish.framed))
    return chosen


def _set_headers(headers: dict[str, str], encoded: Encoded) -> None:
    for name in [name for name in headers if name.lower() == "content-type"]:
        del headers[name]  # the handler's content type described the answer before it was encoded as tensors
    headers["content-type"] = "application/json" if encoded.json_bytes is None else "application/octet-stream"
    if encoded.json_bytes is not None:
        headers[HEADER_LENGTH] = str(encoded.json_bytes)


# Converts a handler's answer to named outputs of the Open Inference Protocol.
#
# A dict gives one output for each member, a tuple or a list of arrays one for each item, any other answer
# a single output. Arrays and tensors keep their datatype. Plain Python numbers take the datatype of the
# archive's signature if it can hold them, else FP64, INT64 or BOOL. Other values become BYTES: texts
# unchanged, the rest as JSON.


def outputs_of(answer: object, specs: Sequence[TensorSpec]) -> list[Output]:
    """Return the outputs of one answer, in order; an answer of None has no outputs.

    Args:
        answer: the handler's answer to one request. A dict in the protocol's response format, with a list of
            `outputs`, keeps the names, datatypes and shapes in it.
        specs: the outputs of the archive's signature, which name outputs without a name; may be empty.

    Raises:
        UnsupportedOutput: a value has a type that the protocol can't carry, or a protocol output is invalid.
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
    torch = sys.modules.get("torch")  # without the import of torch there are no tensors
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
        array = np.array(value, dtype=object if begins_with_text(value) else None)
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
    if cast.dtype.kind == "f":  # may be rounded, but not to infinity
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
            "tensors, numbers, texts, bytes, or a value that json.dumps accepts"
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


def classified(output: Output, classes: int, labels: object, field: str) -> Output:
    """Return the `classes` largest values of an output, largest first, as BYTES `value:index[:label]`.

    With several dimensions, the first is the batch, and each row has its own largest values. `classes` is
    limited to the number of values.

    Raises:
        TensorError: the output is BYTES, not numbers.
    """
    if output.datatype is BYTES:
        raise TensorError(f"{field}.parameters.classification", "an output of BYTES", "one of numbers")
    is_torch = output.datatype is BF16 and not isinstance(output.tensor, np.ndarray)
    values: Array = output.tensor.float().numpy() if is_torch else output.tensor
    is_batch = values.ndim > 1
    rows = values.reshape(values.shape[0], math.prod(values.shape[1:])) if is_batch else values.reshape(1, -1)
    count = min(classes, rows.shape[1])
    # A stable sort of the reversed rows, read backwards: among equal values, the first comes first.
    order = np.argsort(rows[:, ::-1], axis=1, kind="stable")[:, ::-1]
    best = rows.shape[1] - 1 - order[:, :count]
    texts = [
        _text(row[index], int(index), labels)
        for row, places in zip(rows, best, strict=True)
        for index in places
    ]
    shape = (rows.shape[0], count) if is_batch else (count,)
    return Output(output.name, BYTES, shape, objects_array(texts, shape))


def _text(value: Any, index: int, labels: object) -> str:
    label = None
    if isinstance(labels, Mapping):
        label = labels.get(str(index), labels.get(index))
    elif isinstance(labels, (list, tuple)) and index < len(labels):
        label = labels[index]
    if isinstance(label, (list, tuple)):  # [id, name], as ImageNet's index_to_name.json has it
        label = label[-1] if label else None
    number = f"{float(value):f}" if value.dtype.kind == "f" else str(int(value))  # as Triton writes its type
    return f"{number}:{index}" + (f":{label}" if label is not None else "")
