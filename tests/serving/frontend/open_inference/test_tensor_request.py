"""Requests on their way to the executor, and what comes back as records."""

import struct
from typing import Any

import numpy as np
import pytest

from torchere.archiver.signature import Limit, Signature, TensorSpec
from torchere.handlers.encode import decode_input
from torchere.handlers.tensors import BYTES, DATATYPES
from torchere.handlers.tensors.answer import FRAME, IN_JSON, OPEN_INFERENCE, WantedOutput, Wish, read_wish
from torchere.serving.errors import HandlerFailed, InvalidRequest, ServingError
from torchere.serving.frontend.open_inference.service import check_signature, filled
from torchere.serving.frontend.open_inference.tensor_answer import (
    as_client_knows,
    check_accepted,
    read_framed,
)
from torchere.serving.frontend.open_inference.tensor_request import (
    InputTensor,
    TensorRequest,
    infer_request,
    input_tensor,
    sequence_headers,
)
from torchere.serving.types import NO_DEADLINE, InferResponse

FP32 = DATATYPES["FP32"]
X = InputTensor("x", FP32, (1, 2), np.array([1, 2], np.float32).tobytes())
STRINGS = InputTensor("t", BYTES, (2,), struct.pack("<I", 1) + b"a" + struct.pack("<I", 0))


def test_each_input_is_a_value_that_the_executor_reads_as_an_array() -> None:
    made = infer_request(TensorRequest((X, STRINGS)))
    rows = {p.name: decode_input(p.value, p.content_type) for p in made.parameters}
    assert rows["x"].tolist() == [[1, 2]]  # type: ignore[attr-defined]
    assert rows["t"].tolist() == [b"a", b""]  # type: ignore[attr-defined]
    assert rows["x"].flags.writeable  # type: ignore[attr-defined]


def test_the_rest_travels_as_a_wish_in_a_header_that_no_client_can_send() -> None:
    parameters: dict[str, bool | int | float | str] = {"k": "v", "sequence_id": 4, "sequence_end": True}
    request = TensorRequest((X,), "7", parameters, (WantedOutput("y"),), binary=True)
    made = filled(infer_request(request), (), "id", (("accept", "*/*"),), NO_DEADLINE)
    headers = dict(made.headers)
    wish = read_wish(headers[OPEN_INFERENCE])
    assert (wish.id, wish.parameters, wish.outputs) == ("7", parameters, (WantedOutput("y"),))
    assert (wish.binary, wish.framed, wish.ends_sequence) == (True, False, "4")
    assert headers["accept"] == "*/*"
    assert OPEN_INFERENCE.startswith(":")


def test_a_framed_wish_leaves_the_id_to_the_door_that_knows_it() -> None:
    headers = dict(infer_request(TensorRequest((X,), "7", framed=True)).headers)
    assert read_wish(headers[OPEN_INFERENCE]) == Wish(framed=True)


def test_a_handler_that_reads_json_gets_the_id_and_no_header_of_tensors() -> None:
    headers = dict(infer_request(TensorRequest((X,), "7", framed=True), "base64").headers)
    assert read_wish(headers[IN_JSON]) == Wish("7", framed=True, json_bytes_as="base64")
    assert OPEN_INFERENCE not in headers


@pytest.mark.parametrize(
    ("parameters", "wanted"),
    [
        ({}, ()),
        ({"sequence_id": 0}, ()),
        ({"sequence_id": ""}, ()),
        ({"sequence_id": 2**64 - 1}, (("ts_request_sequence_id", str(2**64 - 1)),)),
        (
            {"sequence_id": "s", "sequence_start": True},
            (("ts_request_sequence_id", "s"), ("ts_request_sequence_start", "true")),
        ),
        (
            {"sequence_id": "s", "sequence_end": True},
            (("ts_request_sequence_id", "s"), ("ts_request_sequence_end", "s")),
        ),
    ],
)
def test_sequences_have_the_contracts_headers(parameters: dict[str, Any], wanted: object) -> None:
    assert sequence_headers(parameters) == wanted


@pytest.mark.parametrize("timeout", [600, 2.5, "30s"])
@pytest.mark.parametrize("deadline_s", [NO_DEADLINE, 5.0])
def test_the_timeout_of_the_protocol_is_no_deadline(deadline_s: float, timeout: Any) -> None:
    request = infer_request(TensorRequest((X,), parameters={"timeout": timeout}))
    assert filled(request, (), "id", (), deadline_s).deadline_s == deadline_s


