import asyncio
import json

import pytest

from torchere.serving.config.model_settings import Asked
from torchere.serving.config.server_settings import Address
from torchere.serving.errors import (
    Conflict,
    DefaultVersionInUse,
    DownloadFailed,
    InvalidArchive,
    InvalidRequest,
    LoadFailed,
    ModelNotFound,
    NotAllowed,
    QueueFull,
    UnregisterTimeout,
    VersionNotFound,
)
from torchere.serving.frontend.control import Progress, Registered
from torchere.serving.frontend.rest.server import listener_of
from torchere.serving.frontend.wording import MAX_METADATA_BYTES
from torchere.serving.frontend.workflows import Page
from torchere.serving.registry.desired import Wanted
from torchere.serving.types import InferResponse, ModelKey


def test_models_are_listed_with_the_page_that_was_asked_for(ask, planes):
    planes.control.page = Page((("a", "a.mar"), ("b", "b.mar")), "2")
    answer = ask("management", "GET", "/models?limit=2&next_page_token=4")
    assert planes.control.calls == [("list_models", 2, 4)]
    assert answer.json == {
        "nextPageToken": "2",
        "models": [{"modelName": "a", "modelUrl": "a.mar"}, {"modelName": "b", "modelUrl": "b.mar"}],
    }


@pytest.mark.parametrize(
    ("query", "limit", "token"),
    [
        *[("", 100, 0), ("?limit=abc", 100, 0), ("?limit=-1", 100, 0), ("?limit=101", 100, 0)],
        *[("?limit=0", 0, 0), ("?next_page_token=x", 100, 0), ("?limit=%C2%B2", 100, 0)],
    ],
)
def test_page_numbers_that_make_no_sense_count_as_unset(ask, planes, query, limit, token):
    assert ask("management", "GET", f"/models{query}").status == 200
    assert planes.control.calls == [("list_models", limit, token)]


def test_registering_takes_its_wish_from_the_query(ask, planes):
    answer = ask("management", "POST", "/models?url=echo.mar&model_name=two&batch_size=3&synchronous=false")
    wish = Wanted("echo.mar", Asked(batch_size=3), name="two")
    assert planes.control.calls == [("register", wish, {"synchronous": False})]
    assert answer.json == {"status": 'Model "two" Version: 1.0 registered with 1 initial workers'}


def test_registering_takes_its_wish_from_json_and_then_from_nothing_else(ask, planes):
    body = json.dumps({"url": "echo.mar", "batch_size": 3}).encode()
    ask("management", "POST", "/models?model_name=two", body, content_type="application/json; charset=utf-8")
    wish = Wanted("echo.mar", Asked(batch_size=3))
    assert planes.control.calls == [("register", wish, {"synchronous": True})]


@pytest.mark.parametrize("body", [b"", b"[]", b"nope", b"\xff", b'{"a": "\xff"}', b'{"url": 1}', b"[" * 900])
def test_json_that_is_no_object_of_parameters_is_refused(ask, planes, body):
    answer = ask("management", "POST", "/models", body, content_type="application/json")
    assert (answer.status, answer.json["type"]) == (400, "BadRequestException")
    assert planes.control.calls == []


@pytest.mark.parametrize(
    ("query", "content_type", "body"),
    [
        ("", "text/plain", b""),
        ("?url=echo.mar&initial_workers=abc", "text/plain", b""),
        ("", "application/json", b"nope"),
        ("", "application/json", b'{"url": 1}'),
    ],
)
def test_where_nothing_is_registered_nobody_is_told_what_is_wrong_with_a_registration(
    ask, planes, query, content_type, body
):
    planes.control.model_api_off = True
    answer = ask("management", "POST", f"/models{query}", body, content_type=content_type)
    assert (answer.status, answer.json["type"]) == (405, "MethodNotAllowedException")
    assert planes.control.calls == []


def test_a_registration_that_is_too_large_is_refused(ask, planes):
    answer = ask("management", "POST", "/models", b"a" * 1001, content_type="application/json")
    assert (answer.status, answer.headers["connection"]) == (413, "close")
    assert answer.json["message"] == "The body is longer than max_request_size=1000 bytes."


@pytest.mark.parametrize(
    ("progress", "status", "sentence"),
    [
        (Progress.DONE, 200, 'Model "echo" Version: 1.0 registered with 1 initial workers'),
        (Progress.STARTED, 202, "Processing worker updates..."),
        (Progress.PARTIAL, 206, "Workers scaling in progress..."),
    ],
)
def test_the_status_tells_how_far_registering_came(ask, planes, progress, status, sentence):
    planes.control.progress = progress
    answer = ask("management", "POST", "/models?url=echo.mar")
    assert (answer.status, answer.json) == (status, {"status": sentence})


