"""Responses of the v2 protocol as records, and its errors, for frontends that re-encode the body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from torchere.handlers.encode import compact_json, parse_json
from torchere.handlers.tensors import BYTES, Datatype, TensorError, check_shape, datatype_named
from torchere.handlers.tensors.answer import FRAME, Encoded, Output, Wish, encode_outputs, wanted_outputs
from torchere.handlers.tensors.codec import (
    NO_JSON,
    array_from_bytes,
    array_from_json,
    bytes_from_tensor,
    check_byte_count,
)
from torchere.serving.errors import HandlerFailed, InvalidRequest, ServingError, Unavailable, VersionFailed
from torchere.serving.frontend.open_inference.tensor_request import TensorRequest
from torchere.serving.types import InferResponse

# TorchServe answers 503 for these, which clients of this protocol take for "try again". They are bugs: 500.
_BUGS = frozenset(
    {
        "Prediction failed",
        "Invalid model predict output",
        "number of batch response mismatched",
        "Unsupported model output data type.",
    }
)


def as_client_knows(error: ServingError) -> ServingError:
    """Return the error with this protocol's status: 500 for a handler bug; a handler's own 503 stays."""
    if isinstance(error, HandlerFailed) and error.status == 503 and error.message in _BUGS:
        return HandlerFailed(error.message, 500, error.detail)
    return error


def in_plain_words(error: ServingError) -> ServingError:
    """Return the error without TorchServe's text for a version that has failed: to add workers to it."""
    return Unavailable(error.plain, error.detail) if isinstance(error, VersionFailed) else error


def check_accepted(response: InferResponse) -> None:
    """Raise an error if the handler's response has an error status.

    Raises:
        HandlerFailed: the status is 400 or more; it has the handler's own text.
    """
    if response.status >= 400:
        raise HandlerFailed(_message(response.body), response.status)


def _message(body: bytes) -> str:
    text = bytes(body).decode("utf-8", "replace")
    try:
        said: Any = msgspec.json.decode(body)
    except NO_JSON:
        return text
    for name in ("error", "message"):
        if isinstance(said, dict) and isinstance(said.get(name), str):
            return str(said[name])
    return text


class OutputTensor(NamedTuple):
    """One output: raw little-endian elements; each element of BYTES is preceded by its length in 4 bytes."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    raw: bytes | memoryview
    parameters: Mapping[str, Any]


class TensorAnswer(NamedTuple):
    """The answer to a `TensorRequest`."""

    model_name: str
    model_version: str
    id: str
    outputs: tuple[OutputTensor, ...]


class _Output(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, Any] = {}
    data: Any = None


class _Head(msgspec.Struct):
    model_name: str = ""
    model_version: str | int | float | None = ""  # a handler that writes JSON itself may write a number
    id: str | None = ""
    outputs: list[_Output] = []


_decoder = msgspec.json.Decoder(_Head)


def read_framed(response: InferResponse) -> TensorAnswer:
    """Parse the response to a request with `framed` set.

    Raises:
        ServingError: the response has an error status, from the handler or from encoding the outputs.
    """
    check_accepted(response)
    return read_framed_body(response.body)


def read_framed_body(body: bytes | memoryview) -> TensorAnswer:
    """As `read_framed`, for one part of a streamed response.

    Raises:
        HandlerFailed: the body is not framed, because the handler sent bytes of its own.
    """
    return _answer(body, FRAME.size, frame_head(body)[1])


def frame_head(body: bytes | memoryview) -> tuple[bytes, int]:
    """Return the JSON at the beginning of a framed body, and where the tensors behind it begin.

    Raises:
        HandlerFailed: as `read_framed_body`.
    """
    if len(body) < FRAME.size or (length := FRAME.unpack_from(body)[0]) > len(body) - FRAME.size:
        raise no_tensors("a body without a frame")
    start = FRAME.size + length
    return bytes(body[FRAME.size : start]), start


def encode_answer(answer: TensorAnswer, request: TensorRequest) -> Encoded:
    """Encode an answer as a REST body, with the outputs and in the forms that the request asks for.

    Raises:
        ServingError: a requested output does not exist, can't be written as JSON, or has invalid elements.
    """
    try:
        outputs = [
            Output(out.name, out.datatype, out.shape, array_from_bytes(out.raw, out.datatype, out.shape))
            for out in answer.outputs
        ]
    except TensorError as err:
        raise no_tensors(str(err)) from err
    wish = Wish(id=answer.id, outputs=request.outputs, binary=request.binary)
    identity = {"model_name": answer.model_name, "model_version": answer.model_version}
    try:
        return encode_outputs(identity, wanted_outputs(outputs, wish, None), wish)
    except TensorError as err:
        raise InvalidRequest(str(err)) from err


def read_json(response: InferResponse, *, quoted: bool = False) -> TensorAnswer:
    """Parse the response of a handler that writes the protocol's JSON itself (the `kservev2` envelope).

    The envelope uses datatype BYTES for all data that is not numeric. Elements that are not strings are
    encoded as JSON; with `quoted`, strings are too, as TorchServe sends them to its gRPC clients.

    Raises:
        ServingError: the response has an error status, or is not valid JSON of the protocol.
    """
    check_accepted(response)
    return _answer(response.body, 0, len(response.body), quoted=quoted)


def _answer(body: bytes | memoryview, start: int, end: int, *, quoted: bool = False) -> TensorAnswer:
    view = memoryview(body)
    head = _head_of(view[start:end])
    outputs = []
    for index, output in enumerate(head.outputs):
        where = f"outputs[{index}]"
        size = output.parameters.pop("binary_data_size", None)
        try:
            datatype = datatype_named(output.datatype, f"{where}.datatype")
            if isinstance(size, int):
                raw, end = _binary(output, datatype, view[end : end + max(size, 0)], where), end + size
            else:
                raw = _raw_of_json(output, datatype, where, quoted=quoted)
        except TensorError as err:
            raise no_tensors(str(err)) from err
        outputs.append(OutputTensor(output.name, datatype, tuple(output.shape), raw, output.parameters))
    version = "" if head.model_version is None else str(head.model_version)
    return TensorAnswer(head.model_name, version, head.id or "", tuple(outputs))


def _head_of(text: memoryview) -> _Head:
    try:
        return _decoder.decode(text)
    except NO_JSON as err:
        try:  # envelopes write NaN and infinities as Python does
            head = msgspec.convert(parse_json(text), _Head)
            # It also reads lone surrogates, which no protocol can send.
            names = [(output.name, output.parameters) for output in head.outputs]
            msgspec.json.encode((head.model_name, head.model_version, head.id, names))
            return head
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise no_tensors(str(err)) from err


def _binary(output: _Output, datatype: Datatype, raw: memoryview, where: str) -> bytes | memoryview:
    check_byte_count(len(raw), datatype, check_shape(output.shape, f"{where}.shape"), where)
    return raw


def _raw_of_json(output: _Output, datatype: Datatype, where: str, *, quoted: bool) -> bytes | memoryview:
    data = _as_texts(output.data, quoted=quoted) if datatype is BYTES else output.data
    return bytes_from_tensor(array_from_json(data, datatype, output.shape, where), datatype)


def _as_texts(data: Any, *, quoted: bool) -> Any:
    if isinstance(data, list):
        return [_as_texts(one, quoted=quoted) for one in data]
    return data if isinstance(data, str) and not quoted else compact_json(data).decode()


def no_tensors(cause: str) -> ServingError:
    """Return the error of a handler whose answer does not have the form of the protocol."""
    return HandlerFailed("The handler's answer is none of the Open Inference Protocol.", 500, cause)
