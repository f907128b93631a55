from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchere.handlers.envelopes import KServev2Envelope, _output
from torchere.handlers.errors import PredictionException
from torchere.handlers.ts_compat.legacy import MockContext


@pytest.fixture
def context(make_context: Any, begin: Any, tmp_path: Path) -> Any:
    made = make_context(tmp_path, name="bert", version="2.0")
    begin(made, 1)
    return made


def _run(context: Any, body: Any, answers: Any = None) -> Any:
    return KServev2Envelope(lambda data, _: data if answers is None else answers).handle(
        [{"body": body}], context
    )


def test_a_stand_in_for_the_context_will_do() -> None:
    inputs = [{"name": "x", "shape": [1], "datatype": "INT64", "data": [1]}]
    answer = _run(MockContext(model_name="mnist"), {"id": "a", "inputs": inputs}, [3])
    assert (answer[0]["model_name"], answer[0]["outputs"][0]["data"]) == ("mnist", [3])


def test_numbers_are_reshaped_and_answers_flattened(context: Any) -> None:
    seen = []

    def handler(data: Any, _: Any) -> Any:
        seen.append(data)
        return [np.array(data[0]["data"]) * 2]

    inputs = [{"name": "x", "shape": [2, 2], "datatype": "INT64", "data": [1, 2, 3, 4]}]
    answer = KServev2Envelope(handler).handle([{"body": {"id": "abc", "inputs": inputs}}], context)
    assert seen[0][0]["data"] == [[1, 2], [3, 4]]
    outputs = [{"name": "x", "datatype": "INT64", "data": [2, 4, 6, 8], "shape": [4]}]
    assert answer == [{"id": "abc", "model_name": "bert", "model_version": "2.0", "outputs": outputs}]
    assert list(answer[0]["outputs"][0]) == ["name", "datatype", "data", "shape"]


def test_the_context_has_the_names_and_the_id_while_the_handler_runs(context: Any) -> None:
    inputs = [{"name": name, "shape": [1], "datatype": "INT64", "data": [1]} for name in ("x", "mask")]
    seen = []

    def handle(data: Any, given: Any) -> Any:
        seen.append((given.input_names, getattr(given, "input_request_id", None)))
        return [[1]]

    envelope = KServev2Envelope(handle)
    for body in ({"id": "abc", "inputs": inputs}, {"inputs": inputs[:1]}):
        envelope.handle([{"body": body}], context)
        assert not {"input_names", "input_request_id"} & vars(context).keys()
    assert seen == [(["x", "mask"], "abc"), (["x"], None)]


def test_a_handler_may_name_its_outputs(context: Any) -> None:
    def handle(data: Any, given: Any) -> Any:
        given.input_names = ("scores", 7)
        return [[1.5], [2], [3]]

    inputs = [{"name": "x", "shape": [1], "datatype": "INT64", "data": [1]}]
    (answer,) = KServev2Envelope(handle).handle([{"body": {"inputs": inputs}}], context)
    assert [output["name"] for output in answer["outputs"]] == ["scores", "7", "output-2"]


def test_names_and_id_of_a_request_that_failed_are_not_those_of_the_next(context: Any) -> None:
    def handle(data: Any, given: Any) -> Any:
        if given.input_names == ["bad"]:
            raise ValueError("not today")
        return [[1], [2]]

    def inputs(*names: str) -> list[Any]:
        return [{"name": name, "shape": [1], "datatype": "INT64", "data": [1]} for name in names]

    envelope = KServev2Envelope(handle)
    with pytest.raises(ValueError, match="not today"):
        envelope.handle([{"body": {"id": "first", "inputs": inputs("bad")}}], context)
    (answer,) = envelope.handle([{"body": {"inputs": inputs("good")}}], context)
    assert answer["id"] == "request-0"
    assert [output["name"] for output in answer["outputs"]] == ["good", "output-1"]


def test_whole_numbers_among_floats_are_floats(context: Any) -> None:
    inputs = [{"name": "x", "shape": [2, 2], "datatype": "FP32", "data": [1.5, 2, True, 4]}]
    seen: list[Any] = []

    def handle(data: Any, context: Any) -> list[int]:
        seen.append(data[0]["data"])
        return [1]

    KServev2Envelope(handle).handle([{"body": {"inputs": inputs}}], context)
    assert repr(seen[0]) == "[[1.5, 2.0], [1.0, 4.0]]"


def test_bytes_come_as_their_first_item(context: Any) -> None:
    body = {"inputs": [{"name": "t", "shape": [1], "datatype": "BYTES", "data": ["hello"]}]}
    seen = []
    KServev2Envelope(lambda data, _: seen.append(data[0]["data"])).handle([{"body": body}], context)
    assert seen == ["hello"]


