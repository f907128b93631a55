"""Open Inference Protocol tensors for handlers behind an envelope, which read and write the protocol's JSON.

A client may send tensors as bytes or over gRPC, but TorchServe's envelopes read JSON. So the tensors of such
a request are converted to JSON before the handler runs, and the JSON of its answer to tensors.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from torchere.handlers.encode import compact_json, parse_json
from torchere.handlers.errors import UnsupportedOutput
from torchere.handlers.tensors import BYTES, Output, TensorError, datatype_named, parse_tensor_type
from torchere.handlers.tensors.codec import (
    NO_JSON,
    array_from_bytes,
    array_from_json,
    json_from_tensor,
    split_elements,
)

BytesAs: TypeAlias = Literal["text", "base64"]
"""How elements of BYTES are written in JSON; TorchServe uses base64 for its gRPC clients."""


class NoTensors(UnsupportedOutput):
    """A handler's answer is not the JSON of the protocol."""

    message = "The handler's answer is none of the Open Inference Protocol."
    status = 500  # clients take 503 for "try again"


def request_json(
    model: str, call_id: str, inputs: Iterable[tuple[str, str, bytes | memoryview]], bytes_as: BytesAs
) -> bytes:
    """Return the body `{"id", "model_name", "inputs": [{"name", "shape", "datatype", "data"}]}`.

    Args:
        model: the model's name.
        call_id: the id that the client chose, or "".
        inputs: name, content type (`tensor_type`) and bytes of each tensor.
        bytes_as: how elements of BYTES are written.

    Raises:
        TensorError: BYTES are not valid text, with `bytes_as="text"`, or have an invalid layout.
    """
    described = []
    for index, (name, content_type, raw) in enumerate(inputs):
        datatype, shape = parse_tensor_type(content_type)
        field = f"inputs[{index}]"
        if datatype is BYTES and bytes_as == "base64":
            data: Any = [base64.b64encode(element).decode() for element in split_elements(raw, field)]
        else:
            array = array_from_bytes(raw, datatype, shape, field)
            data = json_from_tensor(array, datatype, field, "the model reads its inputs as JSON")
        described.append({"name": name, "shape": shape, "datatype": datatype.name, "data": data})
    return msgspec.json.encode({"id": call_id, "model_name": model, "inputs": described})


class WrittenAnswer(NamedTuple):
    """An answer that a handler wrote as JSON of the protocol."""

    identity: Mapping[str, str]  # model_name and model_version
    id: str
    outputs: list[Output]


class _Output(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    parameters: Any = None
    data: Any = None


class _Answer(msgspec.Struct):
    model_name: str = ""
    model_version: str | int | float | None = ""  # a handler that writes JSON itself may write a number
    id: str | None = ""
    outputs: list[_Output] = []


_decoder = msgspec.json.Decoder(_Answer)


def read_answer(text: bytes, bytes_as: BytesAs) -> WrittenAnswer:
    """Parse the answer of a handler that writes the protocol's JSON itself (the `kservev2` envelope).

    The envelope uses datatype BYTES for all data that is not numeric. Elements that are not strings are
    encoded as JSON; with `bytes_as="base64"` strings are too, as TorchServe sends them to its gRPC clients.

    Raises:
        NoTensors: it is not valid JSON of the protocol.
    """
    try:
        answer = _answer_of(text)
        outputs = [_written(output, f"outputs[{i}]", bytes_as) for i, output in enumerate(answer.outputs)]
    except TensorError as err:
        raise NoTensors(str(err)) from err
    version = "" if answer.model_version is None else str(answer.model_version)
    identity = {"model_name": answer.model_name, "model_version": version}
    return WrittenAnswer(identity, answer.id or "", outputs)


def _answer_of(text: bytes) -> _Answer:
    try:
        return _decoder.decode(text)
    except NO_JSON as err:
        try:  # envelopes write NaN and infinities as Python does
            answer = msgspec.convert(parse_json(text), _Answer)
            # `parse_json` also reads lone surrogates, which no protocol can send.
            names = [(output.name, output.parameters) for output in answer.outputs]
            msgspec.json.encode((answer.model_name, answer.model_version, answer.id, names))
            return answer
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise NoTensors(str(err)) from err


def _written(output: _Output, field: str, bytes_as: BytesAs) -> Output:
    datatype = datatype_named(output.datatype, f"{field}.datatype")
    data = _as_texts(output.data, bytes_as) if datatype is BYTES else output.data
    array = array_from_json(data, datatype, output.shape, field)
    # Parameters that are not an object are ignored, and an empty object counts as none.
    parameters = output.parameters if isinstance(output.parameters, dict) else None
    return Output(output.name, datatype, tuple(output.shape), array, parameters or None)


def _as_texts(data: Any, bytes_as: BytesAs) -> Any:
    if isinstance(data, list):
        return [_as_texts(one, bytes_as) for one in data]
    return data if isinstance(data, str) and bytes_as == "text" else compact_json(data).decode()
