"""Inference by the Open Inference Protocol, over a data plane that answers as a test says."""

import asyncio
import gzip
import json
import threading
from dataclasses import replace

import pytest

from torchere.archiver.signature import Signature, TensorSpec
from torchere.handlers.tensors.answer import IN_JSON, OPEN_INFERENCE, WantedOutput, read_wish
from torchere.serving.errors import HandlerFailed, QueueFull, VersionFailed
from torchere.serving.frontend import budgets
from torchere.serving.frontend.open_inference import json_request
from torchere.serving.frontend.open_inference.generate import generate_request
from torchere.serving.frontend.rest import tensors
from torchere.serving.frontend.rest.server import listener_of
from torchere.serving.frontend.rest.tensors import INLINE_JSON_BYTES
from torchere.serving.frontend.rest.wire import deflate
from torchere.serving.types import InferResponse, StreamedResponse

PATH = "/v2/models/echo/infer"
X = {"name": "x", "shape": [2], "datatype": "INT8", "data": [1, 2]}
JSON_ANSWER = (
    b'{"model_name":"echo","model_version":"1.0",'
    b'"outputs":[{"name":"y","datatype":"INT8","shape":[1],"data":[7]}]}'
)
SIGNATURE = Signature((TensorSpec("x", "INT8", (-1,)),), (TensorSpec("y", "INT8", (-1,)),))


def request(*inputs, **members):
    return json.dumps({"inputs": list(inputs or (X,)), **members}).encode()


@pytest.fixture
def post(planes, ask_listener):
    """`post(body, path, **headers)`: one request to an inference app; `settings` change it.

    The model has a signature; set `planes.data.known` for one without.
    """
    planes.data.known = replace(planes.data.known, signature=SIGNATURE)

    def call(body, path=PATH, settings=None, method="POST", **headers):
        services = planes.services(max_request_bytes=200_000, **(settings or {}))
        app = listener_of(frozenset({"inference"}), planes.data, planes.control, services)
        return asyncio.run(ask_listener(app, method, path, body, **headers))

    return call


def answers(planes, outcome):
    async def behave(request):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    planes.data.behave = behave


def test_tensors_reach_the_model_and_its_answer_goes_out_as_it_is(post, planes):
    body = b'{"a":1}binary'
    headers = (("content-type", "application/octet-stream"), ("inference-header-content-length", "7"))
    answers(planes, InferResponse(body, headers))
    answer = post(request(id="7"), x_own="1")
    assert (answer.status, answer.body) == (200, body)
    assert answer.headers["inference-header-content-length"] == "7"
    model, version, asked = planes.data.asked[0]
    assert (model, version) == ("echo", None)
    assert [(p.name, p.value) for p in asked.parameters] == [("x", b"\1\2")]
    received = dict(asked.headers)
    assert received["x-own"] == "1"
    assert received["explain"] == "False"
    assert read_wish(received[OPEN_INFERENCE]).id == "7"


def test_a_version_may_be_named(post, planes):
    assert post(request(), "/v2/models/echo/versions/1.0/infer").status == 200
    assert planes.data.asked[0][1] == "1.0"
    answer = post(request(), "/v2/models/echo/versions/9/infer")
    assert (answer.status, answer.json["error"]) == (404, "Model version: 9 does not exist for model: echo")


def test_a_binary_body_says_how_much_of_it_is_json(post, planes):
    head = json.dumps({"inputs": [{**X, "data": None, "parameters": {"binary_data_size": 2}}]}).replace(
        ', "data": null', ""
    )
    assert post(head.encode() + b"\5\6", inference_header_content_length=str(len(head))).status == 200
    assert planes.data.asked[0][2].parameters[0].value == b"\5\6"


def test_a_body_without_json_is_the_only_input(post, planes):
    for raw in (b"\5\6", b"\7", b"\5\6"):
        answer = post(raw, inference_header_content_length="0")
        assert answer.status == 200, answer.body
        (tensor,) = planes.data.asked.pop()[2].parameters
        assert (tensor.name, tensor.value) == ("x", raw)
        assert tensor.content_type.endswith(f"shape={len(raw)}")
    planes.data.known = replace(planes.data.known, signature=None)
    answer = post(b"\5", inference_header_content_length="0")
    assert (answer.status, answer.json["error"][:41]) == (400, "Inference-Header-Content-Length: found 0,")