@pytest.mark.parametrize(
    ("error", "status", "type_name"),
    [
        (InvalidRequest("x"), 400, "BadRequestException"),
        (ModelNotFound("empty url"), 404, "ModelNotFoundException"),
        (InvalidArchive("x"), 400, "InvalidModelException"),
        (DownloadFailed("x"), 400, "DownloadArchiveException"),
        (Conflict("x"), 409, "ConflictStatusException"),
        (NotAllowed("x"), 405, "MethodNotAllowedException"),
        (LoadFailed("x"), 500, "InternalServerException"),
        (LoadFailed("x", out_of_memory=True), 507, "InternalServerException"),
    ],
)
def test_what_registering_failed_of_is_told(ask, planes, error, status, type_name):
    planes.control.error = error
    answer = ask("management", "POST", "/models?url=echo.mar")
    assert answer.json == {"code": status, "type": type_name, "message": error.message}


def test_half_a_surrogate_in_the_text_of_an_error_is_escaped(ask, planes):
    planes.control.error = ModelNotFound("Model not found at: \ud800.mar")
    answer = ask("management", "POST", "/models", b'{"url": "\\ud800.mar"}', content_type="application/json")
    assert (answer.status, answer.json["message"]) == (404, "Model not found at: \ud800.mar")


def test_operators_see_the_detail_of_a_failure(ask, planes):
    planes.control.error = LoadFailed("Failed to start workers", "RuntimeError: no such layer")
    answer = ask("management", "POST", "/models?url=echo.mar")
    assert answer.json["detail"] == "RuntimeError: no such layer"


def test_a_port_that_clients_use_too_keeps_details_back(ask, planes):
    planes.control.error = LoadFailed("Failed to start workers", "RuntimeError: no such layer")
    assert "detail" not in ask("inference+management", "POST", "/models?url=echo.mar").json


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("/models/echo", (None, 1, 1, False)),
        ("/models/echo?min_worker=2", (None, 2, 2, False)),
        ("/models/echo?min_worker=2&max_worker=4&synchronous=True", (None, 2, 4, True)),
        ("/models/echo/1.0?min_worker=0", ("1.0", 0, 0, False)),
        ("/models/echo?model_version=2.0", ("2.0", 1, 1, False)),
        ("/models/echo/1.0?model_version=2.0", ("1.0", 1, 1, False)),
        ("/models/echo?number_gpu=1&timeout=x", (None, 1, 1, False)),
    ],
)
def test_scaling_takes_its_numbers_from_the_query(ask, planes, target, expected):
    version, low, high, synchronous = expected
    assert ask("management", "PUT", target).status == 200
    how = {"min_executors": low, "max_executors": high, "synchronous": synchronous}
    assert planes.control.calls == [("scale", "echo", version, how)]


def test_scaling_by_what_is_no_number_is_refused(ask, planes):
    answer = ask("management", "PUT", "/models/echo?min_worker=two")
    assert (answer.status, answer.json["type"]) == (400, "BadRequestException")
    assert planes.control.calls == []


@pytest.mark.parametrize("version", [None, "1.0", "all"])
def test_describing_passes_the_version_on(ask, planes, version):
    answer = ask("management", "GET", f"/models/echo{'' if version is None else '/' + version}")
    assert planes.control.calls == [("describe", "echo", version)]
    assert answer.json[0]["modelName"] == "echo"
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(("method", "name"), [("GET", "describe"), ("DELETE", "unregister")])
def test_a_version_in_the_query_is_none_as_in_torchserve(ask, planes, method, name):
    ask("management", method, "/models/echo?version=1.0")
    assert planes.control.calls == [(name, "echo", None)]


def test_a_customised_description_asks_the_handler_with_the_clients_headers(ask, planes):
    answer = ask("management", "GET", "/models/echo?customized=true", x_test="1")
    name, model, version, request = planes.control.calls[0]
    assert (name, model, version) == ("describe_customized", "echo", None)
    assert ("x-test", "1") in request.headers
    assert answer.json[0]["customizedMetadata"] == {"custom": 1}
    assert (answer.headers["x-extra"], answer.headers["content-type"]) == ("yes", "application/json")


def test_a_handler_that_is_asked_for_metadata_does_not_get_the_management_key(ask, planes):
    key = {"keys": planes.keys, "authorization": "Bearer management"}
    assert ask("management", "GET", "/models/echo?customized=true", x_test="1", **key).status == 200
    assert dict(planes.control.calls[0][3].headers).keys() >= {"x-test"}
    assert "authorization" not in dict(planes.control.calls[0][3].headers)


