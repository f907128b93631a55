from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from torchere.handlers.context import RequestProcessor
from torchere.handlers.context import send_intermediate_predict_response as send
from torchere.handlers.loading.weights import SharedModels


def test_system_properties_are_those_of_the_contract(make_context: Any, tmp_path: Path) -> None:
    context = make_context(tmp_path, limit_max_image_pixels=False)
    assert context.system_properties == {
        "model_dir": str(tmp_path),
        "gpu_id": None,
        "batch_size": 1,
        "server_name": "MMS",
        "server_version": "0.12.0",
        "limit_max_image_pixels": False,
    }
    assert context.model_yaml_config == {}
    assert context.request_processor is None


def test_ids_and_headers_are_those_of_the_current_batch(
    make_context: Any, begin: Any, tmp_path: Path
) -> None:
    context = make_context(tmp_path)
    assert context.get_request_id() is None
    begin(context, 2, **{"X-Test": "yes"})
    assert context.request_ids == {0: "request-0", 1: "request-1"}
    assert context.get_request_id(1) == "request-1"
    assert context.get_request_header(1, "X-Test") == "yes"
    assert context.get_request_header(1, "x-test") is None
    assert context.get_all_request_header(0) == {"X-Test": "yes"}
    begin(context, 1)
    assert context.request_ids == {0: "request-0"}


def test_a_handler_may_leave_a_note_among_the_headers_of_a_request(
    make_context: Any, begin: Any, tmp_path: Path
) -> None:
    context = make_context(tmp_path)
    begin(context, 1, a="1")
    context.get_all_request_header(0)["note"] = "of preprocess"
    assert context.get_request_header(0, "note") == "of preprocess"
    begin(context, 1, a="1")
    assert context.get_request_header(0, "note") is None


def test_status_and_headers_of_responses_are_kept_per_request(
    make_context: Any, begin: Any, tmp_path: Path
) -> None:
    context = make_context(tmp_path)
    begin(context, 2)
    context.set_response_status(code=418, phrase="teapot", idx=1)
    context.set_response_content_type(1, "text/x")
    context.set_response_header(1, "x-answer", "42")
    assert context.get_response_status(0) == (200, None)
    assert context.get_response_status(1) == (418, "teapot")
    assert context.get_response_headers(1) == {"content-type": "text/x", "x-answer": "42"}
    assert context.get_response_content_type(1) == "text/x"
    assert context.get_response_content_type(0) is None
    processor = context.request_processor[1]
    assert (processor.status_code, processor.reason_phrase) == (418, "teapot")
    assert processor.response_headers["x-answer"] == processor.get_response_header("x-answer") == "42"
    context.set_all_response_status(503, "later")
    assert [context.get_response_status(i) for i in (0, 1)] == [(503, "later")] * 2


def test_responses_are_set_and_read_by_the_methods_that_tests_of_handlers_replace(
    make_context: Any, tmp_path: Path
) -> None:
    context, request = make_context(tmp_path), Mock(spec=RequestProcessor)
    context.request_processor = [request]
    context.set_response_status(418, "teapot")
    request.report_status.assert_called_once_with(418, reason_phrase="teapot")
    context.set_all_response_status(503, "later")
    request.report_status.assert_called_with(503, reason_phrase="later")
    request.get_response_status_code.return_value = 201
    request.get_response_status_phrase.return_value = "made"
    assert context.get_response_status(0) == (201, "made")
    request.get_response_headers.return_value = {"content-type": "text/x"}
    assert context.get_response_content_type(0) == "text/x"


def test_a_header_value_that_is_not_text_is_refused(make_context: Any, begin: Any, tmp_path: Path) -> None:
    context = make_context(tmp_path)
    begin(context, 1)
    with pytest.raises(TypeError, match="convert it with str"):
        context.set_response_header(0, "x-count", 3)


def test_setting_a_status_outside_a_batch_does_nothing(make_context: Any, tmp_path: Path) -> None:
    context = make_context(tmp_path)
    context.set_response_status(500, "x")
    with pytest.raises(RuntimeError, match="during handle"):
        context.get_response_status(0)


def test_stopping_criteria_stay_until_a_handler_sets_others(
    make_context: Any, begin: Any, tmp_path: Path
) -> None:
    context = make_context(tmp_path)
    criteria = context.stopping_criteria = [lambda result: True]
    begin(context, 1)
    begin(context, 1)
    assert context.stopping_criteria is criteria