@pytest.mark.parametrize("length", ["-1", "x", "1e3", "9" * 30, ""])
def test_a_length_that_is_none_is_refused(post, length):
    answer = post(request(), inference_header_content_length=length)
    assert answer.status == 400
    assert answer.json["error"].startswith("Inference-Header-Content-Length: found ")


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_a_compressed_body_is_inflated(post, planes, coding):
    assert post(deflate(request(id="7"), coding), content_encoding=coding).status == 200
    assert planes.data.asked[0][2].parameters[0].value == b"\1\2"
    assert post(request(), content_encoding="identity").status == 200


def test_of_a_compressed_body_the_inflated_one_is_measured(post, planes):
    tensor = {"name": "x", "shape": [2], "datatype": "INT8", "parameters": {"binary_data_size": 2}}
    head = request(tensor)
    length = str(len(head))
    body = deflate(head + b"\5\6", "gzip")
    assert post(body, content_encoding="gzip", inference_header_content_length=length).status == 200
    assert planes.data.asked[0][2].parameters[0].value == b"\5\6"


@pytest.mark.parametrize(
    ("body", "coding", "refused"),
    [
        (b"\x1f\x8b", "gzip", (400, "Content-Encoding: found a body that is no gzip")),
        (b"", "br", (415, "Content-Encoding: found 'br', expected one of gzip, deflate")),
        (
            deflate(bytes(200_001), "gzip"),
            "gzip",
            (413, "the body inflates to more than max_request_size=20000"),
        ),
    ],
)
def test_a_body_that_can_not_be_inflated_is_refused(post, planes, body, coding, refused):
    status, text = refused
    answer = post(body, content_encoding=coding)
    assert answer.status == status
    assert answer.json["error"].startswith(text)
    assert answer.headers.get("accept-encoding") == ("gzip, deflate" if status == 415 else None)
    assert planes.data.asked == []


@pytest.mark.usefixtures("no_thread")
def test_a_long_body_for_which_no_thread_can_be_started_fails_and_holds_nothing(post, planes):
    held = budgets.Budgets()
    body = deflate(request({**X, "shape": [50_000], "data": [1] * 50_000}), "gzip")
    assert post(body, settings={"budgets": held}, content_encoding="gzip").status == 500
    assert (planes.data.asked, held.held_bytes) == ([], 0)


def test_a_handler_that_reads_json_itself_gets_it_inflated(post, planes):
    planes.data.known = replace(planes.data.known, signature=None)
    post(deflate(b"[1]", "gzip"), content_encoding="gzip", x_own="1")
    asked = planes.data.asked[0][2]
    assert asked.parameters[0].value == b"[1]"
    assert dict(asked.headers).keys() & {"x-own", "content-encoding"} == {"x-own"}


def test_an_answer_is_compressed_for_those_who_ask_for_it(post, planes):
    long = JSON_ANSWER.replace(b"[7]", b"[%b]" % b",".join([b"7"] * 200))
    answers(planes, InferResponse(long, (("content-type", "application/json"),)))
    answer = post(request(), accept_encoding="gzip")
    assert gzip.decompress(answer.body) == long
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.headers["content-length"] == str(len(answer.body))
    plain = post(request(), accept_encoding="gzip, deflate, br")
    assert (plain.body, plain.headers.get("content-encoding")) == (long, None)


def test_what_compressing_makes_longer_goes_as_it_is(post, planes):
    answers(planes, InferResponse(b"{}", (("content-type", "application/json"),)))
    answer = post(request(), accept_encoding="deflate")
    assert (answer.body, answer.headers.get("content-encoding")) == (b"{}", None)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (request({**X, "shape": [3]}), "inputs[0].data: found 2 elements, expected 3 for shape [3]"),
        (request({**X, "datatype": "INT9"}), "inputs[0].datatype: found 'INT9'"),
        (request(X, X), "inputs[1].name: found 'x'"),
        (request({"name": "x", "shape": [1]}), "inputs[0]: Object missing required field `datatype`"),
    ],
)
def test_a_bad_request_never_reaches_the_model(post, planes, body, text):
    answer = post(body)
    assert answer.status == 400
    assert answer.json["error"].startswith(text)
    assert list(answer.json) == ["error", "type"]
    assert planes.data.asked == []


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'{"a": 1}', b'{"inputs": []}', b'{"inputs": [{"b64": ""}]}', request()]
)
def test_without_a_signature_json_is_for_the_handler_as_torchserve_has_it(post, planes, body):
    planes.data.known = replace(planes.data.known, signature=None)
    assert post(body).body == body
    assert planes.data.asked[0][2].parameters[0].name == "body"
    answers(planes, HandlerFailed())
    assert (post(body).status, post(body).json["type"]) == (503, "InternalServerException")


