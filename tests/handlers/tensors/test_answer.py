"""The body, the headers and the status of an answer to tensors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchere.archiver.signature import Signature, TensorSpec
from torchere.handlers.context import RequestProcessor
from torchere.handlers.tensors.answer import (
    FRAME,
    HEADER_LENGTH,
    AnswerEncoder,
    WantedOutput,
    Wish,
    read_wish,
    wish_header,
)

ANSWER = {"a": np.array([[1, 2]], np.float32), "b": np.array([7], np.int8), "t": "é"}


def processor(wish: Wish) -> RequestProcessor:
    return RequestProcessor(dict([wish_header(wish)]), "id")


def encoded(answer: object, wish: Wish, folder: Path = Path("/nowhere")) -> tuple[bytes, RequestProcessor]:
    request = processor(wish)
    return AnswerEncoder("m", "2", str(folder)).encode(answer, request), request


def outputs(body: bytes) -> list[Any]:
    found: list[Any] = json.loads(body)["outputs"]
    return found


def test_a_wish_is_read_as_it_was_written() -> None:
    wish = Wish("7", {"a": 1, "b": "x", "c": True, "d": 0.5}, (WantedOutput("y", True, 3),), True, True, "s")
    assert read_wish(wish_header(wish)[1]) == wish


def test_requests_without_tensors_are_answered_as_ever() -> None:
    request = RequestProcessor({}, "id")
    assert AnswerEncoder("m", "2", "/nowhere").encode({"y": 1}, request) == b'{\n  "y": 1\n}'
    assert request.response_headers == {}


def test_an_answer_is_json_with_the_model_and_the_clients_id() -> None:
    body, request = encoded(ANSWER, Wish(id="q"))
    said = json.loads(body)
    assert list(said) == ["id", "model_name", "model_version", "outputs"]
    assert (said["id"], said["model_name"], said["model_version"]) == ("q", "m", "2")
    assert said["outputs"][0] == {"name": "a", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}
    assert said["outputs"][2]["data"] == ["é"]
    assert request.response_headers == {"content-type": "application/json"}


def test_binary_outputs_stand_behind_the_json() -> None:
    body, request = encoded(ANSWER, Wish(binary=True))
    length = int(request.response_headers[HEADER_LENGTH])
    assert [o["parameters"]["binary_data_size"] for o in outputs(body[:length])] == [8, 1, 6]
    assert body[length:] == np.array([1, 2], np.float32).tobytes() + b"\x07" + b"\2\0\0\0\xc3\xa9"
    assert request.response_headers["content-type"] == "application/octet-stream"


def test_outputs_come_in_the_order_and_the_form_they_are_asked_for() -> None:
    wish = Wish(outputs=(WantedOutput("b", True), WantedOutput("a")), binary=True)
    body, request = encoded(ANSWER, wish)
    length = int(request.response_headers[HEADER_LENGTH])
    assert [o["name"] for o in outputs(body[:length])] == ["b", "a"]
    assert outputs(body[:length])[1]["data"] == [1.0, 2.0]
    assert body[length:] == b"\x07"


def test_a_framed_body_tells_the_length_of_its_json_itself() -> None:
    body, request = encoded(ANSWER, Wish(framed=True, outputs=(WantedOutput("b"),)))
    (length,) = FRAME.unpack_from(body)
    assert outputs(body[4 : 4 + length])[0]["parameters"] == {"binary_data_size": 1}
    assert body[4 + length :] == b"\x07"
    assert HEADER_LENGTH not in request.response_headers


def test_the_archives_signature_names_the_outputs(tmp_path: Path) -> None:
    specs = (TensorSpec("y", "FP32", (-1,)),)
    (tmp_path / "signature.json").write_text(Signature(specs, specs).to_json())
    assert outputs(encoded([0.5], Wish(), tmp_path)[0])[0] == {
        "name": "y",
        "datatype": "FP32",
        "shape": [1],
        "data": [0.5],
    }


def test_a_file_of_that_name_that_is_no_signature_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "signature.json").write_text('{"mine": 1}')
    assert outputs(encoded([0.5], Wish(), tmp_path)[0])[0]["name"] == "output_0"


def test_classes_have_the_names_the_handler_knows() -> None:
    request = processor(Wish(outputs=(WantedOutput("a", classes=1),)))
    encoder = AnswerEncoder("m", "2", "/nowhere")
    encoder.labels = {"1": "cat"}
    assert outputs(encoder.encode(ANSWER, request))[0]["data"] == ["2.000000:1:cat"]


@pytest.mark.parametrize(
    ("answer", "wish", "text"),
    [
        (
            ANSWER,
            Wish(outputs=(WantedOutput("z"),)),
            r"outputs[0].name: found 'z', expected one of 'a', 'b', 't'",
        ),
        (None, Wish(outputs=(WantedOutput("z"),)), "expected one of nothing"),
        (ANSWER, Wish(outputs=(WantedOutput("t", classes=1),)), "outputs[0].parameters.classification"),
        ({"y": b"\xff"}, Wish(), "output 'y': found bytes that are no UTF-8"),
    ],
)
def test_a_wish_that_cannot_be_met_is_answered_with_400(answer: object, wish: Wish, text: str) -> None:
    body, request = encoded(answer, wish)
    assert request.status_code == 400
    assert text in body.decode()


def test_what_the_handler_refused_goes_out_as_it_is() -> None:
    request = processor(Wish())
    request.report_status(422)
    assert AnswerEncoder("m", "2", "/nowhere").encode("no", request) == b"no"


def test_the_end_of_a_sequence_is_told_to_the_batcher() -> None:
    assert encoded("x", Wish(ends_sequence="s"))[1].response_headers["ts_request_sequence_end"] == "s"


def test_the_handlers_content_type_is_that_of_another_form() -> None:
    request = processor(Wish())
    request.add_response_property("Content-Type", "text/plain")
    request.add_response_property("X-Own", "1")
    AnswerEncoder("m", "2", "/nowhere").encode("x", request)
    assert request.response_headers == {"X-Own": "1", "content-type": "application/json"}
