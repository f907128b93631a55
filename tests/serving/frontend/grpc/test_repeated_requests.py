"""Requests and answers whose heads came before: each is what it would be the first time."""

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchere.archiver.signature import Signature, TensorSpec
from torchere.handlers.tensors.answer import FRAME, IN_JSON, read_wish
from torchere.serving.errors import InvalidRequest, ModelNotFound, ServingError
from torchere.serving.frontend.grpc import open_inference_messages
from torchere.serving.frontend.grpc.open_inference import Tensors
from torchere.serving.frontend.grpc.open_inference_messages import (
    RawAnswers,
    encode_response,
    infer_response,
)
from torchere.serving.frontend.grpc.protos.open_inference_pb2 import ModelInferRequest, ModelInferResponse
from torchere.serving.frontend.known_heads import Known
from torchere.serving.frontend.model_facts import ModelFacts
from torchere.serving.frontend.open_inference.service import KNOWN_HEAD_BYTES, KNOWN_HEADS, TensorService
from torchere.serving.frontend.open_inference.tensor_answer import read_framed
from torchere.serving.telemetry.numbers import VersionNumbers
from torchere.serving.types import NO_DEADLINE, InferResponse, ModelKey

ROW = bytes(16)


class Plane:
    """The models `a` (of any tensors) and `b` (of four numbers a row)."""

    def __init__(self):
        self.signatures = {"a": None, "b": signature(4)}

    def tensors(self, model, version):
        if model not in self.signatures or version not in (None, "1.0"):
            raise ModelNotFound(f"Model not found: {model}")
        return self.signatures[model]

    def facts(self, model, version):
        taken = self.tensors(model, version)
        numbers = VersionNumbers(model, "1.0")
        return ModelFacts(ModelKey(model, "1.0"), ("1.0",), "tensor", {}, taken, 8, numbers)

    def refuse_unknown(self, error):
        return error


def signature(width):
    return Signature((TensorSpec("x", "FP32", (-1, width)),), (TensorSpec("y", "FP32", (-1, 2)),))


def tensors(plane, envelope=None):
    return Tensors(plane, TensorService(plane, envelope), RawAnswers(), as_torchserve=False)


def asked(reader, message, metadata=(), deadline_s=NO_DEADLINE):
    """Return the request that a message becomes, without its own id, or the error."""
    call = SimpleNamespace(metadata=metadata, deadline_s=deadline_s)
    try:
        model, version, request = reader.asked(reader.decode(message), call)
    except ServingError as err:
        return type(err), str(err)
    assert len(request.request_id) == 36
    plain = [(one.name, bytes(one.value), one.content_type) for one in request.parameters]
    return model, version, plain, request.headers, request.deadline_s, request.priority


def message(model="b", shape=(1, 4), raw=ROW, *, count=1, call_id="", version="", typed=False, **parameters):
    made = ModelInferRequest(model_name=model, model_version=version, id=call_id)
    tensor = made.inputs.add(name="x", datatype="FP32", shape=shape)
    if typed:
        tensor.contents.fp32_contents.extend([1.0] * 4)
    else:
        made.raw_input_contents.extend([raw] * count)
    for name, value in parameters.items():
        if isinstance(value, int):
            made.parameters[name].int64_param = value
        else:
            made.parameters[name].string_param = value
    return made.SerializeToString()


messages = st.builds(
    message,
    st.sampled_from(["b", "b", "b", "a", "nosuch", ""]),
    st.sampled_from([(1, 4), (1, 4), (1, 4), (4,), (2, 2), (0, 4)]),
    st.sampled_from([ROW, bytes(reversed(ROW)), b"", b"x" * 15, b"y" * 32]),
    call_id=st.sampled_from(["", "7", "x" * 1025]),
    version=st.sampled_from(["", "", "", "1.0", "9.0"]),
    typed=st.sampled_from([False, False, False, True]),
)
METADATA = [
    (),
    (("user-agent", "x"),),
    (("x-torchere-priority", "3"),),
    (("x-torchere-priority", "much"),),
    (("traceparent", f"00-{'1' * 32}-{'2' * 16}-01"),),
]


@given(
    st.lists(st.tuples(messages, st.sampled_from(METADATA), st.sampled_from([NO_DEADLINE, 5.0])), max_size=12)
)
def test_a_repeated_request_is_what_it_was_the_first_time(calls):
    plane = Plane()
    one = tensors(plane)
    for call in [*calls, *calls]:
        assert asked(one, *call) == asked(tensors(plane), *call)


@pytest.mark.parametrize(
    "other",
    [
        {"raw": b"x" * 15},
        {"raw": ROW + ROW},
        {"raw": b""},
        {"count": 2},
        {"count": 0},
        {"call_id": "x" * 1025},
    ],
    ids=str,
)
def test_a_bad_call_with_a_known_head_is_refused_as_the_first_time(other):
    plane = Plane()
    one = tensors(plane)
    assert asked(one, message())[0] == "b"
    refused = asked(one, message(**other))
    assert refused == asked(tensors(plane), message(**other))
    assert refused[0] is InvalidRequest
    assert asked(one, message())[0] == "b"


def test_a_repeated_request_is_not_translated_again(monkeypatch):
    one = tensors(Plane())
    first = asked(one, message(call_id="1", timeout=600))
    monkeypatch.setattr(open_inference_messages, "tensor_request", None)
    again = asked(one, message(call_id="2", raw=bytes(range(16)), timeout=600), METADATA[2])
    assert again[2] == [("x", bytes(range(16)), first[2][0][2])]
    assert again[5] == 3