def test_without_a_signature_what_torchserve_does_not_know_is_translated(post, planes):
    planes.data.known = replace(planes.data.known, signature=None)
    head = request()
    post(head, inference_header_content_length=str(len(head)))
    post(head, "/v2/models/echo/versions/1.0/infer")
    assert [asked[2].parameters[0].name for asked in planes.data.asked] == ["x", "x"]


def test_a_model_with_a_signature_takes_nothing_else(post, planes):
    assert post(b'{"a": 1}').json["error"].startswith("the request: Object missing required field `inputs`")
    assert post(b'{"inputs": []}').json["error"] == "inputs: found none, expected 'x' too"
    assert (
        post(request({**X, "name": "z"}))
        .json["error"]
        .startswith("inputs[0].name: found 'z', expected one of 'x'")
    )
    assert planes.data.asked == []


@pytest.mark.parametrize(
    ("body", "members"), [(request(), {"error", "type"}), (b'{"a": 1}', {"code", "type", "message", "error"})]
)
def test_an_unknown_model_is_told_in_the_clients_protocol(post, body, members):
    answer = post(body, "/v2/models/none/infer")
    assert answer.status == 404
    assert set(answer.json) == members


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", PATH), ("POST", "/v2/models/none/infer"), ("PUT", "/v2/health"), ("PUT", "/v2/models/stats")],
)
def test_all_errors_of_the_protocols_paths_have_the_member_that_its_clients_read(post, planes, method, path):
    planes.data.known = replace(planes.data.known, signature=None)
    answers(planes, HandlerFailed("not so", 503))
    answer = post(b'{"inputs": 1}', path, method=method)
    assert answer.status >= 400
    assert answer.json["error"] == answer.json["message"]


def test_errors_of_other_paths_have_torchserves_members_only(post, planes):
    answers(planes, HandlerFailed("not so", 503))
    for path in ("/predictions/echo", "/v20", "/v1/models/none:predict"):
        assert set(post(b"{}", path).json) == {"code", "type", "message"}


def test_a_model_that_is_not_there_yet_is_503_and_refusals_are_counted(post, planes):
    paths = ("/v2/models/none/infer", "/v2/models/none/generate", "/v2/models/echo/versions/9/infer")
    assert [post(request(), path).status for path in paths] == [404] * 3
    planes.data.has_started = False
    assert [post(request(), path).status for path in paths] == [503] * 3
    assert len(planes.data.unknown) == 6


def test_of_an_unknown_model_a_long_body_is_not_read(post, monkeypatch):
    monkeypatch.setattr(tensors, "looks_like_request", None)
    answer = post(request({**X, "data": [1] * INLINE_JSON_BYTES}), "/v2/models/none/infer")
    assert (answer.status, answer.json["error"]) == (404, "Model not found: none")
    answer = post(b"[" + b"[]," * INLINE_JSON_BYTES + b"[]]", "/v2/models/none/infer")
    assert (answer.status, answer.json["type"]) == (404, "ModelNotFoundException")


def test_behind_an_envelope_the_body_is_the_handlers(post, planes):
    body = request(id="7")
    assert post(body, settings={"service_envelope": "kservev2"}).body == body
    asked = planes.data.asked[0][2]
    assert [(p.name, p.value) for p in asked.parameters] == [("body", body)]


@pytest.mark.parametrize("binary", [False, True])
def test_behind_an_envelope_the_worker_translates_binary_tensors(post, planes, binary):
    answers(planes, InferResponse(JSON_ANSWER, (("content-type", "application/json"),)))
    wanted = {"name": "y", "parameters": {"binary_data": binary}}
    head = json.dumps({"id": "7", "inputs": [X], "outputs": [wanted]})
    keys = {"service_envelope": "kservev2"}
    answer = post(head.encode(), settings=keys, inference_header_content_length=str(len(head)))
    assert (answer.body, answer.headers["content-type"]) == (JSON_ANSWER, "application/json")
    asked = planes.data.asked[0][2]
    assert [parameter.name for parameter in asked.parameters] == ["x"]
    wish = read_wish(dict(asked.headers)[IN_JSON])
    assert (wish.id, wish.outputs, wish.json_bytes_as) == ("7", (WantedOutput("y", binary),), "text")


@pytest.mark.parametrize("handler", ["tensor", "text_embedding", "sequence_classifier", "voice_activity"])
def test_a_handler_that_reads_tensors_needs_no_envelope_taken_off(post, planes, handler):
    planes.data.known = replace(planes.data.known, handler=handler)
    assert post(request(), settings={"service_envelope": "kserve"}).status == 200
    assert planes.data.asked[0][2].parameters[0].name == "x"


