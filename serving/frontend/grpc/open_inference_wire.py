"""Codec for Open Inference Protocol messages with long tensors that does not copy the tensors.

The protobuf library copies a bytes field when it decodes a message, again when the field is read, and twice
when it encodes one. For a call with 1 MiB each way that was nearly half of the event loop's work. The fields
of a message may have any order, so long tensors are appended behind the fields that the library encoded, and
cut out before it decodes the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torchere.serving.frontend.grpc.fields import LONG_BYTES, Fields
from torchere.serving.frontend.grpc.protos.open_inference_pb2 import ModelInferRequest, ModelInferResponse
from torchere.serving.frontend.http2.messages import Received
from torchere.serving.frontend.http2.stream import JOINED_BYTES, Encoded

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
