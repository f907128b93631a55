import json
import sys
from operator import methodcaller
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from scripted_transport import Caller, Clock, Server

import torchere.client
from torchere.client import (
    Client,
    ConnectionFailed,
    DeadlineExceeded,
    InferOptions,
    InferResult,
    ModelEntry,
    ModelFailed,
    Part,
    Retries,
    Unauthorized,
    Unavailable,
    UnreadableAnswer,
)
from torchere.client.inference import Events

CUT_OFF = b'{"outputs": [{"name":"y","datatype":"FP32","shape":[1],"parameters":{"binary_data_size":4}}]}'
OUTPUT = {"name": "y", "datatype": "FP32", "shape": [1, 2]}


def ok(body: object = None, **headers: str) -> httpx.Response:
    return httpx.Response(200, json=body, headers={n.replace("_", "-"): v for n, v in headers.items()})


def busy(**headers: str) -> httpx.Response:
    body = {"code": 503, "type": "ServiceUnavailableException", "message": "full"}
    return httpx.Response(503, json=body, headers={n.replace("_", "-"): v for n, v in headers.items()})


@pytest.mark.parametrize(
    ("data", "content_type", "body"),
    [
        (b"\0\1", "application/octet-stream", b"\0\1"),
        ("é", "text/plain; charset=utf-8", "é".encode()),
        ({"x": [1.5]}, "application/json", b'{"x":[1.5]}'),
        ({"x": np.array([1.5]), "n": np.int64(2)}, "application/json", b'{"x":[1.5],"n":2}'),
        (np.array([[1, 2]]), "application/json", b"[[1,2]]"),
        (None, "application/octet-stream", b""),
    ],
)
def test_data_is_sent_with_its_type(call: Caller, data: object, content_type: str, body: bytes) -> None:
    server = Server(ok({"label": "cat"}, x_request_id="id-1"))
    answer = call(server, lambda client: client.predict("net", data, version="1.0"))
    assert (answer.json(), answer.request_id, answer.status) == ({"label": "cat"}, "id-1", 200)
    (request,) = server.requests
    assert (request.method, request.url.path) == ("POST", "/predictions/net/1.0")
    assert (request.headers["content-type"], request.content) == (content_type, body)


def test_what_can_t_be_sent_is_named(call: Caller) -> None:
    with pytest.raises(TypeError, match=r"a set has no form in JSON; expected numbers, texts, lists, dicts"):
        call(Server(ok()), lambda client: client.predict("net", {"x": {1}}))
    with pytest.raises(TypeError, match=r"the inputs are a ndarray; expected a dict of arrays by name"):
        call(Server(ok()), lambda client: client.infer("net", np.ones(2)))


