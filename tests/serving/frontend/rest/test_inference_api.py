import asyncio
import json
import uuid
from types import SimpleNamespace

import pytest

from torchere.serving.errors import HandlerFailed, QueueFull, Restarting, Unavailable
from torchere.serving.frontend.call_scope import current_call
from torchere.serving.frontend.dataplane import Readiness
from torchere.serving.types import NO_DEADLINE, InferResponse, Parameter, StreamedResponse

NOT_FOUND = "Requested resource is not found, please refer to API document."
NOT_ALLOWED = "Requested method is not allowed, please refer to API document."


def answering(response):
    async def behave(request):
        if isinstance(response, Exception):
            raise response
        return response

    return behave


async def parts(*chunks, then=None):
    for chunk in chunks:
        yield chunk
    if then is not None:
        raise then


def test_a_prediction_is_answered_with_the_bytes_of_the_handler_and_no_content_type(ask):
    answer = ask("inference", "POST", "/predictions/echo", b'{"a":1}', content_type="application/json")
    assert (answer.status, answer.body) == (200, b'{"a":1}')
    assert "content-type" not in answer.headers


def test_every_answer_has_the_known_headers(ask, planes):
    headers = ask("inference", "POST", "/predictions/echo", x_request_id="mine").headers
    assert headers["pragma"] == "no-cache"
    assert headers["cache-control"] == "no-cache; no-store, must-revalidate, private"
    assert headers["expires"] == "Thu, 01 Jan 1970 00:00:00 UTC"
    assert headers["connection"] == "keep-alive"
    assert uuid.UUID(headers["x-request-id"]).version == 4
    assert planes.data.asked[0][2].request_id == headers["x-request-id"]


@pytest.mark.parametrize("target", ["/predictions/none", "/ping", "/nope"])
def test_framework_routes_and_failures_have_them_too(ask, planes, target):
    planes.data.is_healthy = False
    answer = ask("inference", "GET", target)
    assert answer.status >= 400
    assert answer.headers["connection"] == "close"
    assert answer.headers["content-type"] == "application/json"
    assert {"x-request-id", "pragma", "cache-control", "expires"} <= answer.headers.keys()


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"])
def test_any_method_predicts(ask, planes, method):
    assert ask("inference", method, "/predictions/echo", b"x").status == 200
    assert planes.data.asked[0][2].parameters == (Parameter("body", b"x"),)


def test_the_handler_sees_the_headers_and_what_the_server_adds(ask, planes):
    ask("inference", "POST", "/explanations/echo/1.0/a/b", x_test="1", explain="maybe")
    model, version, request = planes.data.asked[0]
    assert (model, version) == ("echo", "1.0")
    assert request.headers[0] == ("x-test", "1")
    assert request.headers[-2:] == (("url_path", "a/b"), ("explain", "True"))


def test_query_parameters_reach_the_handler_on_the_old_routes_only(ask, planes):
    ask("inference", "POST", "/predictions/echo?a=1", b"x")
    ask("inference", "POST", "/models/echo/invoke?a=1", b"x")
    ask("inference", "POST", "/echo/1.0/predict?a=1", b"x")
    asked = [request.parameters for _, _, request in planes.data.asked]
    with_query = (Parameter("a", b"1"), Parameter("body", b"x"))
    assert asked == [(Parameter("body", b"x"),), with_query, with_query]


def test_a_model_that_nobody_registered_is_not_found(ask):
    answer = ask("inference", "POST", "/predictions/none", b"{}")
    assert answer.body.decode() == (
        '{\n  "code": 404,\n  "type": "ModelNotFoundException",\n  "message": "Model not found: none"\n}\n'
    )


def test_a_version_that_nobody_registered_is_not_found(ask):
    answer = ask("inference", "POST", "/predictions/echo/9.9")
    assert answer.json == {
        "code": 404,
        "type": "ModelVersionNotFoundException",
        "message": "Model version: 9.9 does not exist for model: echo",
    }


@pytest.mark.parametrize("target", ["/predictions", "/nope", "/v2/health", "/v1/nope", "/models"])
def test_other_paths_are_not_found(ask, target):
    answer = ask("inference", "GET", target)
    assert answer.json | {"error": NOT_FOUND} == {
        "code": 404,
        "type": "ResourceNotFoundException",
        "message": NOT_FOUND,
        "error": NOT_FOUND,
    }