def test_a_customised_description_may_have_the_handlers_status(ask, planes):
    planes.control.customized = InferResponse(b"null", (("Content-Type", "text/x"),), 202)
    answer = ask("management", "GET", "/models/echo?customized=true")
    assert (answer.status, answer.headers["content-type"]) == (202, "text/x")


def test_a_customised_description_has_a_status_of_http(ask, planes):
    planes.control.customized = InferResponse(b"null", (), 1000)
    answer = ask("management", "GET", "/models/echo?customized=true")
    assert (answer.status, answer.json["message"]) == (500, "Prediction failed")


def test_a_customised_description_of_many_bytes_is_refused(ask, planes):
    planes.control.customized = InferResponse(b'{"labels": "' + b"x" * MAX_METADATA_BYTES + b'"}', (), 200)
    answer = ask("management", "GET", "/models/echo?customized=true")
    assert (answer.status, answer.json["message"]) == (500, "Failed to get customized model metadata.")
    assert "metadata of 1048590 bytes, expected at most 1048576" in answer.json["detail"]


def test_all_versions_are_never_customised(ask, planes):
    ask("management", "GET", "/models/echo/all?customized=true")
    assert planes.control.calls == [("describe", "echo", "all")]


@pytest.mark.parametrize("version", [None, "1.0"])
def test_unregistering_passes_the_version_on(ask, planes, version):
    answer = ask("management", "DELETE", f"/models/echo{'' if version is None else '/' + version}")
    assert planes.control.calls == [("unregister", "echo", version)]
    assert answer.json == {"status": 'Model "echo" unregistered'}


@pytest.mark.parametrize(
    ("error", "status", "type_name"),
    [
        (VersionNotFound("x"), 404, "ModelVersionNotFoundException"),
        (DefaultVersionInUse("x"), 403, "InvalidModelVersionException"),
        (UnregisterTimeout("x"), 408, "RequestTimeoutException"),
    ],
)
def test_what_unregistering_failed_of_is_told(ask, planes, error, status, type_name):
    planes.control.error = error
    answer = ask("management", "DELETE", "/models/echo")
    assert (answer.status, answer.json["type"]) == (status, type_name)


def test_the_default_version_is_set(ask, planes):
    answer = ask("management", "PUT", "/models/echo/1.0/set-default")
    assert planes.control.calls == [("set_default", "echo", "1.0")]
    assert answer.json == {"status": 'Default version successfully updated for model "echo" to "1.0"'}


def test_the_quarantined_requests_of_a_version_are_listed(ask, planes):
    answer = ask("management", "GET", "/models/echo/1.0/quarantine")
    assert planes.control.calls == [("quarantined", "echo", "1.0")]
    convict = {"digest": "d1", "bytes": 6, "causes": ["one", "two"], "quarantinedForSec": 60}
    assert answer.json == {"quarantinedRequests": [convict]}


@pytest.mark.parametrize(("digest", "lifted"), [(None, 3), ("d1", 1)])
def test_the_quarantine_is_lifted_for_one_request_or_for_all(ask, planes, digest, lifted):
    answer = ask("management", "DELETE", f"/models/echo/1.0/quarantine{'' if digest is None else '/d1'}")
    assert planes.control.calls == [("lift_quarantine", "echo", "1.0", digest)]
    text = f'Quarantine of model "echo" version "1.0" lifted for requests: {lifted}'
    assert answer.json == {"status": text}


def test_a_version_may_be_called_quarantine(ask, planes):
    ask("management", "DELETE", "/models/echo/quarantine")
    ask("management", "GET", "/models/echo/quarantine/quarantine")
    assert planes.control.calls == [
        ("unregister", "echo", "quarantine"),
        ("quarantined", "echo", "quarantine"),
    ]


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize("end", ["", "/d1"])
def test_the_quarantine_needs_the_management_key(ask, planes, method, end):
    target = f"/models/echo/1.0/quarantine{end}"
    for authorization in ({}, {"authorization": "Bearer inference"}):
        answer = ask("management", method, target, keys=planes.keys, **authorization)
        assert (answer.status, answer.json["type"]) == (400, "InvalidKeyException")
    assert planes.control.calls == []


