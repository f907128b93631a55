"""Translation between v2 messages and `frontend/open_inference` records, long tensors uncopied. Pure.

The protobuf library copies a bytes field when it decodes a message, again when the field is read, and twice
when it encodes one. For a call with 1 MiB each way that was nearly half of the event loop's work. The fields
of a message may have any order, so long tensors are appended behind the fields that the library encoded, and
cut out before it decodes the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from torchere.handlers.tensors import BYTES, Datatype, TensorError, check_shape, datatype_named, shown
from torchere.handlers.tensors.answer import WantedOutput
from torchere.handlers.tensors.codec import join_elements, split_elements
from torchere.serving.errors import HandlerFailed, InvalidRequest
from torchere.serving.frontend.grpc.fields import LONG_BYTES, Fields
from torchere.serving.frontend.grpc.protos.open_inference_pb2 import (
    InferParameter,
    InferTensorContents,
    ModelInferRequest,
    ModelInferResponse,
)
from torchere.serving.frontend.http2.messages import Received
from torchere.serving.frontend.http2.stream import JOINED_BYTES, Encoded
from torchere.serving.frontend.open_inference.tensor_answer import OutputTensor, TensorAnswer
from torchere.serving.frontend.open_inference.tensor_request import (
    InputTensor,
    ParameterValue,
    TensorRequest,
    input_tensor,
    refuse_shared_memory,
)

MAX_CLASSES = 2**31 - 1
# Which field of InferTensorContents holds a datatype; FP16 and BF16 have none.
_FIELDS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def tensor_request(request: TensorMessage) -> TensorRequest:
    """Translate a request message. All outputs are requested as raw bytes in a framed body.

    Raises:
        InvalidRequest: a field is invalid; the text names it.
    """
    message, raw = request
    if raw and len(raw) != len(message.inputs):
        raise InvalidRequest(
            f"raw_input_contents: found {len(raw)}, expected one for each of {len(message.inputs)}"
        )
    inputs = tuple(
        [
            _input(tensor, raw[index] if raw else None, f"inputs[{index}]")
            for index, tensor in enumerate(message.inputs)
        ]
    )
    return TensorRequest(
        inputs,
        id=message.id,
        parameters=parameters(message.parameters, "parameters"),
        outputs=tuple([_wanted(output, f"outputs[{i}]") for i, output in enumerate(message.outputs)]),
        binary=True,
        framed=True,
    )


def infer_response(answer: TensorAnswer, *, raw: bool) -> TensorReply:
    """Translate the answer of a model to a response message.

    Args:
        answer: the answer of the model.
        raw: send the outputs as raw bytes; else in typed fields, unless an output's datatype has none.

    Raises:
        HandlerFailed: the handler wrote a BYTES output with an invalid layout.
    """
    response = ModelInferResponse(
        model_name=answer.model_name, model_version=answer.model_version, id=answer.id
    )
    raw = raw or any(output.datatype.name not in _FIELDS for output in answer.outputs)
    contents: list[Raw] = []
    for output in answer.outputs:
        tensor = response.outputs.add(name=output.name, datatype=output.datatype.name, shape=output.shape)
        for name, value in output.parameters.items():
            set_parameter(tensor.parameters[name], value)
        if raw:
            contents.append(output.raw)
        else:
            _fill(tensor.contents, output)
    return TensorReply(response, contents)


def parameters(given: Mapping[str, InferParameter], where: str) -> dict[str, ParameterValue]:
    """Return parameters as plain values.

    Raises:
        InvalidRequest: a parameter has no value, or a float that is not finite: they are passed on as JSON.
    """
    values: dict[str, ParameterValue] = {}
    for name, parameter in given.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise InvalidRequest(f"{where}[{shown(name)}]: found no value, expected one")
        value = getattr(parameter, choice)
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequest(f"{where}[{shown(name)}]: found {value}, expected a finite number")
        values[name] = value
    return values


def set_parameter(parameter: InferParameter, value: object) -> None:
    """Store a plain value in a parameter; a value of a type without a field is stored as its string."""
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int) and -(2**63) <= value < 2**63:
        parameter.int64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    else:
        parameter.string_param = str(value)


def _input(tensor: ModelInferRequest.InferInputTensor, raw: Raw | None, where: str) -> InputTensor:
    refuse_shared_memory(tensor.parameters, where)
    try:
        datatype = datatype_named(tensor.datatype, f"{where}.datatype")
        if raw is None:
            raw = _raw_of(tensor, datatype, where)
        elif tensor.HasField("contents"):
            raise InvalidRequest(
                f"{where}.contents: found both it and raw_input_contents, expected one of them"
            )
    except TensorError as err:
        raise InvalidRequest(str(err)) from err
    return input_tensor(tensor.name, datatype, tensor.shape, raw, where)


def _raw_of(tensor: ModelInferRequest.InferInputTensor, datatype: Datatype, where: str) -> bytes:
    field = _FIELDS.get(datatype.name)
    if field is None:
        raise InvalidRequest(f"{where}: found {datatype.name} without raw_input_contents, which it needs")
    values: Sequence[Any] = getattr(tensor.contents, field)
    count = math.prod(check_shape(tensor.shape, f"{where}.shape"))
    if len(values) != count:
        raise InvalidRequest(f"{where}.contents.{field}: found {len(values)} elements, expected {count}")
    if datatype is BYTES:
        return join_elements(values)
    # The 32-bit fields hold smaller integers too; a value that is out of range must not be truncated.
    array = np.array(
        values, dtype=np.dtype("<i8") if field in ("int_contents", "uint_contents") else datatype.numpy
    )
    narrow = array.astype(datatype.numpy, copy=False)
    if not np.array_equal(narrow, array, equal_nan=array.dtype.kind == "f"):
        place = int(np.argmax(narrow != array))
        raise InvalidRequest(
            f"{where}.contents.{field}[{place}]: found {array[place]}, expected {datatype.name}"
        )
    return narrow.tobytes()


def _wanted(output: ModelInferRequest.InferRequestedOutputTensor, where: str) -> WantedOutput:
    said = parameters(output.parameters, f"{where}.parameters")
    refuse_shared_memory(said, where)
    classes = said.get("classification", 0)
    if isinstance(classes, bool) or not isinstance(classes, int) or not 0 <= classes <= MAX_CLASSES:
        raise InvalidRequest(
            f"{where}.parameters.classification: found {shown(classes)}, expected a number of classes"
        )
    return WantedOutput(output.name, binary=True, classes=classes)


def _fill(contents: InferTensorContents, output: OutputTensor) -> None:
    field = getattr(contents, _FIELDS[output.datatype.name])
    if output.datatype is not BYTES:
        field.extend(np.frombuffer(output.raw, dtype=output.datatype.numpy).tolist())
        return
    try:
        field.extend(split_elements(output.raw, output.name))
    except TensorError as err:
        raise HandlerFailed(
            "The handler's answer is none of the Open Inference Protocol.", 500, str(err)
        ) from err


Raw = bytes | memoryview

MOST_TENSORS = 256  # cut out of one message; with more of them the library needs less memory
# Tags of `raw_input_contents` and `raw_output_contents`: field number and wire type 2 (length-delimited).
_INPUT_TAG = 7 << 3 | 2
_OUTPUT_TAG = 6 << 3 | 2
_TENSOR_TAGS = (5 << 3 | 2, 6 << 3 | 2)  # of `inputs` and `outputs` of a request


class TensorMessage(NamedTuple):
    """A request with its raw tensors held separately: `fields` may lack them."""

    fields: ModelInferRequest
    raw: Sequence[Raw]


class TensorReply(NamedTuple):
    """A response with its raw tensors held separately: `fields` lacks them."""

    fields: ModelInferResponse
    raw: Sequence[Raw]

    def whole(self) -> ModelInferResponse:
        """Return the response as one message with its tensors, for example to embed it in another message."""
        self.fields.raw_output_contents.extend(map(bytes, self.raw))
        return self.fields


def decode_request(message: Received) -> TensorMessage:
    """Decode a request. The raw tensors of a long message are views of `message`.

    Raises:
        DecodeError: the message is not a valid request.
        MessageFailed: it has too many fields.
    """
    if len(message) >= LONG_BYTES:
        rest, tensors = _cut(message)
        if len(tensors) <= MOST_TENSORS:
            return TensorMessage(ModelInferRequest.FromString(rest), tensors)
    fields = ModelInferRequest.FromString(bytes(message))
    return TensorMessage(fields, fields.raw_input_contents)


def encode_response(reply: TensorReply) -> Encoded:
    """Encode a response; a long one as a list of parts."""
    if sum(map(len, reply.raw)) < JOINED_BYTES:
        return reply.whole().SerializeToString()
    parts: list[Raw] = [reply.fields.SerializeToString()]
    for tensor in reply.raw:
        parts += (bytes((_OUTPUT_TAG,)) + _written(len(tensor)), tensor)
    return parts


def _cut(message: Received) -> tuple[bytes, list[Raw]]:
    """Return a message without its raw tensors, and the tensors.

    Raises:
        DecodeError: the message has invalid fields.
        MessageFailed: it has too many fields.
    """
    view, end, fields = memoryview(message), len(message), Fields(message)
    kept: list[memoryview] = []
    tensors: list[Raw] = []
    kept_from = 0
    for field in fields.between(0, end):
        if field.tag == _INPUT_TAG:
            kept.append(view[kept_from : field.start])
            tensors.append(view[field.content : field.end])
            kept_from = field.end
        elif field.tag in _TENSOR_TAGS:
            for _ in fields.between(field.content, field.end):
                pass  # count the fields of the tensors, such as their parameters, too
    return b"".join((*kept, view[kept_from:])), tensors


def _written(number: int) -> bytes:
    """Encode a number as a varint."""
    written = bytearray()
    while number >= 0x80:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)