def test_the_root_knows_options_only(ask):
    assert ask("inference", "GET", "/").json == {
        "code": 405,
        "type": "MethodNotAllowedException",
        "message": NOT_ALLOWED,
    }


@pytest.mark.parametrize(
    ("target", "found", "status"),
    [
        ("/invocations?model_name=echo", (None, b""), 200),
        ("/invocations?model_name=none", ("echo", b""), 404),
        ("/invocations?model_name=", ("echo", b""), 200),
        ("/invocations?model_name=", (None, b""), 404),
        ("/invocations", ("echo", b""), 200),
        ("/invocations", ("echo", b"model_name=none"), 200),
        ("/invocations", (None, b"model_name=echo"), 200),
        ("/invocations", (None, b""), 400),
    ],
)
def test_invocations_find_their_model_in_query_form_or_start_up(ask, planes, target, found, status):
    planes.data.sole, body = found
    answer = ask("inference", "POST", target, body, content_type="application/x-www-form-urlencoded")
    assert answer.status == status
    if status == 400:
        assert answer.json["message"] == "Parameter model_name is required."


def test_a_handler_chooses_status_and_headers(ask, planes):
    headers = (("Content-Type", "text/x"), ("X-Answer", "1"), ("x-answer", "2"))
    planes.data.behave = answering(InferResponse(b"short", headers, 418, "teapot"))
    answer = ask("inference", "POST", "/predictions/echo")
    assert (answer.status, answer.body) == (418, b"short")
    assert answer.headers["content-type"] == "text/x"
    assert answer.headers["x-answer"] == "2"


def test_letters_that_a_header_cannot_carry_come_as_question_marks(ask, planes):
    planes.data.behave = answering(InferResponse(b"short", (("X-Label", "caf\u00e9 \u6f22, 5 \u20ac"),)))
    answer = ask("inference", "POST", "/predictions/echo")
    assert (answer.status, answer.body) == (200, b"short")
    assert answer.headers["x-label"] == "caf\u00e9 ?, 5 ?"


@pytest.mark.parametrize("header", [("a", "b\r\nset-cookie: c"), ("a b", "c"), ("", "c"), ("€", "c")])
def test_a_header_that_would_forge_others_fails_the_request(ask, planes, header):
    planes.data.behave = answering(InferResponse(b"", (header,)))
    answer = ask("inference", "POST", "/predictions/echo")
    assert (answer.status, answer.json["message"]) == (500, "Prediction failed")


@pytest.mark.parametrize("status", [0, 100, 199, 600, 99999])
def test_a_status_that_is_no_final_one_fails_the_request(ask, planes, status):
    planes.data.behave = answering(InferResponse(b"", status=status))
    assert ask("inference", "POST", "/predictions/echo").status == 500


def test_a_status_without_content_is_sent_without_content(ask, planes):
    planes.data.behave = answering(InferResponse(b"ignored", status=204))
    answer = ask("inference", "POST", "/predictions/echo")
    assert (answer.status, answer.body) == (204, b"")
    assert "content-length" not in answer.headers


@pytest.mark.parametrize(
    ("error", "status", "type_name"),
    [
        (HandlerFailed(), 503, "InternalServerException"),
        (HandlerFailed("no such thing", 513), 513, "InternalServerException"),
        (Unavailable('Model "echo" has no worker'), 503, "ServiceUnavailableException"),
    ],
)
def test_what_became_of_a_prediction_is_told(ask, planes, error, status, type_name):
    planes.data.behave = answering(error)
    answer = ask("inference", "POST", "/predictions/echo")
    assert answer.json == {"code": status, "type": type_name, "message": error.message}


def test_a_full_queue_says_when_to_try_again(ask, planes):
    planes.data.behave = answering(QueueFull("full", retry_after_s=0.2))
    assert ask("inference", "POST", "/predictions/echo").headers["retry-after"] == "1"


def test_an_outage_is_a_503_that_says_when_to_try_again(ask, planes):
    planes.data.behave = answering(Restarting(retry_after_s=2.5))
    answer = ask("inference", "POST", "/predictions/echo")
    assert (answer.status, answer.headers["retry-after"]) == (503, "3")
    assert answer.json["type"] == "ServiceUnavailableException"


