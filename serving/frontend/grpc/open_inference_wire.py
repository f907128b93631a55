"""Messages of the Open Inference Protocol with long tensors in them, without copying the tensors.

Protobuf's library copies a field of bytes when it reads a message, again when the field is asked for, and
twice on the way out; of a call with 1 MiB each way that was nearly half of what the event loop had to do.
Fields may stand in any order in a message, so long ones are put behind what the library wrote of the others,
and cut out before it reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torchere.serving.frontend.grpc.fields import LONG_BYTES, Fields
from torchere.serving.frontend.grpc.protos.open_inference_pb2 import ModelInferRequest, ModelInferResponse
from torchere.serving.frontend.http2.messages import Received
from torchere.serving.frontend.http2.stream import JOINED_BYTES, Encoded

Raw = bytes | memoryview

MOST_TENSORS = 256  # that are cut out of one message; the library keeps more of them in less memory
# The protocol's numbers of `raw_input_contents` and `raw_output_contents`, as fields that have a length.
_INPUT_TAG = 7 << 3 | 2
_OUTPUT_TAG = 6 << 3 | 2
_TENSOR_TAGS = (5 << 3 | 2, 6 << 3 | 2)  # of `inputs` and `outputs` of a request


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
        MessageFailed: it has too many fields.
    """
    if len(message) >= LONG_BYTES:
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
    """A message without its raw tensors, and these.

    Raises:
        DecodeError: it is none.
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
                pass  # their parameters count, too
    return b"".join((*kept, view[kept_from:])), tensors


def _written(number: int) -> bytes:
    """A number as a varint."""
    written = bytearray()
    while number >= 0x80:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)
