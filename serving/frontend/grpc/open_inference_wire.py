"""Messages of the Open Inference Protocol with long tensors in them, without copying the tensors.

Protobuf's library copies a field of bytes when it reads a message, again when the field is asked for, and
twice on the way out; of a call with 1 MiB each way that was nearly half of what the event loop had to do.
Fields may stand in any order in a message, so long ones are put behind what the library wrote of the others,
and cut out before it reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from google.protobuf.message import DecodeError

from torchere.serving.frontend.grpc.protos.open_inference_pb2 import ModelInferRequest, ModelInferResponse
from torchere.serving.frontend.http2.messages import Received
from torchere.serving.frontend.http2.stream import JOINED_BYTES, Encoded

Raw = bytes | memoryview

MOST_TENSORS = 256  # that are cut out of one message; the library keeps more of them in less memory
# The protocol's numbers of `raw_input_contents` and `raw_output_contents`, as fields that have a length.
_INPUT_TAG = 7 << 3 | 2
_OUTPUT_TAG = 6 << 3 | 2
_VARINT, _EIGHT_BYTES, _SIZED, _FOUR_BYTES = 0, 1, 2, 5
_FIXED_BYTES = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}
_MOST_VARINT_BYTES = 10


class TensorMessage(NamedTuple):
    """A request, its raw tensors apart: `fields` may lack them."""

    fields: ModelInferRequest
    raw: Sequence[Raw]


class TensorReply(NamedTuple):
    """An answer, its raw tensors apart: `fields` lacks them."""

    fields: ModelInferResponse
    raw: Sequence[Raw]

    def whole(self) -> ModelInferResponse:
        """The answer as one message, to stand in another one."""
        self.fields.raw_output_contents.extend(map(bytes, self.raw))
        return self.fields


def decode_request(message: Received) -> TensorMessage:
    """Read a request; views of `message` where it is long.

    Raises:
        DecodeError: it is none.
    """
    if len(message) >= JOINED_BYTES:
        rest, tensors = _cut(message)
        if len(tensors) <= MOST_TENSORS:
            return TensorMessage(ModelInferRequest.FromString(rest), tensors)
    fields = ModelInferRequest.FromString(bytes(message))
    return TensorMessage(fields, fields.raw_input_contents)


def encode_response(reply: TensorReply) -> Encoded:
    """Write an answer; in parts, when it is long."""
    if sum(map(len, reply.raw)) < JOINED_BYTES:
        return reply.whole().SerializeToString()
    parts: list[Raw] = [reply.fields.SerializeToString()]
    for tensor in reply.raw:
        parts += (bytes((_OUTPUT_TAG,)) + _written(len(tensor)), tensor)
    return parts


def _cut(message: Received) -> tuple[bytes, list[Raw]]:
    """A message without its raw tensors, and up to one more of these than may be cut out."""
    view, end = memoryview(message), len(message)
    kept: list[memoryview] = []
    tensors: list[Raw] = []
    at = kept_from = 0
    while at < end and len(tensors) <= MOST_TENSORS:
        start = at
        tag, at = _read(message, at)
        kind = tag & 7
        if kind == _SIZED:
            size, at = _read(message, at)
        elif kind == _VARINT:
            size, (_, at) = 0, _read(message, at)
        elif kind in _FIXED_BYTES:
            size = _FIXED_BYTES[kind]
        else:
            raise DecodeError(f"found wire type {kind}")
        if at + size > end:
            raise DecodeError("a field is longer than its message")
        if tag == _INPUT_TAG:
            kept.append(view[kept_from:start])
            tensors.append(view[at : at + size])
            kept_from = at + size
        at += size
    return b"".join((*kept, view[kept_from:])), tensors


def _read(message: Received, at: int) -> tuple[int, int]:
    """A varint, and where what follows it begins."""
    value = 0
    for place, byte in enumerate(message[at : at + _MOST_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * place
        if not byte & 0x80:
            return value, at + place + 1
    raise DecodeError("a number has no end")


def _written(number: int) -> bytes:
    """A number as a varint."""
    written = bytearray()
    while number >= 0x80:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)
