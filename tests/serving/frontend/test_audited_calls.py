"""Which calls are audited, over REST and gRPC, and with which outcome."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from torchere.serving.access.keys import KeyFileUnwritable
from torchere.serving.config.server_settings import Address, ServerSettings
from torchere.serving.errors import LoadFailed, ModelNotFound, UnregisterTimeout
from torchere.serving.frontend.call_scope import changed, manages
from torchere.serving.frontend.control import ControlPlane
from torchere.serving.frontend.grpc.protos import management_pb2, open_inference_pb2
from torchere.serving.frontend.grpc.server import inference_server, management_server
from torchere.serving.frontend.rest.server import RestServer, listener_of

MANAGEMENT = "/org.pytorch.serve.grpc.management.ManagementAPIsService"
REPOSITORY = "/inference.GRPCInferenceService"
FIELDS = ("identity", "address", "transport", "action", "model", "version", "outcome", "status")


@pytest.fixture
def audited(caplog):
    """The audited calls so far, as tuples of `FIELDS`."""
    caplog.set_level(logging.ERROR)  # which does not leave out the audit
    caplog.handler.setLevel(logging.NOTSET)
    return lambda: [
        tuple(vars(record)[name] for name in FIELDS)
        for record in caplog.records
        if record.name == "AUDIT_LOG"
    ]


@pytest.mark.parametrize(
    "case",
    [
        ("POST", "/models?url=echo.mar", "register", "", ""),
        ("PUT", "/models/echo?min_worker=2", "scale", "echo", ""),
        ("DELETE", "/models/echo/1.0", "unregister", "echo", "1.0"),
        ("PUT", "/models/echo/1.0/set-default", "set-default", "echo", "1.0"),
        ("DELETE", "/models/echo/1.0/quarantine", "lift-quarantine", "echo", "1.0"),
        ("DELETE", "/models/echo/1.0/quarantine/d1", "lift-quarantine", "echo", "1.0"),
        ("POST", "/v2/repository/models/echo/load", "load", "echo", ""),
        ("POST", "/v2/repository/models/echo/unload", "unload", "echo", ""),
    ],
)
def test_a_change_over_rest_is_audited_with_its_identity(ask, planes, audited, case):
    method, target, action, model, version = case
    key = {"keys": planes.keys, "authorization": "Bearer management"}
    assert ask("management", method, target, **key).status == 200
    expected = ("management client", "127.0.0.1", "rest", action, model, version, "done", 200)
    assert audited() == [expected]


def test_a_change_of_a_log_level_names_the_logger_and_the_level(ask, audited, caplog):
    for query in ("logger=torchere.serving&level=debug", "level=LOUD", "logger=asyncio&level=NOTSET"):
        ask("management", "PUT", f"/log-level?{query}")
    assert [call[3:] for call in audited()] == [
        ("set-log-level", "", "", "done", 200),
        ("set-log-level", "", "", "failed", 400),
        ("set-log-level", "", "", "done", 200),
    ]
    records = [record for record in caplog.records if record.name == "AUDIT_LOG"]
    changes = ["torchere.serving=DEBUG", "root=LOUD", "asyncio=NOTSET"]
    assert [vars(record)["change"] for record in records] == changes
    assert records[0].getMessage() == "set-log-level torchere.serving=DEBUG by 127.0.0.1: done"


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("GET", "/models"),
        ("GET", "/models/echo"),
        ("GET", "/models/echo/1.0/quarantine"),
        ("GET", "/log-level"),
        ("POST", "/v2/repository/index"),
        ("OPTIONS", "/models/echo"),
        ("GET", "/readyz"),
    ],
)
def test_a_call_that_reads_is_not_audited(ask, audited, method, target):
    assert ask("management", method, target).status == 200
    assert audited() == []


def test_a_preflight_is_no_call_for_the_audit(ask_listener, planes, audited):
    asks = {"origin": "https://a.example", "access_control_request_method": "GET"}
    services = planes.services(keys=planes.keys, cors_allowed_origin="https://a.example")
    for headers, status, outcomes in ((asks, 204, []), ({}, 400, ["refused"])):
        listener = listener_of(frozenset({"management"}), planes.data, planes.control, services)
        asked = ask_listener(listener, "OPTIONS", "/token?type=management", **headers)
        assert asyncio.run(asked).status == status
        assert [call[6] for call in audited()] == outcomes


def test_refused_calls_are_audited_without_an_identity(ask, planes, audited):
    for headers in ({}, {"authorization": "Bearer inference"}):
        assert ask("management", "DELETE", "/models/echo", keys=planes.keys, **headers).status == 400
    assert ask("management", "DELETE", "/models/echo", origin="http://evil.example").status == 403
    refused = ("", "127.0.0.1", "rest", "unregister", "echo", "", "refused")
    assert audited() == [(*refused, 400), (*refused, 400), (*refused, 403)]


def test_calls_that_fail_or_that_the_server_does_not_take_are_audited(ask, planes, audited):
    planes.control.error = ModelNotFound.named("other")
    ask("management", "PUT", "/models/other")
    planes.control.error = None
    planes.control.model_api_off = True
    ask("management", "POST", "/models?url=echo.mar")
    assert audited() == [
        ("", "127.0.0.1", "rest", "scale", "other", "", "failed", 404),
        ("", "127.0.0.1", "rest", "register", "", "", "refused", 405),
    ]


def test_changes_of_workflows_are_audited(ask, audited):
    ask("management", "POST", "/workflows?url=graph.war")
    ask("management", "DELETE", "/workflows/graph/")
    common = ("", "127.0.0.1", "rest")
    assert [call[:6] for call in audited()] == [
        (*common, "register-workflow", "graph.war", ""),
        (*common, "unregister-workflow", "graph", ""),
    ]
    assert {call[6] for call in audited()} == {"failed"}


@pytest.mark.parametrize("call", ["models", "workflows"])
def test_a_refused_url_is_audited_without_user_password_and_query(ask, planes, audited, monkeypatch, call):
    async def register(wanted):
        raise ModelNotFound.named("echo")

    registry: Any = SimpleNamespace(register=register)
    control = ControlPlane(registry, planes.data, ServerSettings(model_api_enabled=True))
    monkeypatch.setattr(planes.control, "register", control.register)
    monkeypatch.setattr(planes.control.workflows, "known", registry)
    url = "https://user:password@models.example/echo.mar%3FX-Amz-Signature=0f"
    assert ask("management", "POST", f"/{call}?url={url}").status == 404
    assert [one[4] for one in audited()] == ["https://models.example/echo.mar"]


@pytest.mark.parametrize("case", [("api", "done", 200), ("other", "refused", 400)])
def test_renewals_of_keys_are_audited(ask, planes, audited, case):
    key, outcome, status = case
    ask("management", "GET", "/token?type=inference", keys=planes.keys, authorization=f"Bearer {key}")
    assert audited() == [("", "127.0.0.1", "rest", "renew-token", "", "", outcome, status)]


CALLS = {
    "RegisterModel": (management_pb2.RegisterModelRequest(url="echo.mar", model_name="echo"), "register", ""),
    "ScaleWorker": (management_pb2.ScaleWorkerRequest(model_name="echo"), "scale", ""),
    "SetDefault": (
        management_pb2.SetDefaultRequest(model_name="echo", model_version="1.0"),
        "set-default",
        "1.0",
    ),
    "UnregisterModel": (management_pb2.UnregisterModelRequest(model_name="echo"), "unregister", ""),
}


def code_of(planes, start, path, request, *, address=None, **settings):
    """Name of the status code of one call to a fresh server."""
    metadata = settings.pop("metadata", ())

    async def main():
        services = planes.services(**settings)
        server = start(planes.data, planes.control, services, address or Address("127.0.0.1", 0))
        bound = await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{bound.port}") as channel:
                call: Any = channel.unary_unary(path, lambda message: message.SerializeToString(), bytes)
                await call(request, metadata=metadata, timeout=20)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        finally:
            await server.stop(1)
        return "OK"

    return asyncio.run(main())


@pytest.mark.parametrize("method", CALLS)
def test_a_change_over_grpc_is_audited_with_its_identity(planes, audited, method):
    request, action, version = CALLS[method]
    key = {"keys": planes.keys, "metadata": (("authorization", "Bearer management"),)}
    assert code_of(planes, management_server, f"{MANAGEMENT}/{method}", request, **key) == "OK"
    assert audited() == [("management client", "127.0.0.1", "grpc", action, "echo", version, "done", "OK")]


def test_refused_and_failed_calls_over_grpc_are_audited(planes, audited):
    path, request = f"{MANAGEMENT}/UnregisterModel", management_pb2.UnregisterModelRequest(model_name="echo")
    code_of(planes, management_server, path, request, keys=planes.keys)
    planes.control.error = ModelNotFound.named("echo")
    code_of(planes, management_server, path, request)
    planes.control.error = LoadFailed("no")
    code_of(planes, management_server, f"{MANAGEMENT}/ScaleWorker", CALLS["ScaleWorker"][0])
    assert audited() == [
        ("", "127.0.0.1", "grpc", "unregister", "", "", "refused", "PERMISSION_DENIED"),
        ("", "127.0.0.1", "grpc", "unregister", "echo", "", "failed", "NOT_FOUND"),
        ("", "127.0.0.1", "grpc", "scale", "echo", "", "failed", "INTERNAL"),
    ]


@pytest.mark.parametrize("verb", ["Load", "Unload"])
def test_failed_calls_of_kserves_stubs_are_audited_with_the_model(planes, audited, verb):
    asked = getattr(open_inference_pb2, f"RepositoryModel{verb}Request")(repository_name="bert")
    if verb == "Load":
        asked.parameters["initial_workers"].string_param = "two"
    code = code_of(planes, inference_server, f"{REPOSITORY}/RepositoryModel{verb}", asked)
    wanted = "INVALID_ARGUMENT" if verb == "Load" else "NOT_FOUND"
    assert code == wanted
    assert audited() == [("", "127.0.0.1", "grpc", verb.lower(), "bert", "", "failed", wanted)]


@pytest.mark.parametrize("message", [b"\xff", b"\x0a\xff\xff\xff\xff\x0f"])
def test_a_change_over_grpc_whose_message_can_not_be_decoded_is_audited(planes, audited, message):
    raw = SimpleNamespace(SerializeToString=lambda: message)
    key = {"keys": planes.keys, "metadata": (("authorization", "Bearer management"),)}
    assert code_of(planes, management_server, f"{MANAGEMENT}/RegisterModel", raw, **key) == "INTERNAL"
    assert code_of(planes, management_server, f"{MANAGEMENT}/DescribeModel", raw, **key) == "INTERNAL"
    expected = ("management client", "127.0.0.1", "grpc", "register", "", "", "failed", "INTERNAL")
    assert audited() == [expected]


@pytest.mark.parametrize(("takes_effect", "outcome"), [(True, "done"), (False, "failed")])
@pytest.mark.parametrize(("ended_by", "code"), [("its client", "CANCELLED"), ("a stop", "UNAVAILABLE")])
def test_a_change_in_effect_is_done_though_its_call_is_ended(
    planes, audited, monkeypatch, *, takes_effect, outcome, ended_by, code
):
    begun = asyncio.Event()

    async def unregister(model, version):
        if takes_effect:
            changed()
        begun.set()
        await asyncio.Event().wait()

    async def main():
        server = management_server(planes.data, planes.control, planes.services(), Address("127.0.0.1", 0))
        bound = await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{bound.port}") as channel:
            path, request = f"{MANAGEMENT}/UnregisterModel", CALLS["UnregisterModel"][0]
            begin: Any = channel.unary_unary(path, lambda message: message.SerializeToString(), bytes)
            call = begin(request)
            await begun.wait()
            if ended_by == "its client":
                call.cancel()
            await server.stop(1 if ended_by == "its client" else 0.05)

    monkeypatch.setattr(planes.control, "unregister", unregister)
    asyncio.run(main())
    assert audited() == [("", "127.0.0.1", "grpc", "unregister", "echo", "", outcome, code)]


async def cut_off(planes, asked, begun):
    """What a server answers that stops once this call has begun."""
    listener = listener_of(frozenset({"management"}), planes.data, planes.control, planes.services())
    server = RestServer(listener, Address("127.0.0.1", 0))
    server.drain_timeout_s = 0.05
    bound = await server.start()
    reader, writer = await asyncio.open_connection(bound.host, bound.port)
    writer.write(asked + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n")
    await begun.wait()
    await server.stop()
    answer = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    return answer


@pytest.mark.parametrize(("takes_effect", "outcome"), [(True, "done"), (False, "failed")])
def test_a_change_over_rest_that_the_stop_of_the_server_cuts_off_is_answered_and_audited(
    planes, audited, monkeypatch, takes_effect, outcome
):
    begun = asyncio.Event()

    async def register(wish, *, synchronous):
        manages("echo", "1.0")
        if takes_effect:
            changed()
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(planes.control, "register", register)
    answer = asyncio.run(cut_off(planes, b"POST /models?url=echo.mar", begun))
    assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert b'"InternalServerException"' in answer  # it may have run: no client may send it again by itself
    assert audited() == [("", "127.0.0.1", "rest", "register", "echo", "1.0", outcome, 503)]


def test_a_change_in_effect_is_done_though_its_answer_is_an_error(ask, planes, audited, monkeypatch):
    async def unregister(model, version):
        changed()
        raise UnregisterTimeout("its requests still run")

    monkeypatch.setattr(planes.control, "unregister", unregister)
    assert ask("management", "DELETE", "/models/echo").status == 408
    code_of(planes, management_server, f"{MANAGEMENT}/UnregisterModel", CALLS["UnregisterModel"][0])
    assert [call[6] for call in audited()] == ["done", "done"]


def test_a_workflow_whose_requests_still_run_is_unregistered(ask, planes, audited, monkeypatch):
    async def unregister(name):
        raise UnregisterTimeout("its requests still run")

    monkeypatch.setattr(planes.control.workflows, "known", SimpleNamespace(unregister=unregister))
    assert ask("management", "DELETE", "/workflows/graph").status == 408
    assert [call[6:] for call in audited()] == [("done", 408)]


def test_a_workflow_is_unregistered_though_the_stop_of_the_server_cuts_off_its_removal(
    planes, audited, monkeypatch
):
    begun = asyncio.Event()

    async def unregister(name):
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(planes.control.workflows, "known", SimpleNamespace(unregister=unregister))
    answer = asyncio.run(cut_off(planes, b"DELETE /workflows/graph", begun))
    assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert [call[6:] for call in audited()] == [("done", 503)]


@pytest.mark.parametrize("is_missing", [True, False])
def test_a_model_of_the_start_that_is_missing_is_unregistered_though_it_is_not_found(
    ask, planes, audited, monkeypatch, is_missing
):
    missing = ["graph", *["echo"] * is_missing]

    async def unregister(model, version):
        if model in missing:
            missing.remove(model)
        raise ModelNotFound.named(model)

    async def written():
        pass

    registry: Any = SimpleNamespace(missing=lambda: tuple(missing), unregister=unregister, written=written)
    control = ControlPlane(registry, planes.data, ServerSettings(model_api_enabled=True))
    monkeypatch.setattr(planes.control, "unregister", control.unregister)
    assert ask("management", "DELETE", "/models/echo").status == 404
    assert [call[6:] for call in audited()] == [("done" if is_missing else "failed", 404)]


def test_a_key_that_can_not_be_written_is_a_failure(ask, planes, audited, monkeypatch):
    def renew(wanted, authorization):
        raise KeyFileUnwritable("the disk is full")

    monkeypatch.setattr(planes.keys, "renew", renew)
    assert ask("management", "GET", "/token?type=inference", keys=planes.keys).status == 500
    assert [call[6:] for call in audited()] == [("failed", 500)]


def test_reads_over_grpc_are_not_audited(planes, audited):
    path = f"{MANAGEMENT}/DescribeModel"
    request = management_pb2.DescribeModelRequest(model_name="echo")
    assert code_of(planes, management_server, path, request) == "OK"
    assert code_of(planes, management_server, path, request, keys=planes.keys) == "PERMISSION_DENIED"
    assert audited() == []


@pytest.mark.parametrize(
    ("host", "settings", "code"),
    [
        ("0.0.0.0", {"token_auth_enabled": False}, "PERMISSION_DENIED"),
        ("0.0.0.0", {"token_auth_enabled": False, "insecure_management": True}, "OK"),
        ("0.0.0.0", {"token_auth_enabled": False, "insecure_management": "local"}, "OK"),
        (
            "0.0.0.0",
            {
                "token_auth_enabled": False,
                "insecure_management": "local",
                "metadata": (("x-forwarded-for", "10.0.0.7"),),
            },
            "PERMISSION_DENIED",
        ),
        ("127.0.0.1", {"token_auth_enabled": False}, "OK"),
    ],
)
def test_beyond_loopback_models_are_not_changed_over_an_inference_port_without_authorization(
    planes, audited, host, settings, code
):
    path = f"{REPOSITORY}/RepositoryModelLoad"
    request = open_inference_pb2.RepositoryModelLoadRequest(model_name="echo")
    address = Address(host, 0)
    assert code_of(planes, inference_server, path, request, address=address, **settings) == code
    (call,) = audited()
    assert call[2:] == (
        *("grpc", "load", "" if code != "OK" else "echo", ""),
        *("refused" if code != "OK" else "done", code),
    )
    assert (
        code_of(
            planes, inference_server, f"{REPOSITORY}/RepositoryIndex", request, address=address, **settings
        )
        == "OK"
    )
