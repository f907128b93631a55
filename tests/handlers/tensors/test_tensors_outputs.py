"""What a handler answers as named outputs, and the classification of them."""

import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from torchere.archiver.signature import TensorSpec
from torchere.handlers.errors import UnsupportedOutput
from torchere.handlers.tensors import TensorError
from torchere.handlers.tensors.answer import classified, outputs_of

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
