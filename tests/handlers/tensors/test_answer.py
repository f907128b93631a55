"""An answer to tensors: its body, headers and status, its named outputs, and the classes in them."""

import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchere.archiver.signature import Signature, TensorSpec
from torchere.handlers.context import RequestProcessor
from torchere.handlers.errors import UnsupportedOutput
from torchere.handlers.tensors import TensorError
from torchere.handlers.tensors.answer import (
    FRAME,
    HEADER_LENGTH,
    AnswerEncoder,
    WantedOutput,
    Wish,
    classified,
    outputs_of,
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


SPECS = (TensorSpec("score", "FP32", (-1, 2)), TensorSpec("label", "INT32", (-1,)))


def told(answer: object, specs: tuple[TensorSpec, ...] = ()) -> list[tuple[Any, ...]]:
    return [
        (output.name, output.datatype.name, output.shape, output.tensor.tolist())
        for output in outputs_of(answer, specs)
    ]


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (None, []),
        ({"y": np.array([1], np.float32)}, [("y", "FP32", (1,), [1.0])]),
        (
            {"a": torch.ones(2, dtype=torch.int8), 3: "x"},
            [("a", "INT8", (2,), [1, 1]), ("3", "BYTES", (1,), ["x"])],
        ),
        (torch.tensor([[1.5]], dtype=torch.bfloat16), [("output_0", "BF16", (1, 1), [[1.5]])]),
        (torch.ones(1, requires_grad=True), [("output_0", "FP32", (1,), [1.0])]),
        (np.float64(2), [("output_0", "FP64", (), 2.0)]),
        (
            (np.array([1]), torch.tensor([True])),
            [("output_0", "INT64", (1,), [1]), ("output_1", "BOOL", (1,), [True])],
        ),
        ([[1, 2], [3, 4]], [("output_0", "INT64", (2, 2), [[1, 2], [3, 4]])]),
        ([1.5, 2], [("output_0", "FP64", (2,), [1.5, 2.0])]),
        ([True], [("output_0", "BOOL", (1,), [True])]),
        (5, [("output_0", "INT64", (1,), [5])]),
        ("text", [("output_0", "BYTES", (1,), ["text"])]),
        (b"\xff", [("output_0", "BYTES", (1,), [b"\xff"])]),
        (["a", "bc"], [("output_0", "BYTES", (2,), ["a", "bc"])]),
        ([["a"], ["b"]], [("output_0", "BYTES", (2, 1), [["a"], ["b"]])]),
        (np.array([["a"]]), [("output_0", "BYTES", (1, 1), [["a"]])]),
        (["a\0", b"b"], [("output_0", "BYTES", (2,), ["a\0", b"b"])]),
        (["a", ["b"]], [("output_0", "BYTES", (1,), ['["a", ["b"]]'])]),
        ([["a", "b"], ["c"]], [("output_0", "BYTES", (1,), ['[["a", "b"], ["c"]]'])]),
        (["a", 1], [("output_0", "BYTES", (1,), ['["a", 1]'])]),
        ([1, "a"], [("output_0", "BYTES", (1,), ['[1, "a"]'])]),
        ([[1], [2, 3]], [("output_0", "BYTES", (1,), ["[[1], [2, 3]]"])]),
        ([{"a": 1}], [("output_0", "BYTES", (1,), ['[{"a": 1}]'])]),
        ({"y": {"a": None}}, [("y", "BYTES", (1,), ['{"a": null}'])]),
        ([], [("output_0", "FP64", (0,), [])]),
    ],
)
def test_an_answer_becomes_outputs(answer: object, wanted: list[Any]) -> None:
    assert told(answer) == wanted


def test_texts_take_no_more_room_than_they_need() -> None:
    texts = ["a" * 10_000, *"b" * 1_000]
    tracemalloc.start()
    try:
        assert told(texts) == [("output_0", "BYTES", (1_001,), texts)]
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_list_in_itself_is_refused() -> None:
    itself: list[Any] = []
    itself.append(itself)
    with pytest.raises(UnsupportedOutput, match="Circular"):
        told(itself)