def test_details_are_not_for_inference_clients(ask, planes):
    planes.data.behave = answering(HandlerFailed(detail="/secret/path"))
    assert b"secret" not in ask("inference", "POST", "/predictions/echo").body


def test_a_bug_is_logged_and_answered_without_its_text(ask, planes, caplog):
    def admit(*args, **kwargs):
        raise RuntimeError("secret")

    planes.data.admit = admit
    answer = ask("inference", "POST", "/predictions/echo")
    assert (answer.status, answer.json["type"]) == (500, "InternalServerException")
    assert b"secret" not in answer.body
    assert "secret" in caplog.text


def test_a_body_that_is_too_large_gets_413_with_the_limit(ask, planes):
    answer = ask("inference", "POST", "/predictions/echo", b"a" * 1001)
    assert (answer.status, answer.ended, answer.headers["connection"]) == (413, True, "close")
    assert answer.json["message"] == "The body is longer than max_request_size=1000 bytes."
    assert planes.data.asked == []


def test_a_request_may_bring_its_timeout(ask, planes):
    ask("inference", "POST", "/predictions/echo", x_torchere_timeout_ms="5000")
    ask("inference", "POST", "/predictions/echo")
    assert [request.deadline_s < NO_DEADLINE for _, _, request in planes.data.asked] == [True, False]


def test_a_timeout_that_makes_no_sense_is_refused(ask, planes):
    answer = ask("inference", "POST", "/predictions/echo", x_torchere_timeout_ms="soon")
    assert (answer.status, answer.json["type"]) == (400, "BadRequestException")
    assert planes.data.asked == []


def test_a_streamed_answer_is_one_chunk_a_part(ask, planes):
    response = StreamedResponse(InferResponse(b"", (("X-A", "1"),)), parts(b"a", b"b", b"end"))
    planes.data.behave = answering(response)
    answer = ask("inference", "POST", "/predictions/echo")
    assert answer.chunks == [b"a", b"b", b"end", b""]
    assert answer.headers["ts_stream_next"] == "true"
    assert answer.headers["x-a"] == "1"
    assert "content-length" not in answer.headers
    assert answer.ended


def test_a_stream_that_fails_before_its_first_part_gets_a_proper_error(ask, planes):
    failing = StreamedResponse(InferResponse(b""), parts(then=HandlerFailed()))
    planes.data.behave = answering(failing)
    assert ask("inference", "POST", "/predictions/echo").status == 503


def test_a_stream_that_fails_midway_is_broken_off(ask, planes):
    failing = StreamedResponse(InferResponse(b""), parts(b"a", then=HandlerFailed()))
    planes.data.behave = answering(failing)
    answer = ask("inference", "POST", "/predictions/echo")
    assert (answer.status, answer.chunks, answer.ended) == (200, [b"a"], False)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_ping_tells_healthy_and_unhealthy(ask, planes, method):
    answer = ask("inference", method, "/ping")
    assert (answer.status, answer.body) == (200, b'{\n  "status": "Healthy"\n}\n')
    planes.data.is_healthy = False
    assert (ask("inference", method, "/ping/").status, ask("inference", method, "/ping").json) == (
        500,
        {"status": "Unhealthy"},
    )


@pytest.mark.parametrize("surface", ["inference", "management"])
def test_the_probes_tell_live_and_ready(ask, planes, surface):
    assert ask(surface, "GET", "/livez").json == {"status": "live"}
    assert ask(surface, "GET", "/readyz").json == {"status": "ready"}
    planes.data.is_ready = Readiness(False, ("echo:1.0 is loading",))
    answer = ask(surface, "GET", "/readyz")
    assert (answer.status, answer.json) == (503, {"status": "not ready", "reasons": ["echo:1.0 is loading"]})
    assert ask(surface, "GET", "/livez").status == 200


def test_a_priority_comes_with_its_header(ask, planes):
    assert ask("inference", "POST", "/predictions/echo", b"x", x_torchere_priority="7").status == 200
    assert ask("inference", "POST", "/predictions/echo", b"x").status == 200
    assert [request.priority for _, _, request in planes.data.asked] == [7, 0]
    answer = ask("inference", "POST", "/predictions/echo", b"x", x_torchere_priority="now")
    assert (answer.status, "found: 'now'" in answer.json["message"]) == (400, True)