def test_another_signature_is_checked_anew():
    plane = Plane()
    one = tensors(plane)
    assert asked(one, message())[0] == "b"
    plane.signatures["b"] = signature(5)
    refused, text = asked(one, message())
    assert refused is InvalidRequest
    assert text == "inputs[0].shape: found [1, 4], expected [-1, 5] (-1 is any size)"
    plane.signatures.clear()
    assert asked(one, message())[0] is ModelNotFound


def test_behind_an_envelope_each_request_is_translated(monkeypatch):
    one = tensors(Plane(), "kservev2")
    monkeypatch.setattr(one.service, "enveloped", lambda facts: True)
    found = [dict(asked(one, message(call_id=call_id))[3]) for call_id in ("1", "2")]
    assert [read_wish(headers[IN_JSON]).id for headers in found] == ["1", "2"]  # the handler reads it


def test_a_full_table_begins_anew_and_long_heads_are_not_kept():
    table: Known[int, str] = Known(3)
    for number in range(7):
        table.keep(number, str(number))
        assert table[number] == str(number)
        assert len(table) <= 3
    one = tensors(Plane())
    for number in range(KNOWN_HEADS + 5):
        asked(one, message(custom=f"{number}"))
    assert len(one.service.known) == 5
    asked(one, message(custom="x" * KNOWN_HEAD_BYTES))
    assert len(one.service.known) == 5


def framed(*raw, extra=b"", **members):
    outputs = [
        {
            **{"name": f"y{at}", "datatype": "UINT8", "shape": [len(tensor)]},
            "parameters": {"binary_data_size": len(tensor)},
        }
        for at, tensor in enumerate(raw)
    ]
    head = msgspec.json.encode({"model_name": "m", "model_version": "1", "outputs": outputs, **members})
    return InferResponse(b"".join((FRAME.pack(len(head)), head, *raw, extra)))


def whole(encoded):
    return ModelInferResponse.FromString(encoded if isinstance(encoded, bytes) else b"".join(encoded))


@given(
    st.lists(
        st.builds(framed, st.sampled_from([b"", b"a", b"bcd", b"e" * 70_000]), st.sampled_from([b"", b"f"])),
        max_size=4,
    ),
    st.sampled_from(["", "7", "ä" * 90]),
)
def test_a_repeated_answer_is_what_it_was_the_first_time(responses, call_id):
    answers = RawAnswers()
    for response in [*responses, *responses]:
        wanted = encode_response(infer_response(read_framed(response.body), raw=True, call_id=call_id))
        found = answers.encode(response, call_id)
        assert isinstance(found, bytes) == isinstance(wanted, bytes)
        assert whole(found) == whole(wanted)


@pytest.mark.parametrize(
    "broken", [b"", b"\x01", FRAME.pack(9) + b"{}", framed(b"abc").body[:-1]], ids=["", "1", "9", "short"]
)
def test_a_body_that_is_not_whole_is_an_error_each_time(broken):
    answers = RawAnswers()
    answers.encode(framed(b"abc"), "")
    for _ in range(2):
        with pytest.raises(ServingError, match="none of the Open Inference Protocol"):
            answers.encode(InferResponse(broken), "")


class Changing(bytearray):
    """A body that its worker changes after each look at its head: the name `y0` becomes `z0`."""

    def __getitem__(self, key):
        found = super().__getitem__(key)
        self[:] = self.replace(b'"y0"', b'"z0"')
        return found


def test_a_worker_that_changes_a_head_while_it_is_read_changes_no_other_answer():
    answers = RawAnswers()
    body: Any = Changing(framed(b"abc").body)
    answers.encode(InferResponse(body), "")
    assert whole(answers.encode(framed(b"abc"), "")).outputs[0].name == "y0"


def test_bytes_behind_the_last_tensor_are_left_out():
    answers = RawAnswers()
    for _ in range(2):
        sent = whole(answers.encode(framed(b"abc", extra=b"more"), ""))
        assert list(sent.raw_output_contents) == [b"abc"]


def test_a_body_that_has_an_id_keeps_it_each_time():
    answers = RawAnswers()
    assert [whole(answers.encode(framed(b"abc", id="own"), "7")).id for _ in range(2)] == ["own", "own"]


def test_a_request_is_translated_with_its_decoding_and_once(monkeypatch):
    one = tensors(Plane())
    decoded = one.decode(message(typed=True))
    assert decoded.translated().inputs[0].raw == np.ones(4, "<f4").tobytes()
    bad = one.decode(message(typed=True, shape=(1, 5)))
    monkeypatch.setattr(open_inference_messages, "tensor_request", None)
    with pytest.raises(InvalidRequest, match="found 4 elements, expected 5"):
        bad.translated()


def test_tensors_that_are_longer_than_their_message_count():
    made = ModelInferRequest(model_name="b")
    made.inputs.add(name="x", datatype="INT64", shape=[1000]).contents.int64_contents.extend([1] * 1000)
    text = made.SerializeToString()
    assert tensors(Plane()).decode(text).size == 8000 > len(text)


def test_inputs_that_are_too_many_are_not_translated(monkeypatch):
    monkeypatch.setattr(open_inference_messages, "_input", None)
    made = ModelInferRequest(model_name="b")
    for _ in range(1001):
        made.inputs.add(name="x", datatype="FP32", shape=[1]).contents.fp32_contents.append(1)
    refused = asked(tensors(Plane()), made.SerializeToString())
    assert refused == (InvalidRequest, "inputs: found 1001, expected at most 1000")