def test_a_path_is_sent_as_the_file_it_names(call: Caller, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(b"\x89PNG")
    server = Server(ok())
    call(server, lambda client: client.predict("net", tmp_path / "cat.png"))
    assert server.requests[0].headers["content-type"] == "image/png"
    assert server.requests[0].content == b"\x89PNG"


def test_the_content_type_and_headers_of_the_caller_win(call: Caller) -> None:
    server = Server(ok())
    call(
        server, lambda client: client.predict("net", "a,b", content_type="text/csv", headers={"X-Mine": "1"})
    )
    assert server.requests[0].headers["content-type"] == "text/csv"
    assert (b"X-Mine", b"1") in server.requests[0].headers.raw


@pytest.mark.parametrize("name", ["Content-Type", "content-type"])
def test_a_content_type_among_the_headers_counts(call: Caller, name: str) -> None:
    server = Server(ok())
    call(server, lambda client: client.predict("net", b"{}", headers={name: "application/json"}))
    assert server.requests[0].headers.get_list("content-type") == ["application/json"]


def test_a_header_is_sent_once_whatever_its_spelling(call: Caller) -> None:
    server = Server(ok())
    headers = {"Authorization": "Basic abc", "User-Agent": "mine"}
    call(server, lambda client: client.predict("net"), headers=headers, token="key")
    assert server.requests[0].headers.get_list("authorization") == ["Basic abc"]
    assert server.requests[0].headers.get_list("user-agent") == ["mine"]


def test_headers_in_bytes_are_sent_as_they_are(call: Caller) -> None:
    server = Server(ok())
    mine, ours = {b"X-Mine": b"1"}, {b"X-Ours": b"2"}
    call(server, lambda client: client.predict("net", headers=mine), headers=ours)
    assert {(b"X-Mine", b"1"), (b"X-Ours", b"2")} <= set(server.requests[0].headers.raw)


@pytest.mark.parametrize("size_bytes", [0, 3, 768_000])
def test_headers_that_were_handed_on_do_not_frame_the_body(call: Caller, size_bytes: int) -> None:
    server = Server(ok())
    handed_on = {"Content-Length": "5", "Transfer-Encoding": "chunked"}
    call(server, lambda client: client.predict("net", bytes(size_bytes), headers=handed_on))
    assert server.requests[0].headers.get_list("content-length") == [str(size_bytes)]
    assert "transfer-encoding" not in server.requests[0].headers


def test_a_large_body_is_sent_whole(call: Caller) -> None:
    server, body = Server(ok()), bytes(range(256)) * 3000
    call(server, lambda client: client.predict("net", body))
    (request,) = server.requests
    assert request.content == body
    assert request.headers["content-length"] == str(len(body))
    assert "transfer-encoding" not in request.headers


def test_a_form_has_all_parts(call: Caller, tmp_path: Path) -> None:
    from torchere.serving.frontend.rest.codec import multipart_parameters

    (tmp_path / "a.txt").write_text("from a file")
    files = {"text": "plain", "raw": b"bytes", "file": tmp_path / "a.txt", "own": Part(b"{}", "x.json")}
    server = Server(ok())
    call(server, lambda client: client.predict("net", files=files))
    request = server.requests[0]
    found = {
        p.name: (p.value, p.content_type)
        for p in multipart_parameters(request.headers["content-type"], request.content)
    }
    assert found == {
        "text": (b"plain", ""),
        "raw": (b"bytes", "application/octet-stream"),
        "file": (b"from a file", "text/plain"),
        "own": (b"{}", "application/json"),
    }


def test_names_are_quoted(call: Caller) -> None:
    server = Server(ok())
    call(server, lambda client: client.predict("a/b c", b""))
    assert server.requests[0].url.raw_path == b"/predictions/a%2Fb%20c"


def test_tokens_go_to_their_own_api(call: Caller) -> None:
    server = Server(ok({"status": "fine"}))
    options: dict[str, Any] = {"token": "inf", "management_token": "man"}
    call(server, lambda client: client.predict("net"), **options)
    call(server, lambda client: client.unregister("net"), **options)
    call(server, lambda client: client.unload("net"), **options)
    sent = [(request.url.port, request.headers["authorization"]) for request in server.requests]
    assert sent == [(8080, "Bearer inf"), (8081, "Bearer man"), (8081, "Bearer man")]


def test_the_server_is_told_the_time_that_is_left(call: Caller, clock: Clock) -> None:
    server = Server(busy(), ok())
    call(server, lambda client: client.predict("net", timeout_s=2), retries=Retries(first_pause_s=0.5))
    first, second = (int(request.headers["x-torchere-timeout-ms"]) for request in server.requests)
    assert first == 2000
    assert 1500 <= second <= 1750


def test_without_a_time_out_the_server_is_told_none(call: Caller) -> None:
    server = Server(ok())
    call(server, lambda client: client.predict("net"), timeout_s=None)
    assert "x-torchere-timeout-ms" not in server.requests[0].headers


@pytest.mark.parametrize("step", [busy(), httpx.Response(429), httpx.ConnectError("refused")])
def test_what_cannot_have_run_is_sent_again(call: Caller, clock: Clock, step: Any) -> None:
    server = Server(step, step, ok({"label": "cat"}))
    assert call(server, lambda client: client.predict("net")).json() == {"label": "cat"}
    assert len(clock.pauses_s) == 2


def test_the_servers_retry_after_is_kept(call: Caller, clock: Clock) -> None:
    call(Server(busy(retry_after="3"), ok()), lambda client: client.predict("net"))
    assert 3 <= clock.pauses_s[0] <= 3.75


def test_no_attempt_begins_after_the_deadline(call: Caller, clock: Clock) -> None:
    server = Server(busy(retry_after="3"))
    with pytest.raises(Unavailable, match="full"):
        call(server, lambda client: client.predict("net", timeout_s=5))
    assert len(server.requests) == 2
    assert clock.now_s < 1005


@pytest.mark.parametrize(
    ("step", "error"),
    [
        (
            httpx.Response(503, json={"type": "InternalServerException", "message": "Prediction failed"}),
            ModelFailed,
        ),
        (httpx.Response(503, content=b"no", headers={"x-request-id": "1"}), ModelFailed),
        (httpx.Response(503, content=b"reset reason: connection termination"), Unavailable),
        (httpx.Response(503, json={"error": "no server"}, headers={"retry-after": "1"}), Unavailable),
        (httpx.Response(429, json={"error": "no"}, headers={"x-request-id": "1"}), ModelFailed),
        (httpx.ReadError("reset"), ConnectionFailed),
        (httpx.RemoteProtocolError("half an answer"), ConnectionFailed),
        (httpx.ReadTimeout("slow"), DeadlineExceeded),
    ],
)
def test_what_may_have_run_is_sent_once(
    call: Caller, clock: Clock, step: Any, error: type[Exception]
) -> None:
    server = Server(step)
    with pytest.raises(error):
        call(server, lambda client: client.predict("net"))
    assert (len(server.requests), clock.pauses_s) == (1, [])


def test_a_streamed_answer_comes_in_parts(call: Caller) -> None:
    parts = call(Server(httpx.Response(200, content=b"one two")), lambda client: client.predict_stream("llm"))
    assert b"".join(parts) == b"one two"


def test_a_streamed_answer_that_is_an_error_is_raised_and_retried(call: Caller, clock: Clock) -> None:
    server = Server(busy(), httpx.Response(200, content=b"fine"))
    assert call(server, lambda client: client.predict_stream("llm")) == [b"fine"]
    with pytest.raises(ModelFailed, match="broken"):
        call(
            Server(httpx.Response(500, json={"message": "broken"})),
            lambda client: client.predict_stream("llm"),
        )


def test_arrays_go_and_come_as_raw_bytes(call: Caller) -> None:
    head = json.dumps(
        {
            "model_name": "m",
            "model_version": "1",
            "outputs": [OUTPUT | {"parameters": {"binary_data_size": 8}}],
        }
    )
    body = head.encode() + np.array([1, 2], "<f4").tobytes()
    headers = {"inference-header-content-length": str(len(head)), "x-request-id": "r"}
    server = Server(httpx.Response(200, content=body, headers=headers))
    found: InferResult = call(
        server, lambda client: client.infer("m", {"x": np.ones((1, 2), "f4")}, version="1")
    )
    assert found["y"].tolist() == [[1.0, 2.0]]
    assert (found.model_name, found.model_version, found.request_id) == ("m", "1", "r")
    (request,) = server.requests
    assert request.url.path == "/v2/models/m/versions/1/infer"
    length = int(request.headers["inference-header-content-length"])
    assert json.loads(request.content[:length]) == {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}],
        "parameters": {"binary_data_output": True},
    }
    assert request.content[length:] == np.ones(2, "<f4").tobytes()