def test_the_start_up_probe_tells_what_is_still_to_come(ask, planes):
    assert ask("inference", "GET", "/startupz").json == {"status": "started"}
    planes.data.is_started = Readiness(False, ("echo:1.0 is loading",))
    answer = ask("inference", "GET", "/startupz")
    assert (answer.status, answer.json["reasons"]) == (503, ["echo:1.0 is loading"])


def test_each_model_has_a_readiness_of_its_own(ask, planes):
    for path in ("/readyz/echo", "/readyz/echo/1.0"):
        assert ask("inference", "GET", path).json == {"status": "ready"}
    planes.data.is_ready = Readiness(False, ("echo:1.0 has no executor in service (suspect)",))
    assert ask("inference", "GET", "/readyz/echo").status == 503
    assert ask("inference", "GET", "/readyz/nobody").status == 404
    assert ask("inference", "GET", "/readyz/echo/7").status == 404


def test_options_on_a_prediction_path_gives_the_models_document(ask, planes):
    document = ask("inference", "OPTIONS", "/predictions/echo").json
    assert document["info"]["title"] == "RESTful API for: echo"
    assert ask("inference", "OPTIONS", "/predictions/none").json["type"] == "ModelNotFoundException"
    assert ask("inference", "OPTIONS", "/nope").status == 404
    assert ask("inference", "OPTIONS", "/invocations?model_name=echo").json == document
    assert ask("inference", "OPTIONS", "/invocations").json["message"] == "Parameter model_name is required."
    planes.data.sole = "echo"
    assert ask("inference", "OPTIONS", "/invocations").json == document  # what a browser asks beforehand
    assert ask("inference", "OPTIONS", "/invocations?model_name=").json == document
    assert ask("inference", "OPTIONS", "/invocations?model_name=none").status == 404
    planes.data.signature = "not json"
    answer = ask("inference", "OPTIONS", "/predictions/echo")
    assert (answer.status, answer.json["message"]) == (400, "Failed to parse signature.json")


def test_the_steps_of_a_workflow_have_its_caller(ask, planes):
    callers = []

    async def infer(workflow, request, budgets):
        scope = current_call()
        assert scope is not None
        callers.append(scope.caller)
        return InferResponse(b"done")

    planes.control.workflows = SimpleNamespace(check_exists=lambda workflow: None, infer=infer)
    key = {"keys": planes.keys, "authorization": "Bearer inference"}
    assert ask("inference", "POST", "/wfpredict/graph", **key).status == 200
    assert callers == ["inference client"]


def test_workflows_are_unknown(ask):
    answer = ask("inference", "POST", "/wfpredict/w")
    assert answer.json == {
        "code": 404,
        "type": "WorkflowNotFoundException",
        "message": "Workflow not found: w",
    }


def test_without_its_key_nothing_is_answered_but_descriptions_and_probes(ask, planes):
    for target in ("/predictions/echo", "/ping", "/nope"):
        answer = ask("inference", "GET", target, keys=planes.keys)
        assert (answer.status, answer.json["type"]) == (400, "InvalidKeyException")
        assert (
            ask("inference", "GET", target, keys=planes.keys, authorization="Bearer management").status == 400
        )
    assert planes.data.asked == []
    for target in ("/api-description", "/livez", "/readyz"):
        assert ask("inference", "GET", target, keys=planes.keys).status == 200


def test_with_its_key_everything_is_answered(ask, planes):
    answer = ask("inference", "GET", "/predictions/echo", keys=planes.keys, authorization="Bearer inference")
    assert answer.status == 200


def test_answers_are_counted_by_class(ask, planes):
    ask("inference", "POST", "/predictions/echo")
    ask("inference", "POST", "/predictions/none")
    ask("inference", "GET", "/nope")
    planes.data.behave = answering(HandlerFailed())
    ask("inference", "POST", "/predictions/echo")
    text = planes.metrics.exposition()
    assert 'Requests2XX{Level="Host",Hostname="host",} 1.0' in text
    assert 'Requests4XX{Level="Host",Hostname="host",} 2.0' in text
    assert 'Requests5XX{Level="Host",Hostname="host",} 1.0' in text


