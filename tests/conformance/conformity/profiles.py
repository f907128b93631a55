"""The server configurations under which the generated corpus is sent, and what is sent under each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from conformity.corpus_bodies import body_cases, query_cases
from conformity.corpus_grpc import grpc_cases
from conformity.corpus_handlers import handler_cases
from conformity.corpus_management import management_cases, odd_registrations
from conformity.corpus_routes import route_cases
from conformity.corpus_stateful import stateful_cases
from conformity.corpus_wire import wire_cases
from conformity.rest import Case
from conformity.servers import FLAGS

Record = dict[str, Any]
BASE = """default_workers_per_model=1
job_queue_size=100
default_response_timeout=5
max_request_size=1048576
max_response_size=1048576
metrics_mode=prometheus
"""
JSON = {"Content-Type": "application/json"}
OCTETS = {"Content-Type": "application/octet-stream"}
# What each of TorchServe's envelopes expects, and the same with something missing.
ENVELOPE_BODIES = {
    "instances": b'{"instances": [{"data": 1}, {"data": 2}]}',
    "no instances": b'{"instances": []}',
    "inputs": b'{"id": "7", "inputs": [{"name": "i", "shape": [2], "datatype": "FP32", "data": [1.5, 2.5]}]}',
    "inputs without an id": b'{"inputs": [{"name": "i", "shape": [1], "datatype": "INT64", "data": [1]}]}',
    "neither": b'{"a": 1}',
    "a list": b"[1, 2]",
    "no JSON": b"{",
    "nothing": b"",
}
ENVELOPE_PATHS = (
    "/predictions/probe",
    "/v1/models/probe:predict",
    "/v1/models/probe:explain",
    "/v2/models/probe/infer",
    "/v2/models/probe/explain",
)


@dataclass(frozen=True, slots=True)
class Profile:
    """One configuration. `Authorization` may name keys: `{inference}`, `{management}` and `{api}`."""

    name: str
    properties: str
    rest: Callable[[], Iterator[Case]]
    grpc: Callable[[], Iterator[Record]] = lambda: iter(())
    flags: tuple[str, ...] = FLAGS


def profiles() -> list[Profile]:
    """All configurations, the large one first."""
    return [
        Profile("open", f"{BASE}load_models=probe.mar,rich.mar\n", _open_cases),
        Profile("odd registrations", BASE, odd_registrations),
        Profile("stateful", f"{BASE}load_models=probe.mar,rich.mar\n", stateful_cases),
        Profile("grpc", f"{BASE}load_models=probe.mar,rich.mar\n", lambda: iter(()), grpc_cases),
        Profile("one model", f"{BASE}load_models=probe.mar\n{SWITCHES}", _switched_cases),
        *(
            Profile(
                f"envelope {name}", f"{BASE}load_models=probe.mar\nservice_envelope={name}\n", _envelope_cases
            )
            for name in ("body", "json", "kserve", "kservev2")
        ),
        Profile("tokens", f"{BASE}load_models=probe.mar\n", _token_cases, _token_calls, ("--ncs",)),
    ]


SWITCHES = """decode_input_request=false
cors_allowed_origin=https://example.org
cors_allowed_methods=GET, POST
cors_allowed_headers=X-Own
ts_open_inference_protocol=true
"""


def _open_cases() -> Iterator[Case]:
    yield from route_cases()
    yield from body_cases()
    yield from query_cases()
    yield from wire_cases()
    yield from handler_cases()
    yield from management_cases()


def _switched_cases() -> Iterator[Case]:
    for path in (
        "/v2",
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/probe",
        "/v2/models/probe/versions/1",
    ):
        yield Case(f"switches: {path}", "GET", path)
    for path in ("/ping", "/nothing", "/api-description"):
        yield Case(f"switches: {path}", "GET", path)
    yield Case("switches: no body for a model", "POST", "/invocations")
    yield Case("switches: the one model", "POST", "/invocations", headers=JSON, body=b'{"a": 1}')
    for content_type in ("application/json", "text/plain", "image/png"):
        headers = {"Content-Type": content_type}
        yield Case(
            f"switches: {content_type}", "POST", "/predictions/probe", headers=headers, body=b'{"a": 1}'
        )
    yield Case(
        "switches: preflight", "OPTIONS", "/predictions/probe", headers={"Origin": "https://example.org"}
    )
    yield Case("switches: unregister", "DELETE", "/models/nothing", "management")


def _envelope_cases() -> Iterator[Case]:
    for path in ENVELOPE_PATHS:
        for title, body in ENVELOPE_BODIES.items():
            yield Case(f"envelope: {path}, {title}", "POST", path, headers=JSON, body=body)
    yield Case("envelope: untyped", "POST", ENVELOPE_PATHS[0], body=ENVELOPE_BODIES["instances"])
    yield Case("envelope: octets", "POST", ENVELOPE_PATHS[3], headers=OCTETS, body=ENVELOPE_BODIES["inputs"])


def _token_cases() -> Iterator[Case]:
    bearers = ("{inference}", "{management}", "{api}", "wrong", "")
    plain = [
        Case("ping", "GET", "/ping"),
        Case("predict", "POST", "/predictions/probe", headers=JSON, body=b"{}"),
        Case("predict nothing", "POST", "/predictions/none", headers=JSON, body=b"{}"),
        Case("no route", "GET", "/nothing"),
        Case("description", "GET", "/api-description"),
        Case("describe", "GET", "/models/probe", "management"),
        Case("list", "GET", "/models", "management"),
        Case("register", "POST", "/models?url=echo.mar", "management"),
        Case("unregister", "DELETE", "/models/probe", "management"),
        Case("management description", "OPTIONS", "/", "management"),
        Case("metrics", "GET", "/metrics?name[]=nothing", "metrics"),
        Case("token of no kind", "GET", "/token", "management"),
        Case("token of another kind", "GET", "/token?type=api", "management"),
        Case("token on the inference port", "GET", "/token?type=inference", "inference"),
    ]
    for case in plain:
        yield replace(case, name=f"tokens: {case.name}, none")
        for bearer in bearers:
            headers = {**case.headers, "Authorization": f"Bearer {bearer}"}
            yield replace(case, name=f"tokens: {case.name}, {bearer}", headers=headers)
    for odd in (
        "bearer {inference}",
        "{inference}",
        "Basic {inference}",
        "Bearer  {inference}",
        "Bearer {inference} x",
    ):
        yield Case(f"tokens: as {odd!r}", "GET", "/ping", headers={"Authorization": odd})
    old = {"Authorization": "Bearer {inference}"}
    api = {"Authorization": "Bearer {api}"}
    yield Case("tokens: by POST", "POST", "/token?type=management", "management", headers=api)
    yield Case("tokens: renew", "GET", "/token?type=inference", "management", headers=api)
    yield Case("tokens: the old key", "GET", "/ping", headers=old)


def _token_calls() -> Iterator[Record]:
    predict = {"model_name": "probe", "input": {"data": "x"}}
    yield _call("InferenceAPIsService", "Ping", {})
    yield _call("InferenceAPIsService", "Predictions", predict)
    yield _call("InferenceAPIsService", "StreamPredictions", predict)
    yield _call("ManagementAPIsService", "ListModels", {"limit": 1})
    yield _call("ManagementAPIsService", "RegisterModel", {"url": "echo.mar"})


def _call(service: str, method: str, request: Record) -> Record:
    return {"name": f"grpc tokens: {method}", "service": service, "method": method, "request": request}