def test_arrays_go_and_come_as_json_on_request(call: Caller) -> None:
    server = Server(ok({"model_name": "m", "id": "7", "outputs": [OUTPUT | {"data": [1, 2]}]}))
    options = InferOptions(
        outputs=["y"], binary=False, id="7", parameters={"k": 3}, sequence_id=9, sequence_start=True
    )
    found: InferResult = call(server, lambda client: client.infer("m", {"x": [b"a"]}, options))
    assert (found.id, found.outputs["y"].tolist()) == ("7", [[1.0, 2.0]])
    assert json.loads(server.requests[0].content) == {
        "id": "7",
        "inputs": [{"name": "x", "datatype": "BYTES", "shape": [1], "data": ["a"]}],
        "outputs": [{"name": "y", "parameters": {"binary_data": False}}],
        "parameters": {"k": 3, "sequence_id": 9, "sequence_start": True, "sequence_end": False},
    }


def test_a_text_is_no_list_of_outputs() -> None:
    with pytest.raises(TypeError, match=r"outputs: found 'ab', expected a list of names: \['ab'\]"):
        InferOptions(outputs="ab")


@pytest.mark.parametrize(
    ("body", "length"),
    [
        (b"<html>", None),
        (b"[]", None),
        (b"{}", None),
        (b'{"outputs": [{"name": "y", "datatype": "FP32", "shape": [2], "data": [1]}]}', None),
        (b'{"outputs": [{"name": "y", "datatype": "U", "shape": [], "data": []}]}', None),
        (b'{"outputs": [{"name": "y", "datatype": "FP32", "shape": [Infinity], "data": []}]}', None),
        (CUT_OFF, None),
        (b"{}", "x"),
        (b"nonsense", "4"),
    ],
)
def test_an_answer_that_is_no_inference_response_is_told(
    call: Caller, body: bytes, length: str | None
) -> None:
    headers = {} if length is None else {"inference-header-content-length": length}
    server = Server(httpx.Response(200, content=body, headers=headers))
    with pytest.raises(UnreadableAnswer):
        call(server, lambda client: client.infer("m", {"x": [1.0]}))