@pytest.mark.parametrize(
    ("shape", "datatype", "data", "given"),
    [
        ([1], "FP32", 3, [3]),
        ([], "FP32", 3, 3),
        ([1, 1], "FP32", 3.5, [[3.5]]),
        ([1], "BOOL", True, [True]),
        ([1], "FP32", "abc", ["abc"]),
        ([1], "BYTES", "abc", "abc"),
        (-1, "BYTES", "this year business is good", "this year business is good"),
    ],
)
def test_data_may_be_one_value_without_a_list(
    context: Any, shape: Any, datatype: str, data: Any, given: Any
) -> None:
    seen: list[Any] = []

    def handle(rows: Any, _: Any) -> list[int]:
        seen.append(rows[0]["data"])
        return [1]

    inputs = [{"name": "x", "shape": shape, "datatype": datatype, "data": data}]
    KServev2Envelope(handle).handle([{"body": {"inputs": inputs}}], context)
    assert repr(seen) == repr([given])


def test_texts_that_are_not_called_bytes_take_no_more_room_than_they_need(context: Any) -> None:
    texts = ["a" * 10_000, *"b" * 1_000]  # 40 MB, were each given the room of the longest
    inputs = [{"name": "x", "shape": [-1], "datatype": "FP32", "data": texts}]
    seen: list[Any] = []
    tracemalloc.start()
    try:
        KServev2Envelope(lambda data, _: seen.extend(data)).handle([{"body": {"inputs": inputs}}], context)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seen[0]["data"] == texts
    assert peak_bytes < 1_000_000


def test_texts_of_an_answer_take_no_more_room_than_they_need() -> None:
    texts = ["a" * 10_000, *"b" * 1_000]
    tracemalloc.start()
    try:
        output = _output("y", texts)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert output == {"name": "y", "datatype": "BYTES", "data": texts, "shape": [1_001]}
    assert peak_bytes < 1_000_000


@pytest.mark.parametrize(
    ("value", "data"),
    [
        ("ab", ["ab"]),
        ([["a", "b\0"], ["c", "d"]], ["a", "b\0", "c", "d"]),
        ([b"a\0"], [b"a\0"]),
        (["a", 1], ["a", "1"]),
        ([1.5, "a"], ["1.5", "a"]),
        (["a", None], ["a", None]),
    ],
)
def test_texts_stay_as_they_are_and_numbers_beside_them_become_texts(value: Any, data: list[Any]) -> None:
    assert _output("y", value) == {"name": "y", "datatype": "BYTES", "data": data, "shape": [len(data)]}


def test_a_blank_id_is_replaced_by_the_servers(context: Any) -> None:
    body = {"id": "  ", "inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1.0]}]}
    assert _run(context, json.dumps(body).encode(), [[1.0]])[0]["id"] == "request-0"


@pytest.mark.parametrize(
    ("value", "datatype"),
    [
        ([1.5], "FP64"),
        ([True], "BOOL"),
        (["a"], "BYTES"),
        (np.array([1], dtype=np.float32), "FP32"),
        ([{"a": 1}], "BYTES"),
    ],
)
def test_the_datatype_is_that_of_the_answer(context: Any, value: Any, datatype: str) -> None:
    body = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1.0]}]}
    assert _run(context, body, [value])[0]["outputs"][0]["datatype"] == datatype


def test_more_answers_than_inputs_get_names_of_their_own(context: Any) -> None:
    body = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1.0]}]}
    assert [item["name"] for item in _run(context, body, [[1], [2]])[0]["outputs"]] == ["x", "output-1"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "no list of tensors"),
        ({"inputs": [3]}, "no list of tensors"),
        ({"inputs": [{"name": "x"}]}, "'x' has no data"),
        ({"inputs": [{"name": "x", "data": None}]}, "'x' has no data"),
        ({"inputs": [{"name": "x", "shape": [2], "data": 3}]}, "does not fit its shape"),
        ({"inputs": [{"name": "x", "shape": [3], "data": [1, 2]}]}, "does not fit its shape"),
        ({"inputs": [{"name": "x", "shape": "a", "data": [1, 2]}]}, "does not fit its shape"),
        ({"inputs": [{"name": "x", "shape": [2], "data": [[1], [2, 3]]}]}, "not of one length"),
        ({"inputs": [{"name": "x", "shape": [2], "data": [[1], 2]}]}, "or not of one depth"),
        ({"inputs": [{"name": "x", "shape": [2], "data": [1.5, 10**400]}]}, "too large"),
        ({"inputs": [{"name": "x", "shape": [10**12, 0], "data": []}]}, "10{12} lists for 0 elements"),
        ({"inputs": [{"name": "x", "shape": [-1, *[1] * 60], "data": [1] * 2000}]}, "for 2000 elements"),
        ({"inputs": [{"name": "x" * 5000, "data": [1, 2], "shape": [1] * 5000}]}, "^.{,999}$"),
    ],
)
def test_a_wrong_body_is_answered_with_400(context: Any, body: Any, message: str) -> None:
    with pytest.raises(PredictionException, match=message) as caught:
        _run(context, body)
    assert caught.value.error_code == 400


def test_an_answer_the_protocol_has_no_type_for_is_an_error(context: Any) -> None:
    body = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1.0]}]}
    with pytest.raises(TypeError, match="complex128"):
        _run(context, body, [[1j]])