def test_with_the_switch_off_a_request_is_a_body(post, planes):
    off = {"open_inference_protocol": False}
    assert post(request(), settings=off).body == request()
    assert post(request(), "/v2/models/echo/generate", settings=off).status == 404


FAILED = VersionFailed('Model "echo" has no worker', "why", "echo", "1.0")


@pytest.mark.parametrize(
    ("outcome", "status", "text"),
    [
        (HandlerFailed(), 500, "Prediction failed"),
        (HandlerFailed("busy", 503), 503, "busy"),
        (QueueFull("no room", 3.0), 503, "no room"),
        (FAILED, 503, FAILED.plain),
        (InferResponse(b'{"message": "no"}', status=422), 422, "no"),
    ],
)
def test_failures_are_told_in_the_protocols_words(post, planes, outcome, status, text):
    answers(planes, outcome)
    answer = post(request())
    assert (answer.status, answer.json["error"]) == (status, text)
    assert ("retry-after" in answer.headers) is isinstance(outcome, QueueFull)


def streamed(*parts):
    async def chunks():
        for part in parts:
            if isinstance(part, Exception):
                raise part
            yield part

    return StreamedResponse(InferResponse(parts[0] if isinstance(parts[0], bytes) else b""), chunks())


def test_a_stream_is_sent_as_events(post, planes):
    answers(planes, streamed(b'{"outputs":1}', b'{"outputs":2}'))
    outputs = [{"name": "y", "parameters": {"binary_data": True}}]
    answer = post(
        request(outputs=outputs, parameters={"binary_data_output": True}), accept="text/event-stream"
    )
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.chunks == [b'data: {"outputs":1}\n\n', b'data: {"outputs":2}\n\n', b""]
    wish = read_wish(dict(planes.data.asked[0][2].headers)[OPEN_INFERENCE])
    assert (wish.binary, wish.outputs[0].binary) == (False, False)


def test_an_answer_in_one_piece_is_one_event(post, planes):
    answers(planes, InferResponse(b"{}"))
    assert post(request(), accept="text/event-stream").body == b"data: {}\n\n"


def test_an_error_amid_a_stream_is_the_last_event(post, planes):
    answers(planes, streamed(b"{}", HandlerFailed("gone", 500)))
    answer = post(request(), accept="text/event-stream")
    assert answer.chunks == [
        b"data: {}\n\n",
        b'data: {"error":"gone","type":"InternalServerException"}\n\n',
        b"",
    ]
    answers(planes, streamed(HandlerFailed("gone", 500)))
    assert post(request(), accept="text/event-stream").json["error"] == "gone"


def test_a_stream_has_to_be_asked_for(post, planes):
    answers(planes, streamed(b"{}"))
    answer = post(request())
    assert answer.status == 400
    assert "Accept: text/event-stream" in answer.json["error"]


def test_generate_has_plain_members(post, planes):
    planes.data.known = replace(planes.data.known, signature=None)
    answers(planes, InferResponse(JSON_ANSWER))
    answer = post(b'{"text": "hi", "parameters": {"k": 1}}', "/v2/models/echo/generate")
    assert answer.json == {"model_name": "echo", "model_version": "1.0", "y": 7}
    assert planes.data.asked[0][2].parameters[0].name == "text"
    answer = post(b'{"text": "hi"}', "/v2/models/echo/versions/1.0/generate_stream")
    assert answer.body == b'data: {"model_name":"echo","model_version":"1.0","y":7}\n\n'
    assert post(b"[]", "/v2/models/echo/generate").json["error"].startswith("the request: found no object")


NOT_THE_PROTOCOL = "The handler's answer is none of the Open Inference Protocol."


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    "body", [b'{"predictions":[1]}', b'{"outputs":[1]}', b'{"outputs":[{"name":"y","data":1}]}', b"[", b"1"]
)
def test_an_answer_that_is_none_of_the_protocol_is_the_handlers_failure(post, planes, verb, body, caplog):
    answers(planes, InferResponse(body))
    answer = post(b'{"x": [1]}', f"/v2/models/echo/{verb}")
    assert (answer.status, answer.json["error"]) == (500, NOT_THE_PROTOCOL)
    assert caplog.text == ""


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
def test_a_stream_that_is_answered_with_an_error_is_withdrawn(post, planes, verb):
    answers(planes, streamed(b"no", JSON_ANSWER))
    assert post(b'{"x": [1]}', f"/v2/models/echo/{verb}").status == 500
    assert planes.data.given_up == 1