def test_an_unknown_output_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="no output 'z'; there is "):
        InferResult("m", "1", ())["z"]


def test_metadata_is_read(call: Caller) -> None:
    inputs = [OUTPUT, {**OUTPUT, "parameters": {"dimension_1_least": 2}}]
    server = Server(ok({"name": "m", "versions": ["1"], "platform": "p", "inputs": inputs, "outputs": []}))
    found = call(server, lambda client: client.model_metadata("m"))
    assert (found.name, found.versions, found.inputs[0].shape) == ("m", ("1",), (1, 2))
    assert [one.parameters for one in found.inputs] == [{}, {"dimension_1_least": 2}]
    server = Server(ok({"name": "torchere", "version": "1", "extensions": ["binary_tensor_data"]}))
    assert call(server, lambda client: client.server_metadata()).extensions == ("binary_tensor_data",)
    with pytest.raises(UnreadableAnswer):
        call(Server(ok({"versions": 3})), lambda client: client.model_metadata("m"))


@pytest.mark.parametrize(("status", "ready"), [(200, True), (503, False), (400, False)])
def test_not_ready_is_an_answer(call: Caller, status: int, ready: bool) -> None:
    for ask in ("is_live", "is_ready"):
        assert call(Server(httpx.Response(status)), methodcaller(ask)) is ready
    assert call(Server(httpx.Response(status)), lambda client: client.is_model_ready("m", "1")) is ready


@pytest.mark.parametrize("ask", ["is_live", "is_ready", "is_model_ready"])
def test_a_wrong_key_is_not_taken_for_not_ready(call: Caller, ask: str) -> None:
    body = {"code": 400, "type": "InvalidKeyException", "message": "Token Authorization failed."}
    names = ("m",) if ask == "is_model_ready" else ()
    with pytest.raises(Unauthorized, match="Token Authorization failed"):
        call(Server(httpx.Response(400, json=body)), methodcaller(ask, *names))


def test_ping_tells_unhealthy_from_healthy(call: Caller) -> None:
    assert call(Server(ok({"status": "Healthy"})), lambda client: client.ping())
    assert not call(Server(httpx.Response(500)), lambda client: client.ping())


def test_the_repository_is_controlled_on_the_management_port(call: Caller) -> None:
    server = Server(ok([{"name": "m", "version": "1", "state": "READY"}]))
    (line,) = call(server, lambda client: client.repository_index(ready_only=True))
    assert (line.name, line.state, line.reason) == ("m", "READY", "")
    call(server, lambda client: client.load("m"))
    sent = [(request.url.port, request.url.path) for request in server.requests]
    assert sent == [(8081, "/v2/repository/index"), (8081, "/v2/repository/models/m/load")]
    assert json.loads(server.requests[0].content) == {"ready": True}


def test_statistics_are_given_as_they_are(call: Caller) -> None:
    server = Server(ok({"model_stats": [{"name": "m", "inference_count": 3}]}))
    assert call(server, lambda client: client.statistics("m")) == [{"name": "m", "inference_count": 3}]


def test_the_management_api_is_called_as_it_wants(call: Caller) -> None:
    server = Server(ok({"status": "done"}))
    said = [
        call(
            server,
            lambda client: client.register("net.mar", initial_workers=2, synchronous=True, handler=None),
        ),
        call(server, lambda client: client.scale("net", 2, 3, version="1")),
        call(server, lambda client: client.set_default("net", "2")),
        call(server, lambda client: client.unregister("net", "1")),
    ]
    assert said == ["done"] * 4
    assert [(request.method, str(request.url).partition(":8081")[2]) for request in server.requests] == [
        ("POST", "/models?url=net.mar&initial_workers=2&synchronous=true"),
        ("PUT", "/models/net/1?min_worker=2&max_worker=3&synchronous=true"),
        ("PUT", "/models/net/2/set-default"),
        ("DELETE", "/models/net/1"),
    ]


def test_all_pages_of_models_are_listed(call: Caller) -> None:
    pages = [
        ok({"models": [{"modelName": "a", "modelUrl": "a.mar"}], "nextPageToken": "1"}),
        ok({"models": [{"modelName": "b", "modelUrl": "b.mar"}], "nextPageToken": "2"}),
        ok({"models": [], "nextPageToken": "2"}),
    ]
    server = Server(*pages)
    found = call(server, lambda client: client.list_models())
    assert found == [ModelEntry("a", "a.mar"), ModelEntry("b", "b.mar")]
    assert [request.url.query for request in server.requests] == [
        b"",
        b"next_page_token=1",
        b"next_page_token=2",
    ]


