"""Planes that answer what a test tells them to, and a client on a connection without a socket."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any, cast

import pytest

from torchere.archiver.signature import Signature
from torchere.serving.access.client_limits import ClientLimits
from torchere.serving.access.identity import REFUSED, Identity, Role
from torchere.serving.batching.quarantine import ConvictedRequest
from torchere.serving.batching.request import Request
from torchere.serving.config.server_settings import Limits, ModelSettings, ServerSettings
from torchere.serving.errors import (
    ModelNotFound,
    NotAllowed,
    NotFound,
    ServingError,
    Unauthorized,
    Unavailable,
    VersionNotFound,
)
from torchere.serving.frontend.budgets import Budgets
from torchere.serving.frontend.call_scope import current_call
from torchere.serving.frontend.control import Progress, Registered, VersionDescription
from torchere.serving.frontend.dataplane import STARTING, DataPlane, Readiness
from torchere.serving.frontend.model_facts import ModelFacts
from torchere.serving.frontend.rest.connection import Connection
from torchere.serving.frontend.rest.listener import Listener
from torchere.serving.frontend.rest.server import listener_of
from torchere.serving.frontend.services import Services
from torchere.serving.frontend.workflows import Page, WorkflowPlane
from torchere.serving.registry.desired import Wanted
from torchere.serving.registry.version import VersionState
from torchere.serving.registry.workflows import Workflows
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.telemetry.numbers import VersionNumbers
from torchere.serving.types import InferRequest, InferResponse, ModelKey
from torchere.serving.workers.executor import ExecutorState, ExecutorStatus


class FakeDataPlane:
    """Knows the model `echo` in version `1.0`, and answers with the first parameter's value.

    Set `behave` to answer otherwise; it gets the request and may raise or wait. `asked` keeps every
    (model, version, request), `callers` their callers, and `withdrawn` counts those that were cancelled.
    `given_up` counts the calls that withdrew a request, also one that was answered.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None, InferRequest]] = []
        self.callers: list[str] = []
        self.behave: Callable[[InferRequest], Awaitable[Any]] | None = None
        self.withdrawn = self.given_up = 0
        self.unknown: list[NotFound] = []  # refusals that were counted
        self.sole: str | None = None
        self.signature: str | None = None
        self.is_healthy = True
        self.is_ready = Readiness(True)
        self.is_started = Readiness(True)
        self.readiness_listeners: set[Callable[[], None]] = set()
        self.has_started = True
        self.known = ModelFacts(
            key=ModelKey("echo", "1.0"),
            versions=("1.0",),
            handler="echo.py",
            manifest_model={},
            signature=None,
            max_batch_size=1,
            numbers=VersionNumbers("echo", "1.0"),
        )

    async def infer(self, model: str, version: str | None, request: InferRequest, group: str = "") -> Any:
        scope = current_call()
        if scope is not None:
            self.callers.append(scope.caller)
        return await self._answer(model, version, request)

    async def _answer(self, model: str, version: str | None, request: InferRequest) -> Any:
        self.check_exists(model, version)
        self.asked.append((model, version, request))
        if self.behave is None:
            return InferResponse(request.parameters[0].value if request.parameters else b"")
        try:
            return await self.behave(request)
        except asyncio.CancelledError:
            self.withdrawn += 1
            raise

    def admit(self, request: Request, model: str, version: str | None) -> Any:
        self.check_exists(model, version)
        self.callers.append(request.caller)
        task = asyncio.get_running_loop().create_task(self._reply(model, version, request))

        def withdraw(_: Request) -> None:
            self.given_up += 1
            task.cancel()

        return SimpleNamespace(batcher=SimpleNamespace(withdraw=withdraw))

    async def _reply(self, model: str, version: str | None, request: Request) -> None:
        asked = InferRequest(
            request.request_id,
            tuple(request.parameters),
            tuple(request.headers),
            request.deadline_s,
            request.priority,
        )
        try:
            outcome = await self._answer(model, version, asked)
        except ServingError as error:
            outcome = error
        request.finish(outcome)

    def check_exists(self, model: str, version: str | None) -> None:
        if model != "echo":
            raise ModelNotFound.named(model)
        if version not in (None, "1.0"):
            raise VersionNotFound.of(model, version)

    def sole_startup_model(self) -> str | None:
        return self.sole

    def signature_text(self, model: str, version: str | None) -> str | None:
        self.check_exists(model, version)
        return self.signature

    def healthy(self) -> bool:
        return self.is_healthy

    def readiness(self) -> Readiness:
        return self.is_ready

    def model_readiness(self, model: str, version: str | None) -> Readiness:
        self.check_exists(model, version)
        return self.is_ready

    def startup(self) -> Readiness:
        return self.is_started

    def tensors(self, model: str, version: str | None) -> Signature | None:
        return self.facts(model, version).signature

    def facts(self, model: str, version: str | None) -> ModelFacts:
        self.check_exists(model, version)
        return self.known

    facts_of_versions = DataPlane.facts_of_versions

    def refuse_unknown(self, error: NotFound) -> ServingError:
        self.unknown.append(error)
        return error if self.has_started else Unavailable(STARTING)

    def registered(self) -> list[ModelKey]:
        return [self.known.key]


