"""Tensors as the JSON that handlers behind an envelope read, and their JSON as tensors."""

import json
import struct

import numpy as np
import pytest

from torchere.handlers.context import RequestProcessor
from torchere.handlers.tensors import BYTES, DATATYPES, TensorError, tensor_type
from torchere.handlers.tensors.answer import (
    FRAME,
    HEADER_LENGTH,
    AnswerEncoder,
    WantedOutput,
    Wish,
    wish_header,
)
from torchere.handlers.tensors.enveloped import BytesAs, NoTensors, read_answer, request_json

X = ("x", tensor_type(DATATYPES["FP32"], (1, 2)), np.array([1, 2], np.float32).tobytes())
STRINGS = ("t", tensor_type(BYTES, (2,)), struct.pack("<I", 1) + b"a" + struct.pack("<I", 0))
ANSWER = {
    "id": "7",
    "model_name": "m",
    "model_version": 2,
    "outputs": [{"name": "y", "datatype": "INT8", "data": [1, 2], "shape": [2], "parameters": {"k": 1}}],
}


def encoded(answer: object, wish: Wish) -> tuple[bytes, RequestProcessor]:
    request = RequestProcessor(dict([wish_header(wish)]), "id")
    return AnswerEncoder("other", "9", "/nowhere").encode(answer, request), request


def test_a_request_is_torchserves_json() -> None:
    assert request_json("m", "7", [X, STRINGS], "text") == (
        b'{"id":"7","model_name":"m","inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1.0,2.0]},'
        b'{"name":"t","shape":[2],"datatype":"BYTES","data":["a",""]}]}'
    )
    assert b'"data":["YQ==",""]' in request_json("m", "", [STRINGS], "base64")


@pytest.mark.parametrize("raw", [struct.pack("<I", 1) + b"\xff", struct.pack("<I", 9)])
def test_bytes_that_no_json_can_hold_are_refused(raw: bytes) -> None:
    with pytest.raises(TensorError, match=r"^inputs\[1\]"):
        request_json("m", "", [X, ("t", tensor_type(BYTES, (1,)), raw)], "text")


def test_the_refusal_of_bytes_advises_nothing_on_outputs() -> None:
    binary = ("t", tensor_type(BYTES, (1,)), struct.pack("<I", 1) + b"\xff")
    with pytest.raises(TensorError, match=r"^inputs\[0\]: found bytes .* only; the model reads .* as JSON$"):
        request_json("m", "", [binary], "text")


@pytest.mark.parametrize("answer", [ANSWER, json.dumps(ANSWER), json.dumps(ANSWER).encode()])
def test_an_answer_is_put_into_the_clients_form(answer: object) -> None:
    body, request = encoded(answer, Wish(json_bytes_as="text"))
    assert json.loads(body) == {
        **ANSWER,
        "model_version": "2",
    }
    body, request = encoded(answer, Wish("else", binary=True, json_bytes_as="text"))
    end = int(request.response_headers[HEADER_LENGTH])
    assert (json.loads(body[:end])["id"], body[end:]) == ("7", b"\1\2")
    body, request = encoded(answer, Wish(framed=True, json_bytes_as="text"))
    assert body[FRAME.size + FRAME.unpack_from(body)[0] :] == b"\1\2"
    assert json.loads(body[FRAME.size : FRAME.size + FRAME.unpack_from(body)[0]])["outputs"] == [
        {"name": "y", "datatype": "INT8", "shape": [2], "parameters": {"k": 1, "binary_data_size": 2}}
    ]
    body, request = encoded(answer, Wish(outputs=(WantedOutput("z"),), json_bytes_as="text"))
    assert (request.status_code, body[:26]) == (400, b"outputs[0].name: found 'z'")


@pytest.mark.parametrize(
    ("wanted", "end"),
    [
        ((WantedOutput("z"),), b"\1\2\3"),
        ((WantedOutput("z"), WantedOutput("w")), b"}\3"),
        ((WantedOutput("y", classes=1),), b"2:1"),
    ],
)
def test_over_grpc_the_outputs_that_are_unknown_are_ignored(
    wanted: tuple[WantedOutput, ...], end: bytes
) -> None:
    given = (("y", [1, 2]), ("w", [3]))
    outputs = [{"name": n, "datatype": "INT8", "data": data, "shape": [len(data)]} for n, data in given]
    body, request = encoded({"outputs": outputs}, Wish(framed=True, outputs=wanted, json_bytes_as="text"))
    assert (request.status_code, body[-len(end) :]) == (200, end)


@pytest.mark.parametrize("parameters", [{}, [], None, "text"])
def test_parameters_that_are_none_are_left_out(parameters: object) -> None:
    output = {"name": "y", "datatype": "INT8", "data": [1, 2], "shape": [2], "parameters": parameters}
    body, request = encoded({"outputs": [output]}, Wish(framed=True, json_bytes_as="text"))
    assert (request.status_code, body[-2:]) == (200, b"\1\2")


def elements(answer: bytes, bytes_as: BytesAs) -> list[bytes]:
    found: list[bytes] = read_answer(answer, bytes_as).outputs[0].tensor.tolist()
    return found


def test_bytes_that_are_no_texts_become_their_json() -> None:
    body = b'{"outputs":[{"name":"y","datatype":"BYTES","data":[{"cat": 0.5}, "a", null],"shape":[3]}]}'
    assert elements(body, "text") == [b'{"cat":0.5}', b"a", b"null"]
    assert elements(body, "base64") == [b'{"cat":0.5}', b'"a"', b"null"]


def test_an_answer_may_hold_numbers_that_json_lacks() -> None:
    number = b'{"name":"y","datatype":"FP64","data":[NaN, Infinity, 1.5],"shape":[3]}'
    text = b'{"name":"t","datatype":"BYTES","data":[{"odds": NaN}, "NaN"],"shape":[2]}'
    answer = read_answer(b'{"outputs":[%b, %b]}' % (number, text), "text")
    assert answer.outputs[0].tensor.tobytes() == struct.pack("<3d", float("nan"), float("inf"), 1.5)
    assert answer.outputs[1].tensor.tolist() == [b'{"odds":NaN}', b"NaN"]


@pytest.mark.parametrize(
    "body",
    [
        b"text",
        b"[]",
        b'{"outputs":[{"name":"y"}]}',
        b'{"outputs":[{"name":"y","datatype":"WORD","data":[1],"shape":[1]}]}',
        b'{"outputs":[{"name":"y","datatype":"INT8","data":[1],"shape":[7]}]}',
        rb'{"outputs":[{"name":"\ud800","datatype":"INT8","data":[1],"shape":[1]}]}',
    ],
)
def test_an_answer_that_is_none_of_the_protocol_is_the_handlers_failure(body: bytes) -> None:
    with pytest.raises(NoTensors):
        encoded(body, Wish(json_bytes_as="text"))


def test_an_error_of_the_handler_is_its_own_text() -> None:
    request = RequestProcessor(dict([wish_header(Wish(json_bytes_as="text"))]), "id")
    request.report_status(422)
    assert AnswerEncoder("m", "1", "/nowhere").encode("no", request) == b"no"
