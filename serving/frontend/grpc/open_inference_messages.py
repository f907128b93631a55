"""Translates between v2 messages and `frontend/open_inference` records without copying long tensors. Pure.

The protobuf library copies a bytes field when it decodes a message, again when the field is read, and twice
when it encodes one. For a call with 1 MiB each way that was nearly half of the event loop's work. The fields
of a message may have any order, so long tensors are appended after the fields that the library encoded, and
cut out before it decodes the rest.
"""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from torchere.handlers.tensors import BYTES, Datatype, TensorError, check_shape, datatype_named, shown
from torchere.handlers.tensors.answer import WantedOutput
from torchere.handlers.tensors.codec import join_elements, split_elements
from torchere.serving.errors import InvalidRequest
from torchere.serving.frontend.budgets import outcome_of
from torchere.serving.frontend.grpc.fields import LONG_BYTES, Fields
from torchere.serving.frontend.grpc.protos.open_inference_pb2 import (
    InferParameter,
    InferTensorContents,
    ModelInferRequest,
    ModelInferResponse,
)
from torchere.serving.frontend.http2.messages import MessageFailed, Received
from torchere.serving.frontend.http2.stream import JOINED_BYTES, Encoded
from torchere.serving.frontend.known_heads import Known
from torchere.serving.frontend.open_inference.service import KNOWN_HEAD_BYTES, KNOWN_HEADS, tensors_behind
from torchere.serving.frontend.open_inference.tensor_answer import (
    OutputTensor,
    TensorAnswer,
    check_accepted,
    frame_head,
    no_tensors,
    read_behind,
)
from torchere.serving.frontend.open_inference.tensor_request import (
    InputTensor,
    ParameterValue,
    TensorRequest,
    check_names,
    input_tensor,
    refuse_shared_memory,
)
from torchere.serving.types import InferResponse

MAX_CLASSES = 2**31 - 1
# The field of InferTensorContents for each datatype; FP16 and BF16 have no field.
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
# Tags of the fields of InferTensorContents whose packed form is the raw form of the tensor.
_PACKED_TAGS = {"FP32": 6 << 3 | 2, "FP64": 7 << 3 | 2}


def tensor_request(request: TensorMessage) -> TensorRequest:
    """Translate a request message. All outputs are requested as raw bytes in a framed body.

    Raises:
        InvalidRequest: a field is invalid; the text names it.
    """
    message, raw = request.fields, request.raw
    check_names("inputs", [tensor.name for tensor in message.inputs])
    check_names("outputs", [output.name for output in message.outputs])
    for index, tensor in enumerate(message.inputs):  # first, because such inputs have no raw tensors to count
        refuse_shared_memory(tensor.parameters, f"inputs[{index}]")
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