@pytest.mark.parametrize("page", [[], {"models": None}, {"models": ["a"]}, {"models": [{"name": "a"}]}])
def test_a_list_of_models_of_another_form_is_no_answer(call: Caller, page: object) -> None:
    with pytest.raises(UnreadableAnswer, match="of another form"):
        call(Server(ok(page)), lambda client: client.list_models())


def test_a_description_is_a_list(call: Caller) -> None:
    assert call(Server(ok([{"modelName": "a"}])), lambda client: client.describe("a", "all")) == [
        {"modelName": "a"}
    ]
    with pytest.raises(UnreadableAnswer):
        call(Server(ok({})), lambda client: client.describe("a"))


@pytest.mark.parametrize(
    "address", ["127.0.0.1:8080", "ftp://host", "http://", "http://host:none", "http://host:70000"]
)
def test_an_address_without_its_parts_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"expected http://host:port"):
        Client(address)


def test_a_senseless_time_out_is_refused(call: Caller) -> None:
    with pytest.raises(ValueError, match="expected seconds above 0"):
        call(Server(ok()), lambda client: client.predict("net", timeout_s=0))


@pytest.mark.parametrize("token", ["s3cret\n", "s3cret ", " s3cret", "s3cret s3cret", "s3crét"])
def test_a_token_that_no_header_carries_is_refused_and_kept_secret(token: str) -> None:
    with pytest.raises(ValueError, match="the token holds a line break") as caught:
        Client(token=token)
    assert "s3cret" not in str(caught.value)


def test_data_and_files_exclude_each_other(call: Caller) -> None:
    with pytest.raises(TypeError, match="expected one of them"):
        call(Server(ok()), lambda client: client.predict("net", b"", files={"a": b""}))


def test_both_clients_have_the_same_methods() -> None:
    from torchere.client import AsyncClient

    def public(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(Client) == public(AsyncClient)


def test_a_streamed_inference_comes_as_events(call: Caller) -> None:
    event = b'data: {"outputs": [{"name": "y", "datatype": "INT32", "shape": [1], "data": [%d]}]}\n\n'
    server = Server(httpx.Response(200, content=event % 1 + event % 2 + b": a comment\n\n"))
    parts = call(server, lambda client: client.infer_stream("m", {"x": [1.0]}))
    assert [part["y"].tolist() for part in parts] == [[1], [2]]
    assert server.requests[0].headers["accept"] == "text/event-stream"


def test_a_model_that_fails_midway_is_told(call: Caller) -> None:
    server = Server(httpx.Response(200, content=b'data: {"error": "out of words"}\n\n'))
    with pytest.raises(ModelFailed, match="out of words"):
        call(server, lambda client: client.infer_stream("m", {"x": [1.0]}))


def test_the_parts_before_a_failure_are_given() -> None:
    event = b'data: {"outputs": []}\n\ndata: {"error": "out of words"}\n\n'
    with Client(transport=httpx.MockTransport(Server(httpx.Response(200, content=event)))) as client:
        parts = client.infer_stream("m", {"x": [1.0]})
        assert next(parts).tensors == ()
        with pytest.raises(ModelFailed, match="out of words"):
            next(parts)


@pytest.mark.parametrize("content", [b"Once upon", b"Once\n\nupon", b"data: {"])
def test_what_is_no_event_stream_is_not_passed_over(call: Caller, content: bytes) -> None:
    server = Server(httpx.Response(200, content=content))
    with pytest.raises(UnreadableAnswer, match="expected server-sent events, found b'"):
        call(server, lambda client: client.infer_stream("m", {"x": [1.0]}))


@pytest.mark.parametrize("size_bytes", [1, 2, 7, 22, 1000])
def test_events_may_be_cut_anywhere(size_bytes: int) -> None:
    sent = b'data: {"outputs": [], "id": "1"}\n\n: a comment\n\n\n\ndata: {"outputs": [], "id": "2"}\n\n'
    events = Events()
    parts = [sent[start : start + size_bytes] for start in range(0, len(sent), size_bytes)]
    assert [result.id for part in parts for result in events.feed(part)] == ["1", "2"]


def test_a_client_without_httpx_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    monkeypatch.delitem(sys.modules, "torchere.client.client")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'torchere\[client\]'") as refused:
        torchere.client.Client  # noqa: B018
    assert refused.value.name == "httpx"