def test_lines_of_all_requests_name_the_trace_of_their_client(ask, caplog):
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    with caplog.at_level("INFO", "ACCESS_LOG"):
        for method, path in (("POST", "/predictions/echo"), ("POST", "/wfpredict/nothing"), ("GET", "/ping")):
            ask("inference", method, path, traceparent=f"00-{trace_id}-00f067aa0ba902b7-01")
        ask("inference", "GET", "/ping")
    lines = [record for record in caplog.records if record.name == "ACCESS_LOG"]
    assert [getattr(line, "trace_id", None) for line in lines] == [trace_id] * 3 + [None]


def test_each_answer_has_a_line_in_the_access_log(ask, caplog):
    with caplog.at_level("INFO", "ACCESS_LOG"):
        ask("inference", "GET", "/ping?a=1")
        ask("inference", "POST", "/predictions/none")
    lines = [record.getMessage() for record in caplog.records if record.name == "ACCESS_LOG"]
    assert lines[0].startswith('/127.0.0.1:4321 "GET /ping?a=1 HTTP/1.1" 200 ')
    assert lines[1].startswith('/127.0.0.1:4321 "POST /predictions/none HTTP/1.1" 404 ')


def test_the_configured_cors_headers_are_on_every_answer(planes, ask_listener):
    from torchere.serving.frontend.rest.server import listener_of

    services = planes.services(cors_allowed_origin="*", cors_allowed_methods="GET, POST")
    app = listener_of(frozenset({"inference"}), planes.data, planes.control, services)
    for target in ("/ping", "/predictions/echo", "/nope"):
        headers = asyncio.run(ask_listener(app, "GET", target)).headers
        assert headers["access-control-allow-origin"] == "*"
        assert headers["access-control-allow-methods"] == "GET, POST"
        assert "access-control-allow-headers" not in headers


PREFLIGHT = {"origin": "https://a.example", "access_control_request_method": "POST"}


@pytest.mark.parametrize("with_keys", [False, True])
@pytest.mark.parametrize("target", ["/ping", "/predictions/echo", "/predictions/none", "/v2/models/echo"])
def test_a_preflight_needs_no_key_and_tells_what_cors_allows(planes, ask_listener, with_keys, target):
    from torchere.serving.frontend.rest.server import listener_of

    settings = {"cors_allowed_origin": "*", "cors_allowed_headers": "Authorization"}
    services = planes.services(keys=planes.keys if with_keys else None, **settings)
    listener = listener_of(frozenset({"inference"}), planes.data, planes.control, services)
    answer = asyncio.run(ask_listener(listener, "OPTIONS", target, **PREFLIGHT))
    assert (answer.status, answer.body) == (204, b"")
    assert answer.headers["access-control-allow-origin"] == "*"
    assert answer.headers["access-control-allow-headers"] == "Authorization"


@pytest.mark.parametrize("case", [("", PREFLIGHT, 400), ("*", {"origin": "https://a.example"}, 400)])
def test_options_is_a_preflight_only_with_cors_and_from_a_browser(planes, ask_listener, case):
    from torchere.serving.frontend.rest.server import listener_of

    origin, headers, status = case
    services = planes.services(keys=planes.keys, cors_allowed_origin=origin)
    listener = listener_of(frozenset({"inference"}), planes.data, planes.control, services)
    answer = asyncio.run(ask_listener(listener, "OPTIONS", "/predictions/echo", **headers))
    assert answer.status == status


def test_without_keys_a_preflight_of_a_foreign_page_to_management_is_refused(planes, ask_listener):
    from torchere.serving.frontend.rest.server import listener_of

    services = planes.services(cors_allowed_origin="*")
    listener = listener_of(frozenset({"management"}), planes.data, planes.control, services)
    assert asyncio.run(ask_listener(listener, "OPTIONS", "/models/echo", **PREFLIGHT)).status == 403


def test_the_description_is_an_openapi_document(ask):
    for method, target in (("OPTIONS", "/"), ("GET", "/api-description"), ("POST", "/api-description")):
        answer = ask("inference", method, target)
        document = json.loads(answer.body)
        assert answer.headers["content-type"] == "application/json"
        assert (document["openapi"], document["info"]["version"]) == ("3.0.1", "9.9")