@pytest.mark.parametrize(
    ("shape", "text"), [([3], "found 4 bytes, expected 12"), ([-1], r"shape\[0\]: found -1")]
)
def test_raw_bytes_have_to_fit_their_shape(shape: list[int], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        input_tensor("x", FP32, shape, b"abcd", "inputs[0]")


SIGNATURE = Signature(
    (TensorSpec("a", "FP32", (-1, 2)), TensorSpec("b", "INT8", (-1,))), (TensorSpec("y", "FP32", (-1,)),)
)
A, B = InputTensor("a", FP32, (1, 2), bytes(8)), InputTensor("b", DATATYPES["INT8"], (1,), b"\0")


@pytest.mark.parametrize(
    ("inputs", "outputs", "text"),
    [
        ((A,), (), "inputs: found 'a', expected 'b' too"),
        ((), (), "inputs: found none, expected 'a', 'b' too"),
        ((A, B, B._replace(name="c")), (), r"inputs\[2\]\.name: found 'c', expected one of 'a', 'b'"),
        ((A, B._replace(datatype=FP32)), (), r"inputs\[1\]\.datatype: found FP32, expected INT8"),
        ((A._replace(shape=(1, 3)), B), (), r"inputs\[0\]\.shape: found \[1, 3\], expected \[-1, 2\]"),
        ((A._replace(shape=(2,)), B), (), r"inputs\[0\]\.shape: found \[2\], expected \[-1, 2\]"),
        (
            (A, B._replace(shape=(2,))),
            (),
            r"inputs\[1\]\.shape\[0\]: found 2, expected 1 rows as inputs\[0\]",
        ),
        ((A, B), (WantedOutput("z"),), r"outputs\[0\]\.name: found 'z', expected one of 'y'"),
    ],
)
def test_tensors_that_the_model_does_not_take_are_refused(inputs: Any, outputs: Any, text: str) -> None:
    check_signature(TensorRequest((B, A), outputs=(WantedOutput("y"),)), SIGNATURE)
    with pytest.raises(InvalidRequest, match=f"^{text}"):
        check_signature(TensorRequest(inputs, outputs=outputs), SIGNATURE)


def test_sizes_outside_of_the_declared_ones_are_refused_with_the_limit() -> None:
    limits = (Limit(0, 1, 4), Limit(1, 32, None, 32))
    signature = Signature((TensorSpec("a", "FP32", (-1, -1), limits),), (TensorSpec("y", "FP32", (-1,)),))
    check_signature(TensorRequest((InputTensor("a", FP32, (4, 64), bytes(1024)),)), signature)
    for shape, text in [
        ((5, 64), "expected dimension 0 to be 1 to 4"),
        ((4, 48), "expected dimension 1 to be a multiple of 32, at least 32"),
    ]:
        with pytest.raises(InvalidRequest, match=rf"^inputs\[0\]\.shape: found .*, {text}"):
            check_signature(TensorRequest((InputTensor("a", FP32, shape, b""),)), signature)


@pytest.mark.parametrize(
    ("datatype", "shape", "size"),
    [
        *(("WORD", "[0]", "0"), ("INT8", "[2]", "1"), ("INT8", "[9]", "9"), ("INT8", "[1]", "-1")),
        *(("INT8", "[-1]", "1"), ("INT8", "[1]", "null")),
    ],
)
def test_binary_outputs_that_are_none_are_the_handlers_failure(datatype: str, shape: str, size: str) -> None:
    output = (
        f'{{"name":"y","datatype":"{datatype}","shape":{shape},"parameters":{{"binary_data_size":{size}}}}}'
    )
    head = f'{{"outputs":[{output}]}}'.encode()
    body = FRAME.pack(len(head)) + head + b"\x02\0\0\0"
    with pytest.raises(HandlerFailed, match="none of the Open Inference Protocol"):
        read_framed(body)


@pytest.mark.parametrize("body", [b"", b"abc", b"\xff\xff\xff\xff{}", b"\2\0\0\0[]"])
def test_a_body_without_a_frame_is_the_handlers_failure(body: bytes) -> None:
    with pytest.raises(HandlerFailed):
        read_framed(body)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"no", "no"),
        (b'{"message": "why"}', "why"),
        (b'{"error": "why", "message": 3}', "why"),
        (b"[1]", "[1]"),
        (b"\xff", "\ufffd"),
    ],
)
def test_a_status_that_the_handler_chose_is_an_error_with_its_words(body: bytes, text: str) -> None:
    with pytest.raises(HandlerFailed) as caught:
        check_accepted(InferResponse(body, status=422))
    assert (caught.value.message, caught.value.status) == (text, 422)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (HandlerFailed(), 500),
        (HandlerFailed("busy", 503), 503),
        (HandlerFailed("number of batch response mismatched"), 500),
        (HandlerFailed("no", 404), 404),
    ],
)
def test_a_handlers_bug_is_500_and_503_its_choice(error: HandlerFailed, status: int) -> None:
    told: ServingError = as_client_knows(error)
    assert isinstance(told, HandlerFailed)
    assert told.status == status