def test_the_name_of_the_sequence_header_comes_from_the_environment(
    make_context: Any, begin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make_context(tmp_path).header_key_sequence_start == "ts_request_sequence_start"
    monkeypatch.setenv("TS_REQUEST_SEQUENCE_ID", "seq")
    context = make_context(tmp_path)
    begin(context, 1, seq="7")
    assert context.get_sequence_id(0) == "7"


def test_torchserves_private_names_lead_to_the_same(make_context: Any, begin: Any, tmp_path: Path) -> None:
    context = make_context(tmp_path)
    begin(context, 1, **{"X-Test": "yes"})
    assert context._system_properties is context.system_properties
    assert context._request_processor is context.request_processor
    request = context._request_processor[0]
    assert request._request_header == {"X-Test": "yes"}
    request._status_code, request._reason_phrase = 418, "teapot"
    request._response_header["x-answer"] = "42"
    assert context.get_response_status(0) == (418, "teapot")
    assert context.get_response_headers(0) == {"x-answer": "42"}


def test_a_deep_copy_has_facts_of_its_own_and_reports_to_the_same(make_context: Any, tmp_path: Path) -> None:
    context = make_context(tmp_path, config={"handler": {"depth": 1}}, shared_models=SharedModels())
    copied = copy.deepcopy(context)
    copied.manifest["model"]["modelFile"] = "other.py"
    copied.system_properties["model_dir"] = "elsewhere"
    copied.model_yaml_config["handler"]["depth"] = 2
    assert "modelFile" not in context.manifest["model"]
    assert context.system_properties["model_dir"] == str(tmp_path)
    assert context.model_yaml_config == {"handler": {"depth": 1}}
    copied.metrics.add_counter("Cats", 1)
    assert [sample.name for sample in context.metrics.drain()] == ["Cats"]


def test_each_element_is_encoded_like_a_final_answer(make_context: Any, begin: Any, tmp_path: Path) -> None:
    context = make_context(tmp_path)
    partials = begin(context, 2)
    send(["a", {"b": 1}], context.request_ids, "Intermediate", 200, context)
    assert partials == [(0, b"a"), (1, b'{\n  "b": 1\n}')]


def test_other_ranks_than_the_first_send_nothing(
    make_context: Any, begin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    context = make_context(tmp_path)
    partials = begin(context, 1)
    send(["a"], context.request_ids, "", 200, context)
    assert partials == []


@pytest.mark.parametrize(
    ("parts", "text"),
    [(["a", "b"], "2 partial answers for a batch of 3"), (["a", "b", "c"], "KeyError: 'gone'")],
)
def test_parts_that_do_not_fit_the_batch_are_refused_before_any_is_sent(
    make_context: Any, begin: Any, tmp_path: Path, parts: list[str], text: str
) -> None:
    context = make_context(tmp_path)
    partials = begin(context, 2)
    with pytest.raises(ValueError, match=text):
        send(parts, {**context.request_ids, 2: "gone"}, "", 200, context)
    assert partials == []


def test_parts_go_to_the_requests_that_the_map_names(make_context: Any, begin: Any, tmp_path: Path) -> None:
    context = make_context(tmp_path)
    partials = begin(context, 3)
    send(["c"], {0: context.request_ids[2]}, "", 200, context)  # of a micro-batch, with indices of its own
    more: dict[Any, Any] = {"more": object(), 0: "a", 1: "b"}
    send(more, {0: context.request_ids[0]}, "", 200, context)
    send(["b", "padding"], {0: context.request_ids[1]}, "", 200, context)
    assert partials == [(2, b"c"), (0, b"a"), (1, b"b")]


def test_a_code_other_than_200_becomes_the_status(make_context: Any, begin: Any, tmp_path: Path) -> None:
    context = make_context(tmp_path)
    begin(context, 1)
    send(["a"], context.request_ids, "partly", 206, context)
    assert context.get_response_status(0) == (206, "partly")


def test_a_client_that_takes_no_parts_is_an_error_that_says_so(make_context: Any, tmp_path: Path) -> None:
    context = make_context(tmp_path)
    context.begin_batch([], None)
    with pytest.raises(RuntimeError, match="return the whole answer"):
        context.send_partial(0, b"x")
