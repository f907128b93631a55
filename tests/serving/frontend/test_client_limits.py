"""The limits for each client at the doors, over the fakes, and in the data plane."""

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from torchere.serving.access.client_limits import ClientLimits, Quota
from torchere.serving.batching.request import Protocol
from torchere.serving.errors import ModelNotFound, TooManyRequests
from torchere.serving.frontend.call_scope import CallScope
from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.grpc.service import dispatcher
from torchere.serving.frontend.http2.header_blocks import request_head
from torchere.serving.frontend.http2.messages import StatusCode
from torchere.serving.frontend.http2.stream import Stream
from torchere.serving.frontend.rest.server import listener_of
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.types import InferRequest


def limits_of(**quota: Any) -> ClientLimits:
    return ClientLimits(Quota(**quota), Counter())


def listener(planes: Any, surfaces: str = "inference", **quota: Any) -> Any:
    services = planes.services(client_limits=limits_of(**quota))
    roles: Any = frozenset(surfaces.split("+"))
    return listener_of(roles, planes.data, planes.control, services)


def test_a_client_over_its_rate_gets_429_and_the_time_of_the_next_request(planes, ask_listener):
    async def main():
        door = listener(planes, rate=0.25, burst=1)
        first = await ask_listener(door, "POST", "/predictions/echo", b"x")
        return first, await ask_listener(door, "POST", "/predictions/echo", b"x")

    first, second = asyncio.run(main())
    assert first.status == 200
    assert (second.status, second.headers["retry-after"]) == (429, "4")
    assert second.json == {
        "code": 429,
        "type": "TooManyRequestsException",
        "message": "This client sends requests faster than it may. Try again later.",
    }
    assert len(planes.data.asked) == 1
    assert 'reason="client_limit",} 1.0' in planes.metrics.exposition({"torchere_requests_rejected_total"})


def test_the_body_of_a_client_over_its_rate_is_not_read(planes, ask_listener):
    async def main():
        door = listener(planes, rate=0.25, burst=1)
        await ask_listener(door, "POST", "/predictions/echo", b"x")
        return await ask_listener(door, "POST", "/predictions/echo", b"x" * 5000)

    assert asyncio.run(main()).status == 429  # not 413: the body is longer than allowed


def test_health_and_operators_are_not_limited(planes, ask_listener):
    async def main():
        door = listener(planes, "inference+management", rate=0.25, burst=1)
        limited = [(await ask_listener(door, "GET", "/v2/models/echo")).status for _ in range(2)]
        paths = ("/livez", "/models", "/ping", "/v2/health/live", "/v2/health/ready", "/v2/models/echo/ready")
        return limited, [(await ask_listener(door, "GET", path)).status for path in paths]

    assert asyncio.run(main()) == ([200, 429], [200] * 6)


def test_a_request_that_is_refused_for_its_body_is_charged(planes, ask_listener):
    async def main():
        door = listener(planes, rate=0.25, burst=1)
        form = {"content_type": "multipart/form-data"}
        return [(await ask_listener(door, "POST", "/predictions/echo", b"x", **form)).status for _ in "12"]

    assert asyncio.run(main()) == [400, 429]
    assert planes.data.asked == []


def test_a_connection_lets_go_of_the_account_of_its_client_when_it_ends(planes, ask_listener):
    async def main():
        door = listener(planes, rate=1000.0)
        await ask_listener(door, "POST", "/predictions/echo", b"x")
        return door.client_limits.account("127.0.0.1")

    account = asyncio.run(main())
    assert (account.connections, account.paid_until_s > 0.0) == (0, True)


PATH = "/test.Service/echo"


class FakeStream:
    """A call of a client, which keeps how it was answered."""

    def __init__(self, client: str, path: str = PATH) -> None:
        headers = {":method": "POST", ":path": path, "content-type": "application/grpc"}
        self.head, _ = request_head(headers.items())
        self.client = (client, 4321)
        self.caller = ""
        self.answered: Any = None

    def restrict(self, limit_bytes: int) -> None:
        """Take the limit of messages without a key."""

    def refuse(self, code: StatusCode, message: str, details: bytes = b"", *, http_status: int = 200) -> None:
        self.answered = code, message, details


