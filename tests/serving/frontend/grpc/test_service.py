"""Which calls reach a method, and what the others are told."""

import asyncio
from inspect import iscoroutinefunction
from types import SimpleNamespace
from typing import Any

import pytest

from torchere.serving.frontend.grpc.call import Method
from torchere.serving.frontend.grpc.errors import MANAGEMENT
from torchere.serving.frontend.grpc.management import ManagementService
from torchere.serving.frontend.grpc.open_inference_control import ModelCalls
from torchere.serving.frontend.grpc.service import dispatcher, opener
from torchere.serving.frontend.http2.header_blocks import request_head
from torchere.serving.frontend.http2.messages import MessageFailed, StatusCode
from torchere.serving.telemetry.metrics import Metrics

PATH = "/test.Service/echo"
OPENED: Any = object()
METRICS = Metrics()


class FakeStream:
    """Keeps how it was answered."""

    def __init__(self, **changed):
        headers = {":method": "POST", ":path": PATH, "content-type": "application/grpc"} | {
            (name if name == "path" else name.replace("_", "-")): value for name, value in changed.items()
        }
        method = headers.pop("method", None)
        if method is not None:
            headers[":method"] = method
        path = headers.pop("path", None)
        if path is not None:
            headers[":path"] = path
        self.head, _ = request_head(headers.items())
        self.answered = None
        self.client = ("10.0.0.7", 4321)
        self.caller = ""
        self.subjects = ()

    def refuse(self, code, message, details=b"", *, http_status=200):
        self.answered = (code, message) if http_status == 200 else (http_status, code, message)

    def restrict(self, limit_bytes):
        self.limit_bytes = limit_bytes


def opened(keys=None, kind="inference", metrics=METRICS, **changed):
    stream: Any = FakeStream(**changed)
    receiver = dispatcher({PATH: lambda stream: OPENED}, keys, kind, metrics)(stream)
    return "opened" if receiver is OPENED else stream.answered


@pytest.mark.parametrize(
    "content_type", ["application/grpc", "application/grpc+proto", "application/grpc;charset=utf-8"]
)
def test_a_call_of_a_method_that_is_there_is_opened(content_type):
    assert opened(content_type=content_type) == "opened"


@pytest.mark.parametrize(
    "content_type", ["", "application/json", "application/grpc-web", "application/grpcx"]
)
def test_what_is_no_grpc_gets_415(content_type):
    assert opened(content_type=content_type) == (
        415,
        13,
        f"content-type: found {content_type!r}, expected application/grpc",
    )


@pytest.mark.parametrize("method", ["GET", "PUT", ""])
def test_what_is_no_post_gets_405(method):
    assert opened(method=method) == (405, 13, "expected POST")


def test_a_method_that_is_not_there_is_unimplemented():
    assert opened(path="/test.Service/nothing") == (12, "Method not found!")


def test_a_flaw_of_its_head_ends_a_call():
    assert opened(grpc_timeout="soon")[0] == 13


def test_without_its_key_a_call_is_not_opened(planes):
    refused = opened(planes.keys)
    assert refused[0] == 7
    assert opened(planes.keys, path="/test.Service/nothing") == refused
    assert opened(planes.keys, authorization="Bearer inference") == "opened"


@pytest.mark.parametrize(
    ("path", "key", "code"),
    [
        ("/grpc.health.v1.Health/Check", "none", 12),
        ("/grpc.health.v1.Healthy/Check", "none", 7),
        ("/inference.GRPCInferenceService/RepositoryModelLoad", "inference", 7),
        ("/inference.GRPCInferenceService/RepositoryModelLoad", "management", 12),
        ("/inference.GRPCInferenceService/ModelInfer", "management", 7),
        ("/inference.GRPCInferenceService/ModelInfer", "inference", 12),
    ],
)
def test_probes_need_no_key_and_what_operators_call_needs_the_other_one(planes, path, key, code):
    assert opened(planes.keys, path=path, authorization=f"Bearer {key}")[0] == code


@pytest.mark.parametrize(
    ("path", "keys", "caller"),
    [
        (PATH, True, "inference client"),
        (PATH, False, "10.0.0.7"),
        ("/grpc.health.v1.Health/Check", True, "10.0.0.7"),
    ],
)
def test_the_identity_names_the_caller_and_where_no_key_is_asked_for_the_address_does(
    planes, path, keys, caller
):
    stream: Any = FakeStream(path=path, authorization="Bearer inference")
    dispatcher({path: lambda stream: OPENED}, planes.keys if keys else None, "inference", METRICS)(stream)
    assert stream.caller == caller
    assert hasattr(stream, "limit_bytes") == ("Health" in path)  # short messages only, without a key


def test_calls_without_their_key_are_counted(planes):
    for authorization in ("", "Bearer management", "Bearer inference"):
        opened(planes.keys, metrics=planes.metrics, authorization=authorization)
    found = planes.metrics.exposition({"torchere_requests_rejected_total"})
    assert 'rejected_total{model="",version="",reason="auth",} 2.0' in found


def test_what_still_comes_of_a_call_that_was_refused_is_passed_over():
    stream: Any = SimpleNamespace(head=request_head([])[0], refuse=lambda *told, **how: None)
    receiver: Any = dispatcher({}, None, "inference", METRICS)(stream)
    told = [
        receiver.on_message(b"m"),
        receiver.on_half_close(),
        receiver.on_failure(MessageFailed(StatusCode.INTERNAL, "no")),
    ]
    assert [*told, receiver.on_cancel(), receiver.on_drain(is_stop=True)] == [None] * 5


def test_a_plain_function_answers_within_the_half_close_and_without_a_task():
    answered: list[object] = []
    head, _ = request_head([])
    stream: Any = SimpleNamespace(head=head, timeout_s=None, client=None, caller="", ended=False)
    stream.consumed_all = lambda: None
    stream.key_free = True
    stream.answer = answered.append
    tasks: set[asyncio.Task[object]] = set()
    decode: Any = bytes.decode
    method = Method("test.Service/echo", MANAGEMENT, decode, str.encode, tasks, METRICS)
    call = opener(lambda request, call: request.upper(), method, streams_in=False, streams_out=False)(stream)
    call.on_message(b"word")
    call.on_half_close()
    assert (answered, tasks) == ([b"WORD"], set())


def test_questions_about_server_and_models_need_no_task(planes):
    methods = {
        **ModelCalls(planes.data, planes.control, unknown_is_unready=True).methods(),
        **ManagementService(planes.control).methods(),
    }
    waiting = {name for name, implementation in methods.items() if iscoroutinefunction(implementation)}
    assert waiting == {
        *("RepositoryModelLoad", "RepositoryModelUnload"),
        *("DescribeModel", "RegisterModel", "ScaleWorker", "SetDefault", "UnregisterModel"),
    }