def test_a_part_that_is_none_of_the_protocol_is_the_last_event(post, planes):
    answers(planes, streamed(JSON_ANSWER, b"no", JSON_ANSWER))
    first, *rest = post(b'{"x": [1]}', "/v2/models/echo/generate_stream").chunks
    assert first.endswith(b'"y":7}\n\n')
    last = b'data: {"error":"%b","type":"InternalServerException"}\n\n' % NOT_THE_PROTOCOL.encode()
    assert rest == [last, b""]


def test_the_parts_of_a_stream_are_joined_by_generate(post, planes):
    planes.data.known = replace(planes.data.known, signature=None)
    parts = [
        json.dumps({"outputs": [{"name": "t", "datatype": "BYTES", "shape": [1], "data": [text]}]}).encode()
        for text in ("a", "b")
    ]
    answers(planes, streamed(*parts))
    assert post(b'{"text": "hi"}', "/v2/models/echo/generate").json == {"t": "ab"}


def test_what_generate_joins_is_held_no_further_than_an_answer_may_go(post, planes):
    taken = []

    async def chunks():
        data = "x" * 2**20
        part = {"outputs": [{"name": "t", "datatype": "BYTES", "shape": [1], "data": [data]}]}
        for number in range(20):
            taken.append(number)
            yield json.dumps(part).encode()

    planes.data.known = replace(planes.data.known, signature=None)
    answers(planes, StreamedResponse(InferResponse(b""), chunks()))
    answer = post(b'{"text": "hi"}', "/v2/models/echo/generate")
    assert answer.status == 500
    assert answer.json["error"] == "The answer has more than max_response_size=6553500 bytes."
    assert len(taken) == 7


def test_a_large_body_is_parsed_off_the_loop(post, planes):
    assert post(request({**X, "shape": [50_000], "data": [1] * 50_000})).status == 200
    assert len(planes.data.asked[0][2].parameters[0].value) == 50_000


def test_a_large_body_of_generate_is_parsed_off_the_loop(post, planes, monkeypatch):
    threads = []

    def noting(*args):
        threads.append(threading.current_thread())
        return generate_request(*args)

    monkeypatch.setattr(tensors, "generate_request", noting)
    answers(planes, InferResponse(JSON_ANSWER))
    body = json.dumps({"x": [1] * INLINE_JSON_BYTES}).encode()
    for text in (body, b'{"x":[1]}'):
        assert post(text, "/v2/models/echo/generate").json["y"] == 7
    assert [thread is threading.main_thread() for thread in threads] == [False, True]


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
def test_a_large_answer_of_generate_is_translated_off_the_loop(post, planes, monkeypatch, verb):
    planes.data.known = replace(planes.data.known, signature=None)
    threads = []

    def noting(parts):
        threads.append(threading.current_thread())
        return generated_text(parts)

    generated_text = tensors._generated_text
    monkeypatch.setattr(tensors, "_generated_text", noting)
    for size, body in ((INLINE_JSON_BYTES, b"["), (INLINE_JSON_BYTES, JSON_ANSWER), (0, JSON_ANSWER)):
        answers(planes, InferResponse(body + b" " * size))
        answer = post(b'{"text": "hi"}', f"/v2/models/echo/{verb}")
        assert (answer.status, b'"y":7' in answer.body) == ((500, False) if body == b"[" else (200, True))
    assert [thread is threading.main_thread() for thread in threads] == [False, False, True]


def test_a_body_over_the_limit_is_refused_as_everywhere(post):
    answer = post(request(X, {**X, "name": "n" * 200_000}))
    assert (answer.status, answer.json["type"]) == (413, "BadRequestException")


@pytest.mark.parametrize("case", [(False, 5000, True), (True, 5000, False), (True, 10, True)])
def test_when_the_turns_of_the_loop_are_over_only_brief_json_is_parsed_on_it(post, planes, monkeypatch, case):
    are_over, size, is_inline = case
    held = budgets.Budgets()
    held.turns.are_over = are_over
    threads = []
    parse = json_request.parse_request

    def watched(*args):
        threads.append(threading.current_thread().name)
        return parse(*args)

    monkeypatch.setattr(tensors, "parse_request", watched)
    answers(planes, InferResponse(b"{}"))
    values = [1] * size
    asked = request({"name": "x", "shape": [size], "datatype": "INT8", "data": values})
    assert post(asked, settings={"budgets": held}).status == 200
    assert planes.data.asked[0][2].parameters[0].value == b"\1" * size
    assert ("asyncio_" not in threads[0]) == is_inline
