"""Responses of the v2 protocol as records, and its errors, for frontends that re-encode the body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from torchere.handlers.errors import UnsupportedOutput
from torchere.handlers.tensors import Datatype, TensorError, check_shape, datatype_named, shown
from torchere.handlers.tensors.answer import FRAME
from torchere.handlers.tensors.codec import NO_JSON, check_byte_count
from torchere.handlers.tensors.enveloped import NoTensors
from torchere.serving.errors import HandlerFailed, ServingError, Unavailable, VersionFailed
from torchere.serving.types import InferResponse

# TorchServe answers these bugs with 503, which clients of this protocol take for "try again"; here it is 500.
_BUGS = frozenset(
    {
        "Prediction failed",
        "Invalid model predict output",
        "number of batch response mismatched",
        UnsupportedOutput.message,
    }
)


def as_client_knows(error: ServingError) -> ServingError:
    """Return the error with this protocol's status: 500 for a handler bug; a handler's own 503 stays."""
    if isinstance(error, HandlerFailed) and error.status == 503 and error.message in _BUGS:
        return HandlerFailed(error.message, 500, error.detail)
    return error


def in_plain_words(error: ServingError) -> ServingError:
    """Replace TorchServe's text for a failed version, which tells clients to add workers; keep others."""
    return Unavailable(error.plain, error.detail) if isinstance(error, VersionFailed) else error


def check_accepted(response: InferResponse) -> None:
    """Raise an error if the handler's response has an error status.

    Raises:
        HandlerFailed: the status is 400 or more; it has the handler's own text.
    """
    if response.status >= 400:
        raise HandlerFailed(_message(response.body), response.status)


def _message(body: bytes) -> str:
    body = bytes(body)  # a worker could change a view of shared memory while it is decoded
    text = body.decode("utf-8", "replace")
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


class _Head(msgspec.Struct):
    model_name: str = ""
    model_version: str = ""
    id: str = ""
    outputs: list[_Output] = []


_decoder = msgspec.json.Decoder(_Head)


def read_framed(body: bytes | memoryview) -> TensorAnswer:
    """Parse the body of a response, or one part of a streamed one, to a request with `framed` set.

    Raises:
        HandlerFailed: the body is not framed, because the handler sent bytes of its own.
    """
    return read_behind(*frame_head(body), body)


def read_behind(text: bytes, end: int, body: bytes | memoryview) -> TensorAnswer:
    """Do as `read_framed` with the JSON and the offset that `frame_head` has returned.

    Raises:
        HandlerFailed: as `read_framed`.
    """
    try:
        head = _decoder.decode(text)
    except NO_JSON as err:
        raise no_tensors(str(err)) from err
    view, outputs = memoryview(body), []
    for index, output in enumerate(head.outputs):
        field = f"outputs[{index}]"
        size = output.parameters.pop("binary_data_size", None)
        try:
            datatype = datatype_named(output.datatype, f"{field}.datatype")
            if not isinstance(size, int):
                raise TensorError(f"{field}.parameters.binary_data_size", shown(size), "a number of bytes")
            raw, end = view[end : end + max(size, 0)], end + size
            check_byte_count(len(raw), datatype, check_shape(output.shape, f"{field}.shape"), field)
        except TensorError as err:
            raise no_tensors(str(err)) from err
        outputs.append(OutputTensor(output.name, datatype, tuple(output.shape), raw, output.parameters))
    return TensorAnswer(head.model_name, head.model_version, head.id, tuple(outputs))


def frame_head(body: bytes | memoryview) -> tuple[bytes, int]:
    """Return the JSON at the beginning of a framed body, and the offset of the tensors after it.

    Raises:
        HandlerFailed: as `read_framed`.
    """
    if len(body) < FRAME.size or (length := FRAME.unpack_from(body)[0]) > len(body) - FRAME.size:
        raise no_tensors("a body without a frame")
    start = FRAME.size + length
    return bytes(body[FRAME.size : start]), start


def no_tensors(cause: str) -> ServingError:
    """Return the error of a handler whose answer does not have the form of the protocol."""
    return HandlerFailed(NoTensors.message, 500, cause)