class FakeControlPlane:
    """Knows `echo` in version `1.0`; keeps every call, and raises `error` instead when that is set.

    With `model_api_off` it takes no registrations.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.error: Exception | None = None
        self.model_api_off = False
        self.progress = Progress.DONE
        self.executors = 1
        self.default_executors = 0
        self.page = Page((("echo", "echo.mar"),), None)
        self.customized = InferResponse(b'{"custom": 1}', (("X-Extra", "yes"),))
        self.description = VersionDescription(
            key=ModelKey("echo", "1.0"),
            url="echo.mar",
            runtime="python",
            settings=ModelSettings(),
            isolation="thread",
            state=VersionState.READY,
            condition="ready",
            failure="",
            loaded_at_startup=False,
            executors=(
                ExecutorStatus(
                    7, ExecutorState.READY, datetime(2026, 1, 2, 3, 4, 5, 678901, timezone.utc), pid=42
                ),
            ),
            queue_capacity=100,
            queue_length=3,
        )

    def _called(self, *call: Any) -> None:
        self.calls.append(call)
        if self.error is not None:
            raise self.error

    def check_model_api(self) -> None:
        if self.model_api_off:
            raise NotAllowed("the model API is off")

    async def register(self, wish: Wanted, **how: Any) -> Registered:
        self._called("register", wish, how)
        return Registered(ModelKey(wish.name or "echo", "1.0"), self.executors, self.progress)

    async def unregister(self, model: str, version: str | None) -> None:
        self._called("unregister", model, version)

    async def scale(self, model: str, version: str | None, **how: Any) -> Progress:
        self._called("scale", model, version, how)
        return self.progress

    async def set_default(self, model: str, version: str) -> None:
        self._called("set_default", model, version)

    def describe(self, model: str, version: str | None) -> list[VersionDescription]:
        self._called("describe", model, version)
        if model not in dict(self.page.entries):
            raise ModelNotFound.named(model)
        return [self.description]

    def quarantined(self, model: str, version: str) -> list[ConvictedRequest]:
        self._called("quarantined", model, version)
        return [ConvictedRequest("d1", ("one", "two"), 6, 60.0, None)]

    def lift_quarantine(self, model: str, version: str, digest: str | None = None) -> int:
        self._called("lift_quarantine", model, version, digest)
        return 3 if digest is None else 1

    async def describe_customized(self, model: str, version: str | None, request: InferRequest) -> Any:
        self._called("describe_customized", model, version, request)
        return self.description, self.customized

    def list_models(self, limit: int, page_token: int) -> Page:
        self._called("list_models", limit, page_token)
        return self.page

    def has_executors(self, model: str) -> bool:
        self._called("has_executors", model)
        return True


class FakeKeys:
    """Takes `Bearer <kind>` for a key of that kind, and `Bearer api` for the API key."""

    def __init__(self) -> None:
        self.renewed: list[str | None] = []

    def authorize(self, role: Role, authorization: str | None, subjects: Sequence[str] = ()) -> Identity:
        if authorization != f"Bearer {role}":
            raise Unauthorized(REFUSED)
        return Identity(f"{role} client", frozenset({role}))

    def renew(self, wanted: str | None, authorization: str | None) -> None:
        if authorization != "Bearer api" or wanted not in ("inference", "management"):
            raise Unauthorized("not renewed")
        self.renewed.append(wanted)


@dataclass
class Answer:
    """What a connection sent for one request."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[bytes] = field(default_factory=list)
    ended: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def answer_in(said: bytes) -> Answer:
    """The answer that these bytes are; it has not `ended` while some are missing."""
    head, _, rest = said.partition(b"\r\n\r\n")
    line, *lines = head.decode("latin-1").split("\r\n")
    answer = Answer(int(line.split()[1]), dict(each.split(": ", 1) for each in lines))
    if "transfer-encoding" not in answer.headers:
        answer.chunks = [rest]
        answer.ended = len(rest) == int(answer.headers.get("content-length", "0"))
        return answer
    while rest and not answer.ended:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        answer.chunks.append(rest[:length])
        answer.ended = length == 0
        rest = rest[length + 2 :]
    return answer


