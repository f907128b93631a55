"""Long tensors beside their messages: what protobuf's own library would read and write."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from torchere.serving.frontend.grpc.fields import MOST_FIELDS
from torchere.serving.frontend.grpc.open_inference_messages import (
    MOST_CUT_FIELDS,
    MOST_TENSORS,
    TensorReply,
    decode_request,
    encode_response,
)
from torchere.serving.frontend.grpc.protos.open_inference_pb2 import ModelInferRequest, ModelInferResponse
from torchere.serving.frontend.http2.messages import MessageFailed, StatusCode
from torchere.serving.frontend.http2.stream import JOINED_BYTES
from torchere.serving.frontend.open_inference.service import KNOWN_HEAD_BYTES

LONG = bytes(range(256)) * (JOINED_BYTES // 256)
tensors = st.lists(st.sampled_from([b"", b"\x3a\x02ab", b"x" * 300, LONG]), max_size=5)


def request(raw, name="m"):
    message = ModelInferRequest(model_name=name, id="7", raw_input_contents=raw)
    message.inputs.add(name="x", datatype="FP32", shape=[1, 2**40])
    message.parameters["p"].double_param = 0.5
    return message


@given(tensors, st.text(max_size=200))
def test_a_request_is_read_as_the_library_reads_it(raw, name):
    written = request(raw, name).SerializeToString()
    read = decode_request(written)
    assert [bytes(tensor) for tensor in read.raw] == raw
    assert read.fields.model_name == name
    assert read.fields.inputs == request([]).inputs
    assert read.fields.parameters["p"].double_param == 0.5


def test_a_long_tensor_is_not_copied_out_of_its_message():
    written = request([LONG]).SerializeToString()
    (tensor,) = decode_request(written).raw
    assert isinstance(tensor, memoryview)
    assert tensor.obj is written


def test_fields_may_stand_in_any_order_and_unknown_ones_are_passed_over():
    unknown = b"\x99\x06" + bytes(8) + b"\x9d\x06" + bytes(4) + b"\x90\x06\x05"  # 99: of 8, 4, and a number
    written = request([LONG]).SerializeToString() + unknown + request([b"second"]).SerializeToString()
    read = decode_request(written)
    assert [bytes(tensor) for tensor in read.raw] == [LONG, b"second"]
    assert len(read.fields.inputs) == 2


def test_very_many_tensors_are_left_to_the_library():
    raw = [b"x" * 300] * (MOST_TENSORS + 1)
    read = decode_request(request(raw).SerializeToString())
    assert list(read.raw) == raw
    assert not isinstance(read.raw, list)


@pytest.mark.parametrize(
    "end",
    [b"\x3a\xff\xff\xff\x7f", b"\x3a", b"\xff" * 11, b"\x3b", b"\x08" + b"\xff" * 10, b"\x39\x00", b"\x00"],
    ids=["too-long", "no-length", "no-end", "group", "no-end-of-a-number", "short-fixed", "no-field"],
)
def test_what_is_no_message_is_refused(end):
    with pytest.raises(DecodeError):
        decode_request(request([LONG]).SerializeToString() + end)


def within(tag, content):
    length = (len(content) & 0x7F | 0x80, len(content) >> 7 & 0x7F | 0x80, len(content) >> 14)
    return bytes((tag, *length)) + content


@pytest.mark.parametrize(
    "many",
    [
        b"\x78\x00" * MOST_FIELDS,
        b"\x2a\x00" * MOST_FIELDS,
        b"\x3a\x00" * MOST_FIELDS,
        within(0x2A, b"\x22\x00" * MOST_FIELDS),
        within(0x32, b"\x12\x00" * MOST_FIELDS),
    ],
    ids=["unknown", "inputs", "raw-tensors", "parameters-of-an-input", "parameters-of-an-output"],
)
def test_a_message_of_very_many_fields_is_not_read(many):
    with pytest.raises(MessageFailed, match="more than 20000 fields") as refused:
        decode_request(request([LONG]).SerializeToString() + many)
    assert refused.value.code is StatusCode.RESOURCE_EXHAUSTED


def test_elements_of_a_tensor_are_no_fields():
    count = 2 * MOST_FIELDS
    message = ModelInferRequest(model_name="m")
    tensor = message.inputs.add(name="x", datatype="BYTES", shape=[count])
    tensor.contents.bytes_contents.extend([b"a"] * count)
    (read,) = decode_request(message.SerializeToString()).fields.inputs
    assert len(read.contents.bytes_contents) == count


@given(tensors)
def test_an_answer_is_read_as_it_was_meant(raw):
    def reply():
        fields = ModelInferResponse(model_name="m", model_version="1")
        fields.outputs.add(name="y", datatype="FP32", shape=[2])
        return TensorReply(fields, [memoryview(tensor) for tensor in raw])

    written = encode_response(reply())
    whole = written if isinstance(written, bytes) else b"".join(written)
    assert ModelInferResponse.FromString(whole) == reply().whole()
    assert list(reply().whole().raw_output_contents) == raw


@pytest.mark.parametrize("field", [b"\x3a\x00", b"\x1a\x00", b"\x78\x00"], ids=["tensor", "id", "unknown"])
def test_a_short_message_of_very_many_fields_is_left_to_the_library(field):
    read = decode_request(field * (MOST_CUT_FIELDS + 1))
    assert read.head == b""
    assert len(read.raw) == (MOST_CUT_FIELDS + 1 if field == b"\x3a\x00" else 0)


@pytest.mark.parametrize(
    "message",
    [
        request([b"ab"]).SerializeToString() + b"\x0b\x0c",  # an unknown group
        b"\xba\x80\x80\x80\x80\x80\x00\x01a",  # the tag of a tensor in seven bytes
        b"\x3a\x81\x80\x80\x80\x80\x80\x00a",  # and its size
        b"\x1a\x01\xff\x1a\x01a",  # two ids, the first is no text
        b"\x1a\x01a\x1a\x01b",
    ],
    ids=["group", "long-tag", "long-size", "no-text", "two-ids"],
)
def test_a_short_message_is_refused_where_the_library_refuses_it(message):
    try:
        library = ModelInferRequest.FromString(message)
    except DecodeError:
        with pytest.raises(DecodeError):
            decode_request(message)
        return
    read = decode_request(message)
    assert (read.fields.id, list(read.raw)) == (library.id, list(library.raw_input_contents))


def test_a_long_head_is_decoded_at_once_and_not_held():
    message = ModelInferRequest(model_name="m" * KNOWN_HEAD_BYTES, id="7", raw_input_contents=[b"ab"])
    read = decode_request(message.SerializeToString())
    assert (read.head, read.fields.id, read.fields.model_name) == (b"", "7", message.model_name)