@pytest.mark.parametrize(
    ("method", "target"),
    [
        *[
            ("PATCH", "/models"),
            ("DELETE", "/models"),
            ("POST", "/models/echo"),
            ("PATCH", "/models/echo/1.0"),
            ("PUT", "/models/echo/1.0/quarantine"),
            ("GET", "/models/echo/1.0/quarantine/d1"),
        ],
        *[("POST", "/v1/models/echo"), ("PATCH", "/workflows"), ("PUT", "/workflows/w"), ("GET", "/")],
        *[("GET", "/models/echo/1.0/set-default"), ("DELETE", "/models/echo/1.0/set-default")],
    ],
)
def test_methods_that_a_path_does_not_have_are_refused(ask, planes, method, target):
    answer = ask("management", method, target)
    assert (answer.status, answer.json["type"]) == (405, "MethodNotAllowedException")
    assert answer.json["message"] == "Requested method is not allowed, please refer to API document."
    assert planes.control.calls == []


@pytest.mark.parametrize(
    "target", ["/nope", "/ping", "/predictions/echo", "/models/a/b/c", "/metrics", "/token"]
)
def test_paths_of_other_apis_are_not_found(ask, target):
    answer = ask("management", "GET", target)
    assert (answer.status, answer.json["type"]) == (404, "ResourceNotFoundException")


def test_options_on_a_model_gives_its_document(ask, planes):
    document = ask("management", "OPTIONS", "/models/echo").json
    assert document["info"]["title"] == "RESTful Management API for: echo"
    assert ask("management", "OPTIONS", "/models/echo/1.0").json == document
    assert planes.control.calls == [("describe", "echo", None), ("describe", "echo", "1.0")]


def test_kserve_v1_asks_whether_a_model_is_ready(ask):
    assert ask("management", "GET", "/v1/models/echo").json == {"name": "echo", "ready": True}


def test_a_new_key_is_made_for_the_holder_of_the_api_key(ask, planes):
    answer = ask("management", "GET", "/token?type=inference", keys=planes.keys, authorization="Bearer api")
    assert (answer.status, answer.body) == (200, b"\n")
    assert planes.keys.renewed == ["inference"]


@pytest.mark.parametrize(
    ("target", "authorization"),
    [
        ("/token?type=inference", "Bearer management"),
        ("/token?type=x", "Bearer api"),
        ("/token", "Bearer api"),
    ],
)
def test_nobody_else_gets_a_new_key(ask, planes, target, authorization):
    answer = ask("management", "GET", target, keys=planes.keys, authorization=authorization)
    assert (answer.status, answer.json["type"]) == (400, "InvalidKeyException")
    assert planes.keys.renewed == []


def test_a_request_with_two_different_keys_gets_no_new_key(ask, planes):
    two = {"authorization": "Bearer api", "Authorization": "Bearer another"}
    assert ask("management", "GET", "/token?type=inference", keys=planes.keys, **two).status == 400
    two["Authorization"] = two["authorization"]
    assert ask("management", "GET", "/token?type=inference", keys=planes.keys, **two).status == 200
    assert planes.keys.renewed == ["inference"]


def test_without_its_key_nothing_changes(ask, planes):
    for method, target in (("POST", "/models?url=echo.mar"), ("DELETE", "/models/echo"), ("GET", "/models")):
        answer = ask("management", method, target, keys=planes.keys, authorization="Bearer inference")
        assert answer.json["type"] == "InvalidKeyException"
    assert planes.control.calls == []
    right = ask("management", "GET", "/models", keys=planes.keys, authorization="Bearer management")
    assert right.status == 200


def test_a_bug_is_answered_once_and_logged(ask, planes, caplog):
    planes.control.error = RuntimeError("odd")
    answer = ask("management", "GET", "/models")
    assert (answer.status, answer.json["message"]) == (500, "Internal server error")
    assert "odd" in caplog.text


def test_a_registration_goes_on_when_its_client_leaves(planes):
    async def main():
        asked, go_on, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def register(wish, *, synchronous):
            asked.set()
            await go_on.wait()
            done.set()
            return Registered(ModelKey("echo", "1.0"), 1, Progress.DONE)

        planes.control.register = register
        async with planes.connected("management") as (server, _, writer):
            writer.write(b"POST /models?url=a.mar HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.wait_for(asked.wait(), 20)
            writer.close()
            while server.listener.connections:
                await asyncio.sleep(0)
            go_on.set()
            await asyncio.wait_for(done.wait(), 20)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("line", "client", "status"),
    [
        (b"PUT /models/m", ("127.0.0.1", b""), b"200"),
        (b"PUT /models/m", ("::1", b""), b"200"),
        (b"PUT /models/m", ("10.0.0.7", b""), b"403"),
        (b"PUT /models/m", ("127.0.0.6", b""), b"403"),  # Istio's proxy, for clients of other machines
        (b"PUT /models/m", ("127.0.0.1", b"X-Forwarded-For: 10.0.0.7\r\n"), b"403"),
        (b"GET /models", ("10.0.0.7", b""), b"200"),
    ],
)
def test_management_for_this_machine_is_read_from_others_and_not_changed(
    talk, monkeypatch, line, client, status
):
    address, header = client
    monkeypatch.setattr("torchere.serving.frontend.rest.connection.address_of", lambda peer: address)
    said = talk(
        b"%s HTTP/1.1\r\nHost: a\r\nConnection: close\r\n%s\r\n" % (line, header),
        surface="management",
        management_address=Address("0.0.0.0", 8081),
        token_auth_enabled=False,
        insecure_management="local",
    )
    assert said.split()[1] == status
    assert (b"only clients on this machine may change models" in said) == (status == b"403")