def infer_response(answer: TensorAnswer, *, raw: bool, call_id: str = "") -> TensorReply:
    """Translate the answer of a model to a response message.

    `raw` sends the outputs as raw bytes; otherwise they are in typed fields, unless a datatype has no field.
    `call_id` is the id that the client gave its request; used if the answer has no id.

    Raises:
        HandlerFailed: the handler wrote a BYTES output with an invalid layout.
    """
    response = ModelInferResponse(
        model_name=answer.model_name, model_version=answer.model_version, id=answer.id or call_id
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
        InvalidRequest: a parameter has no value, or is not finite, which JSON can't represent.
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
    tag = _PACKED_TAGS.get(output.datatype.name)
    if tag is not None:  # merged as an encoded message: a list of floats takes ten times as long
        contents.MergeFromString(b"".join((_field_head(tag, len(output.raw)), output.raw)))
        return
    field = getattr(contents, _FIELDS[output.datatype.name])
    if output.datatype is not BYTES:
        field.extend(np.frombuffer(output.raw, dtype=output.datatype.numpy).tolist())
        return
    try:
        field.extend(split_elements(output.raw, output.name))
    except TensorError as err:
        raise no_tensors(str(err)) from err


Raw = bytes | memoryview

MOST_TENSORS = 256  # that are cut out of one message; with more tensors, the library needs less memory
MOST_CUT_FIELDS = 256  # of a short message; with more fields, the library is faster
# Tags: field number and wire type 2 (length-delimited).
_ID_TAG = 3 << 3 | 2  # of `id`, in requests and in responses
_INPUT_TAG = 7 << 3 | 2  # of `raw_input_contents`
_OUTPUT_TAG = 6 << 3 | 2  # of `raw_output_contents`
_TENSOR_TAGS = (5 << 3 | 2, 6 << 3 | 2)  # of `inputs` and `outputs` of a request


class TensorMessage:
    """A request whose raw tensors and id are kept separate from its head, the rest of the message.

    `head` is empty if the message was decoded at once; `fields` may lack the tensors. `size` is the size of
    the received message or of its tensors, whichever is larger, in bytes.
    """

    __slots__ = ("_fields", "_translated", "head", "id", "raw", "size")

    def __init__(self, head: bytes, call_id: str, raw: Sequence[Raw]) -> None:
        self.head = head
        self.id = call_id
        self.raw = raw
        self.size = 0
        self._fields: ModelInferRequest | None = None
        self._translated: TensorRequest | InvalidRequest | None = None
        if not 0 < len(head) <= KNOWN_HEAD_BYTES:  # no translation of such a head is kept
            self._fields, self.head = self._decoded(head), b""

    @classmethod
    def of_library(cls, message: Received) -> TensorMessage:
        """Return a message that the library decodes whole.

        Raises:
            DecodeError: the message is not a valid request.
        """
        fields = ModelInferRequest.FromString(bytes(message))
        whole = cls(b"", fields.id, fields.raw_input_contents)
        whole._fields = fields
        return whole

    @property
    def fields(self) -> ModelInferRequest:
        """The decoded head, with the id."""
        if self._fields is None:
            self._fields = self._decoded(self.head)
        return self._fields

    def translate(self) -> None:
        """Translate the message in advance, as a part of its decoding, because it may take long."""
        self._translated = found = outcome_of(partial(tensor_request, self), InvalidRequest)
        if isinstance(found, TensorRequest):
            self.size = max(self.size, sum([len(tensor.raw) for tensor in found.inputs]))

    def translated(self) -> TensorRequest:
        """Return the translation, and drop the reference to it; see `tensor_request`.

        Raises:
            InvalidRequest: a field is invalid; the text names it.
        """
        if self._translated is None:
            return tensor_request(self)
        found, self._translated = self._translated, None
        if isinstance(found, InvalidRequest):
            raise found
        return found

    def _decoded(self, head: bytes) -> ModelInferRequest:
        fields = ModelInferRequest.FromString(head)
        if self.id:
            fields.id = self.id
        return fields

    @property
    def is_raw(self) -> bool:
        """Whether the client expects raw outputs: if its inputs are raw, as with most clients, or absent."""
        return bool(self.raw) or not self.fields.inputs


class TensorReply(NamedTuple):
    """A response with its raw tensors held separately: `fields` lacks them."""

    fields: ModelInferResponse
    raw: Sequence[Raw]

    def whole(self) -> ModelInferResponse:
        """Return the response as one message with its tensors, for example to embed it in another message."""
        self.fields.raw_output_contents.extend(map(bytes, self.raw))
        return self.fields


def decode_request(message: Received, known: Container[Hashable] = ()) -> TensorMessage:
    """Decode a request. The raw tensors are slices of `message`, or views if `message` is a view or long.

    The heads in `known` need no decoding, because they were decoded before.

    Raises:
        DecodeError: the message is not a valid request.
        MessageFailed: the message has too many fields.
    """
    cut = _cut(message) or TensorMessage.of_library(message)
    cut.size = len(message)
    if cut.head not in known:  # an empty head never is
        cut.translate()
    return cut


def takes_long(message: Received) -> bool:
    """Return whether a request is long without its raw tensors, which are cut out and not translated."""
    size = len(message)
    try:
        for tag, start, _, after in Fields(message).between(0, len(message)):
            if tag == _INPUT_TAG:
                size -= after - start
    except (DecodeError, MessageFailed):
        return True  # decoding it raises the same error
    return size >= LONG_BYTES


def encode_response(reply: TensorReply) -> Encoded:
    """Encode a response; a long one as a list of parts."""
    return _with_tensors([reply.fields.SerializeToString()], reply.raw)


class _KnownAnswer(NamedTuple):
    """The encoded message of a response without its tensors, and the sizes of the tensors in bytes."""

    fields: bytes
    sizes: list[int]


class RawAnswers:
    """Encodes the framed bodies of workers as responses of raw tensors; keeps the encoded heads.

    Used on one event loop.
    """

    def __init__(self) -> None:
        self._known: Known[bytes, _KnownAnswer] = Known(KNOWN_HEADS)

    def encode(self, response: InferResponse, call_id: str) -> Encoded:
        """Encode the framed body of a response, with the id of the call.

        Raises:
            ServingError: the response has an error status, or its body is not framed.
        """
        check_accepted(response)
        body = response.body
        head, start = frame_head(body)
        known = self._known.get(head)
        if known is None or sum(known.sizes) != len(body) - start:
            return self._encode_anew(head, start, body, call_id)
        parts: list[Raw] = [known.fields]
        if call_id:
            encoded = call_id.encode()
            parts += (_field_head(_ID_TAG, len(encoded)), encoded)
        return _with_tensors(parts, tensors_behind(body, start, known.sizes))

    def _encode_anew(self, head: bytes, start: int, body: Raw, call_id: str) -> Encoded:
        """Encode a framed body, and keep its head if the bytes from `start` on are the tensors.

        The head is not read again: a worker could have changed it, and other models may have the kept one.
        """
        answer = read_behind(head, start, body)
        sizes = [len(output.raw) for output in answer.outputs]
        if not answer.id and sum(sizes) == len(body) - start and len(head) <= KNOWN_HEAD_BYTES:
            fields = infer_response(answer, raw=True).fields.SerializeToString()
            self._known.keep(head, _KnownAnswer(fields, sizes))
        return encode_response(infer_response(answer, raw=True, call_id=call_id))


def _with_tensors(parts: list[Raw], tensors: Sequence[Raw]) -> Encoded:
    """Append the raw tensors of a response to its encoded parts; join all if the tensors are short."""
    for tensor in tensors:
        parts += (_field_head(_OUTPUT_TAG, len(tensor)), tensor)
    return b"".join(parts) if sum(map(len, tensors)) < JOINED_BYTES else parts


def _cut(message: Received) -> TensorMessage | None:
    """Cut the raw tensors and the id out of a message; None: the library must decode it whole.

    Raises:
        DecodeError: a long message has invalid fields, or the head or an id is invalid.
        MessageFailed: a long message has too many fields.
    """
    end = len(message)
    is_long = end >= LONG_BYTES
    view: Received = memoryview(message) if is_long else message
    fields = Fields(message)
    kept: list[Raw] = []
    tensors: list[Raw] = []
    call_id = ""
    kept_from = count = 0
    try:
        for tag, start, content, after in fields.between(0, end):
            count += 1
            if not is_long and count > MOST_CUT_FIELDS:
                return None
            if tag == _INPUT_TAG:
                tensors.append(view[content:after])
            elif tag == _ID_TAG:
                call_id = _text(view[content:after])
            else:
                if is_long and tag in _TENSOR_TAGS:
                    for _ in fields.between(content, after):
                        pass  # count the fields of the tensors, such as their parameters, too
                continue
            kept.append(view[kept_from:start])
            kept_from = after
    except DecodeError:
        if is_long:
            raise
        return None  # the library accepts more kinds of fields
    if len(tensors) > MOST_TENSORS:
        return None
    return TensorMessage(b"".join((*kept, view[kept_from:])), call_id, tensors)


def _text(encoded: Received) -> str:
    """Decode a string, as strictly as the library does."""
    try:
        return str(encoded, "utf-8")
    except UnicodeDecodeError as err:
        raise DecodeError(f"id: {err}") from err


def _field_head(tag: int, length: int) -> bytes:
    """Encode the tag and the length that precede the bytes of a field."""
    return bytes((tag,)) + _written(length)


def _written(number: int) -> bytes:
    """Encode a number as a varint."""
    written = bytearray()
    while number >= 0x80:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)
