from __future__ import annotations

import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest

from torchere.handlers.envelopes import BodyEnvelope, JSONEnvelope, KServeEnvelope, KServev2Envelope
from torchere.handlers.errors import PredictionException


@pytest.fixture
def context(make_context: Any, begin: Any, tmp_path: Path) -> Any:
    made = make_context(tmp_path)
    begin(made, 1)
    return made


def _same(data: Any, context: Any) -> Any:
    return data


def test_body_takes_the_payload_out(context: Any) -> None:
    rows = [{"data": 1}, {"body": b"x"}, {"other": 3}]
    assert BodyEnvelope(_same).handle(rows, context) == [1, b"x", None]


def test_the_call_at_load_has_nothing_to_unwrap(context: Any) -> None:
    for envelope in (BodyEnvelope, JSONEnvelope, KServeEnvelope):
        assert envelope(_same).handle(None, context) is None
        assert envelope(_same).handle([], context) == []


@pytest.mark.parametrize("context", [Mock(), MagicMock(), SimpleNamespace(get_request_header=Mock())])
def test_a_test_of_a_handler_may_give_a_context_that_knows_no_requests(context: Any) -> None:
    assert BodyEnvelope(_same).handle([{"data": 1}], context) == [1]
    assert JSONEnvelope(_same).handle([{"body": {"instances": [1]}}], context) == ['{"predictions": [1]}']


def test_json_runs_all_instances_as_one_batch_and_splits_the_answers(context: Any) -> None:
    rows = [{"body": {"instances": [1, 2]}}, {"data": b'{"instances": []}'}, {"instances": [3]}]
    seen = []

    def handler(data: Any, context: Any) -> Any:
        seen.append(data)
        return [item * 10 for item in data]

    answers = JSONEnvelope(handler).handle(rows, context)
    assert seen == [[1, 2, 3]]
    assert answers == ['{"predictions": [10, 20]}', '{"predictions": []}', '{"predictions": [30]}']


def test_answers_that_are_not_one_for_each_instance_are_given_to_nobody(context: Any) -> None:
    rows = [{"body": {"instances": [1, -1]}}, {"body": {"instances": [3]}}]

    def handler(data: Any, context: Any) -> Any:
        return [item * 10 for item in data if item > 0]

    with pytest.raises(ValueError, match="2 answers for 3 instances of 2 requests"):
        JSONEnvelope(handler).handle(rows, context)
    assert JSONEnvelope(handler).handle(rows[:1], context) == ['{"predictions": [10]}']  # nobody else's


@pytest.mark.parametrize("envelope", [BodyEnvelope, JSONEnvelope, KServeEnvelope, KServev2Envelope])
def test_a_describe_is_left_to_the_handler(context: Any, begin: Any, envelope: Any) -> None:
    begin(context, 1, describe="True")
    assert envelope(_same).handle([{}], context) == [{}]


def test_base64_is_decoded_whole_and_in_fields(context: Any) -> None:
    b64 = {"b64": base64.b64encode(b"pixels").decode()}
    rows = [{"body": {"instances": [b64, {"image": b64, "n": 1}]}}]
    seen: list[Any] = []

    def handler(data: Any, context: Any) -> Any:
        seen.extend(data)
        return []

    JSONEnvelope(handler).handle(rows, context)
    assert seen == [b"pixels", {"image": b"pixels", "n": 1}]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"instance": [1]}, "found the fields 'instance'; expected"),
        ({"instances": 1}, "no list of instances"),
        (b"{broken", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        ([1], "a JSON list; expected an object"),
        ({"instances": [{"b64": "a"}]}, "'b64' is not base64"),
        ({"instances": [{"x": {"b64": 3}}]}, "'b64' is not base64"),
    ],
)
def test_a_wrong_body_is_answered_with_400(context: Any, body: Any, message: str) -> None:
    with pytest.raises(PredictionException) as caught:
        JSONEnvelope(_same).handle([{"body": body}], context)
    assert (caught.value.error_code, message in caught.value.message) == (400, True)


@pytest.mark.parametrize("instances", ["some text", {"prompt": "a"}, 3, False, ""])
def test_kserve_hands_on_instances_of_any_type(context: Any, instances: Any) -> None:
    seen = []

    def handler(data: Any, context: Any) -> Any:
        seen.append(data)
        return ["answer"]

    rows = [{"body": {"instances": instances}}]
    assert KServeEnvelope(handler).handle(rows, context) == [{"predictions": ["answer"]}]
    assert repr(seen) == repr([instances])


@pytest.mark.parametrize("body", [{}, {"instance": [1]}, {"instances": None}, b"[1]"])
def test_kserve_refuses_a_body_without_instances(context: Any, body: Any) -> None:
    with pytest.raises(PredictionException) as caught:
        KServeEnvelope(_same).handle([{"body": body}], context)
    assert caught.value.error_code == 400


def test_kserve_answers_the_first_request(context: Any, begin: Any) -> None:
    envelope = KServeEnvelope(_same)
    assert envelope.handle([{"body": {"instances": [1, 2]}}], context) == [{"predictions": [1, 2]}]
    begin(context, 1, explain="True")
    body = json.dumps({"instances": [1]}).encode()
    assert envelope.handle([{"data": bytearray(body)}], context) == [{"explanations": [1]}]