def test_a_null_in_the_body_counts_as_absent_beside_the_query(ask, planes):
    body = b'{"url": "echo.mar", "runtime": null}'
    answer = ask("management", "POST", "/models?runtime=python", body, content_type="application/json")
    assert answer.status == 200
    (call,) = planes.control.calls
    assert "echo.mar" in str(call)


def test_registering_reads_a_body_that_is_nearly_json_as_torchserve_does(ask, planes):
    for body in (
        b"{'url': 'echo.mar', 'batch_size': '3'}",
        b'{"url":"echo.mar","batch_size":3,}',
        b"{url: echo.mar}",
    ):
        assert ask("management", "POST", "/models", body, content_type="application/json").status == 200
    wish, how = Wanted("echo.mar", Asked(batch_size=3)), {"synchronous": True}
    assert planes.control.calls == [
        ("register", wish, how),
        ("register", wish, how),
        ("register", Wanted("echo.mar", Asked()), how),
    ]


@pytest.fixture
def ask_strictly(planes, ask_listener):
    """As `ask` of a management port, with `strict_compatibility`."""

    def call(method: str, target: str, body: bytes = b"", **headers: str):
        services = planes.services(strict_compatibility=True)
        listener = listener_of(frozenset({"management"}), planes.data, planes.control, services)
        return asyncio.run(ask_listener(listener, method, target, body, **headers))

    return call


@pytest.mark.parametrize("number", ["abc", "1.0", "%20", "2147483648", "99999999999", "-2147483649"])
def test_strictly_a_number_of_the_query_that_is_none_counts_as_not_said(ask_strictly, planes, number):
    names = ("batch_size", "max_batch_delay", "initial_workers", "response_timeout", "startup_timeout")
    query = "".join(f"&{name}={number}" for name in names)
    ask_strictly("POST", f"/models?url=echo.mar{query}")
    ask_strictly("PUT", f"/models/echo?min_worker={number}&max_worker={number}")
    assert planes.control.calls == [
        ("register", Wanted("echo.mar", Asked()), {"synchronous": True}),
        ("scale", "echo", None, {"min_executors": 1, "max_executors": 1, "synchronous": False}),
    ]


def test_strictly_numbers_that_torchserve_reads_are_read(ask_strictly, planes):
    ask_strictly("POST", "/models?url=echo.mar&batch_size=%2B2&initial_workers=-1")
    wish = Wanted("echo.mar", Asked(batch_size=2, executors=0))
    assert planes.control.calls == [("register", wish, {"synchronous": True})]


def test_strictly_fewer_workers_than_none_are_an_error_of_the_server(ask_strictly, planes):
    assert ask_strictly("PUT", "/models/echo?min_worker=-1").status == 500
    assert planes.control.calls == []


def test_strictly_a_bad_number_in_a_json_body_is_refused(ask_strictly, planes):
    body = json.dumps({"url": "echo.mar", "batch_size": "abc"}).encode()
    assert ask_strictly("POST", "/models", body, content_type="application/json").status == 400


def test_strictly_errors_have_no_detail(ask_strictly, planes):
    planes.control.error = LoadFailed.of("echo", "1.0", "RuntimeError: no such layer", False)
    answer = ask_strictly("POST", "/models?url=echo.mar")
    assert (answer.status, sorted(answer.json)) == (500, ["code", "message", "type"])


def test_a_refusal_that_passes_says_when_to_try_again(ask, planes):
    planes.control.error = QueueFull("full", retry_after_s=2.5)
    answer = ask("management", "GET", "/models/echo")
    assert (answer.status, answer.headers["retry-after"]) == (503, "3")
    assert answer.headers["content-type"] == "application/json"