class FakeTransport(asyncio.Transport):
    """Keeps what is written; `answered` returns the answer once it is whole, or the connection closed."""

    def __init__(self, *, is_head: bool = False) -> None:
        super().__init__({"peername": ("127.0.0.1", 4321), "sockname": ("127.0.0.1", 80)})
        self.said = b""
        self._is_head = is_head
        self._closed = False
        self._changed = asyncio.Event()

    async def answered(self) -> Answer:
        while True:
            if b"\r\n\r\n" in self.said:
                answer = answer_in(self.said)
                if answer.ended or self._closed or self._is_head:
                    return answer
            self._changed.clear()
            await self._changed.wait()

    def write(self, data: Any) -> None:
        self.said += data
        self._changed.set()

    def close(self) -> None:
        self._closed = True
        self._changed.set()

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self._closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return 16_384, 65_536

    def get_write_buffer_size(self) -> int:
        return 0


async def ask_async(
    listener: Listener, method: str, target: str, body: bytes = b"", **headers: str
) -> Answer:
    """Make one request to a listener; header names are given with underscores for dashes."""
    target = target.replace("\n", "%0A")
    names = [(name.replace("_", "-").lower(), value) for name, value in headers.items()]
    if "host" not in headers:
        names.append(("host", "localhost"))
    lines = [f"{name}: {value}" for name, value in [*names, ("content-length", len(body))]]
    data = "\r\n".join([f"{method} {target} HTTP/1.1", *lines, "", ""]).encode("latin-1") + body
    transport = FakeTransport(is_head=method == "HEAD")
    connection = Connection(listener)
    connection.connection_made(transport)
    while data and not transport.is_closing():
        room = connection.get_buffer(-1)
        size = min(len(room), len(data))
        room[:size] = data[:size]
        data = data[size:]
        connection.buffer_updated(size)
    answer = await asyncio.wait_for(transport.answered(), 20)
    await asyncio.wait_for(asyncio.gather(*listener.tasks), 20)
    transport.close()
    connection.connection_lost(None)
    return answer


@pytest.fixture
def planes():
    """The two fakes, keys, metrics, and `services(...)` that puts them together."""
    metrics = Metrics("host")

    def services(
        *,
        keys: Any = None,
        max_request_bytes: int = 1000,
        max_response_bytes: int = 6_553_500,
        min_upload_rate: int = 0,
        budgets: Budgets | None = None,
        client_limits: ClientLimits | None = None,
        **changes: Any,
    ) -> Services:
        limits = Limits(
            max_request_bytes=max_request_bytes,
            max_response_bytes=max_response_bytes,
            min_upload_rate=min_upload_rate,
        )
        settings = ServerSettings(limits=limits, **changes)
        budgets = budgets or Budgets()
        return Services(settings, metrics, keys, "9.9", budgets=budgets, client_limits=client_limits)

    data: Any = FakeDataPlane()
    control: Any = FakeControlPlane()
    registry: Any = SimpleNamespace()
    workflows = WorkflowPlane(Workflows(ServerSettings(), registry), data, lambda: None, 1000)
    control.workflows = workflows
    yield SimpleNamespace(data=data, control=control, keys=FakeKeys(), metrics=metrics, services=services)
    workflows.known.close()  # a test may have put another in its place


@pytest.fixture
def no_thread(monkeypatch):
    """No thread can be started for the functions of an event loop, as at a limit of processes."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)


@pytest.fixture
def ask(planes):
    """`ask(surfaces, method, target, body, **headers)`: one request to a fresh listener over the fakes."""

    def call(surfaces: str, method: str, target: str, body: bytes = b"", **headers: str) -> Answer:
        services = planes.services(keys=headers.pop("keys", None))
        roles = cast("list[Role]", surfaces.split("+"))
        listener = listener_of(frozenset(roles), planes.data, planes.control, services)
        return asyncio.run(ask_async(listener, method, target, body, **headers))

    return call


@pytest.fixture
def ask_listener():
    """`ask_listener(listener, method, target, body, **headers)`, to await: one request to it."""
    return ask_async