def test_a_call_over_the_rate_of_its_client_is_not_opened_and_says_when_to_come_back():
    opened: list[Any] = []
    keep: Any = opened.append
    open_call = dispatcher(
        {PATH: keep},
        None,
        "inference",
        Metrics(),
        limits=limits_of(rate=0.25, burst=1),
    )
    first, second, other = FakeStream("10.0.0.1"), FakeStream("10.0.0.1"), FakeStream("10.0.0.2")
    for stream in (first, second, other):
        open_call(cast("Stream", stream))
    assert opened == [first, other]
    code, message, details = second.answered
    assert code == StatusCode.RESOURCE_EXHAUSTED
    assert message == "This client sends requests faster than it may. Try again later."
    delay = RetryInfo()
    assert Status.FromString(details).details[1].Unpack(delay)
    assert 3 <= delay.retry_delay.seconds <= 4


@pytest.mark.parametrize(
    ("port", "path", "opened"),
    [
        ("management", PATH, 3),
        ("inference", "/grpc.health.v1.Health/Check", 3),
        ("inference", "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Ping", 3),
        ("inference", "/inference.GRPCInferenceService/ModelReady", 3),
        ("inference", "/inference.GRPCInferenceService/ServerReady", 3),
        ("inference", "/inference.GRPCInferenceService/RepositoryIndex", 3),
        ("inference", "/inference.GRPCInferenceService/ModelMetadata", 1),
    ],
)
def test_calls_for_health_and_of_operators_are_not_limited(port, path, opened):
    seen: list[FakeStream] = []
    limits = limits_of(rate=0.25, burst=1)
    keep: Any = seen.append
    open_call = dispatcher({path: keep}, None, port, Metrics(), limits=limits)
    for _ in range(3):
        open_call(cast("Stream", FakeStream("10.0.0.1", path)))
    assert len(seen) == opened


class EmptyRegistry:
    """Knows no model."""

    def find(self, model: str, version: str | None) -> Any:
        raise ModelNotFound.named(model)


def plane_with(limits: ClientLimits) -> DataPlane:
    plane = DataPlane(EmptyRegistry(), Metrics(), client_limits=limits)  # type: ignore[arg-type]
    plane.opened()
    return plane


def asked_by(client: str) -> Any:
    return SimpleNamespace(caller=client, account=None)


def test_a_prediction_that_is_not_admitted_does_not_count_as_unanswered():
    limits = limits_of(concurrency=1)
    plane = plane_with(limits)
    for _ in range(3):
        with pytest.raises(ModelNotFound):
            plane.admit(asked_by("a"), "nothing", None)
    assert limits.tallies()[""].running == 0


def test_a_prediction_over_the_concurrency_of_its_client_is_not_admitted():
    limits = limits_of(concurrency=1)
    plane = plane_with(limits)
    limits.account("a").enter()
    with pytest.raises(TooManyRequests):
        plane.admit(asked_by("a"), "nothing", None)
    with pytest.raises(ModelNotFound):
        plane.admit(asked_by("b"), "nothing", None)
    with pytest.raises(ModelNotFound):
        plane.admit(asked_by(""), "nothing", None)  # the server itself


def test_each_prediction_of_a_stream_is_charged():
    limits = limits_of(rate=0.25, burst=2)
    plane = plane_with(limits)

    async def ask() -> str:
        try:
            await plane.infer("nothing", None, InferRequest("", ()))
        except (ModelNotFound, TooManyRequests) as error:
            return error.code
        return ""

    async def main(protocol: Protocol, *, many: bool) -> list[str]:
        CallScope(protocol, 0.0, tuple, lambda error: error.code, caller="a", many=many)
        return [await ask() for _ in range(3)]

    assert asyncio.run(main("grpc", many=False)) == ["model_not_found"] * 3  # charged as a call
    assert asyncio.run(main("rest", many=True)) == ["model_not_found"] * 3  # steps of a workflow
    assert asyncio.run(main("grpc", many=True)) == ["model_not_found", "model_not_found", "too_many_requests"]