def test_the_signature_names_outputs_and_the_precision_of_plain_numbers() -> None:
    assert told([[0.5, 1]], SPECS) == [("score", "FP32", (1, 2), [[0.5, 1.0]])]
    assert told({"label": [7], "score": [1]}, SPECS) == [
        ("label", "INT32", (1,), [7]),
        ("score", "FP32", (1,), [1.0]),
    ]
    assert told({"label": [7.5]}, SPECS) == [("label", "FP64", (1,), [7.5])]
    assert told({"label": [2**40, 7]}, SPECS) == [("label", "INT64", (2,), [2**40, 7])]
    assert told({"score": [1e300]}, SPECS) == [("score", "FP64", (1,), [1e300])]
    (infinite,) = told({"score": [float("inf"), 0.1]}, SPECS)
    assert infinite[1] == "FP32"
    assert told((np.zeros(1), np.zeros(1)), SPECS)[1][0] == "label"


def test_a_view_that_is_negative_is_an_output_like_others() -> None:
    view = torch.tensor([[1 + 2j, 3 - 4j]]).conj().imag
    assert told(view) == [("output_0", "FP32", (1, 2), [[-2.0, 4.0]])]


def test_an_answer_in_the_protocols_own_form_is_taken_by_its_word() -> None:
    said = {"outputs": [{"name": "y", "datatype": "INT8", "shape": [2], "data": [1, 2]}], "id": "ignored"}
    assert told(said) == [("y", "INT8", (2,), [1, 2])]
    assert told({"outputs": [1, 2]}) == [("outputs", "INT64", (2,), [1, 2])]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (np.array([1j]), "complex128"),
        (torch.tensor([1j]), "torch.complex64"),
        (object(), "not JSON serializable"),
        ({"outputs": [{"name": "y", "datatype": "INT8", "shape": [3], "data": [1]}]}, "found 1 elements"),
        ({"outputs": [{"name": "y", "datatype": "WORD", "shape": [1], "data": [1]}]}, "'WORD'"),
    ],
)
def test_what_the_protocol_has_no_form_for_is_refused(answer: object, text: str) -> None:
    with pytest.raises(UnsupportedOutput, match=text):
        outputs_of(answer, ())


def test_classes_are_the_best_values_of_each_row_with_their_names() -> None:
    output = outputs_of(torch.tensor([[0.1, 0.9, 0.9], [3, 1, 2]]), ())[0]
    best = classified(output, 2, {"1": "cat", "0": ["n01", "dog"]}, "outputs[0]")
    assert best.shape == (2, 2)
    assert best.tensor.tolist() == [
        ["0.900000:1:cat", "0.900000:2"],
        ["3.000000:0:dog", "2.000000:2"],
    ]


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        (["dog", "cat"], "0.900000:1:cat"),
        (("dog", "cat"), "0.900000:1:cat"),
        ({0: "dog", 1: "cat"}, "0.900000:1:cat"),
        (["dog"], "0.900000:1"),
        ("dog and cat", "0.900000:1"),
    ],
)
def test_names_of_classes_are_read_from_any_mapping_that_a_handler_keeps(labels: object, text: str) -> None:
    output = outputs_of(torch.tensor([0.1, 0.9]), ())[0]
    assert classified(output, 1, labels, "outputs[0]").tensor.tolist() == [text]


@pytest.mark.parametrize(
    ("dtype", "values"), [(torch.bfloat16, ("1.000000", "0.000000")), (torch.int64, "10"), (torch.bool, "10")]
)
def test_there_are_no_more_classes_than_values(dtype: torch.dtype, values: Sequence[str]) -> None:
    output = outputs_of(torch.tensor([0, 1], dtype=dtype), ())[0]
    best = classified(output, 10**9, None, "outputs[0]")
    assert best.tensor.tolist() == [f"{values[0]}:1", f"{values[1]}:0"]


def test_classes_of_large_integers_are_exact() -> None:
    output = outputs_of(np.array([2**64 - 1, 2**53 + 1], np.uint64), ())[0]
    assert classified(output, 2, None, "x").tensor.tolist() == [f"{2**64 - 1}:0", f"{2**53 + 1}:1"]


@pytest.mark.parametrize(("shape", "wanted"), [((0, 4), (0, 3)), ((2, 0), (2, 0)), ((0,), (0,))])
def test_no_values_have_no_classes(shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    best = classified(outputs_of(torch.zeros(shape), ())[0], 3, None, "x")
    assert (best.shape, best.tensor.shape) == (wanted, wanted)


def test_texts_have_no_classes() -> None:
    with pytest.raises(
        TensorError, match=r"^outputs\[0\]\.parameters\.classification: found an output of BYTES"
    ):
        classified(outputs_of("text", ())[0], 1, None, "outputs[0]")
