"""gRPC services as tables of methods, and the dispatch of each call to its method."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from inspect import iscoroutinefunction
from typing import Any, Literal, NamedTuple, cast

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from torchere.serving.access.client_limits import ClientLimits
from torchere.serving.access.identity import Role, address_of, authorization_of, is_from_this_machine
from torchere.serving.access.keys import Keys
from torchere.serving.errors import TooManyRequests, Unauthorized
from torchere.serving.frontend.authorisation import API_KEY, HEALTH_ROUTES, grpc_actions, grpc_rows
from torchere.serving.frontend.budgets import KEY_FREE_MESSAGE_BYTES
from torchere.serving.frontend.grpc.call import Call, FunctionCall, Method, UnaryCall
from torchere.serving.frontend.grpc.errors import MANAGEMENT, Table, failure
from torchere.serving.frontend.grpc.fields import counted
from torchere.serving.frontend.grpc.streams import (
    Answerer,
    Streaming,
    StreamTaskCall,
    UnaryTaskCall,
    Waiting,
    streaming_answer,
    waiting_answer,
)
from torchere.serving.frontend.http2.messages import Received, StatusCode
from torchere.serving.frontend.http2.stream import ENDED, CallListener, Encoded, Stream
from torchere.serving.logs.access_lines import access_log
from torchere.serving.logs.audit import AuditedCall, Outcome, audit_log
from torchere.serving.telemetry.metrics import Metrics

_ACTIONS = grpc_actions()
_UNMANAGED = (
    "Models are not changed over this address without authorization. Switch tokens on, name client_ca_file, "
    "or set insecure_management=true."
)
_NOT_POST, _NOT_GRPC = 405, 415
_GRPC = "application/grpc"
MAX_LOGGED_PATH = 200  # characters of the path of a refused call, whose method may not exist

Opener = Callable[[Stream], CallListener]
Openers = dict[str, Opener]
Service = Callable[[set[Any], Metrics], Openers]  # takes a set for running tasks; returns openers by path


class Callback(NamedTuple):
    """A method whose calls are answered by callbacks, like predictions; `opens` creates a call."""

    opens: Callable[[Method, Stream], UnaryCall]


class WithCodec(NamedTuple):
    """A method with its own functions to decode or encode its messages; None: the descriptor's function.

    `takes_long`: see `Method`.
    """

    implementation: Function | Waiting | Streaming | Callback
    decode: Callable[[Received], Any] | None = None
    encode: Callable[[Any], Encoded] | None = None
    takes_long: Callable[[Received], bool] | None = None


Function = Callable[[Any, Call], Any]  # answers without waiting
Implementation = Function | Waiting | Streaming | Callback | WithCodec


def service(
    descriptor: ServiceDescriptor,
    methods: Mapping[str, Implementation],
    table: Table,
    name: str = "",
) -> Service:
    """Define a service.

    Args:
        descriptor: descriptor of the service in the .proto file.
        methods: implementations by the descriptor's method names. For one response message: a synchronous
            function, a `Callback`, or a coroutine function; for a stream: an async generator function.
            Missing methods answer UNIMPLEMENTED.
        table: the status of each error.
        name: name of the service, instead of the descriptor's.
    """
    name = name or descriptor.full_name

    def openers(tasks: set[Any], metrics: Metrics) -> Openers:
        return {
            f"/{name}/{method.name}": _opener(
                name, method, methods[method.name], table, tasks=tasks, metrics=metrics
            )
            for method in descriptor.methods
            if method.name in methods
        }

    return openers


def _opener(
    service_name: str,
    described: MethodDescriptor,
    implementation: Any,
    table: Table,
    *,
    tasks: set[Any],
    metrics: Metrics,
) -> Opener:
    coded = implementation if isinstance(implementation, WithCodec) else WithCodec(implementation)
    method = Method(
        f"{service_name}/{described.name}",
        table,
        # Cast, because the type stub of `FromString` accepts `bytes` only.
        coded.decode
        or counted(cast("Callable[[Received], Any]", GetMessageClass(described.input_type).FromString)),
        coded.encode or GetMessageClass(described.output_type).SerializeToString,
        tasks,
        metrics,
        coded.takes_long,
    )
    implementation = coded.implementation
    if f"/{method.path}" in _ACTIONS:
        return partial(ChangingCall, waiting_answer(implementation), method)
    return opener(
        implementation,
        method,
        streams_in=described.client_streaming,
        streams_out=described.server_streaming,
    )


def opener(implementation: Any, method: Method, *, streams_in: bool, streams_out: bool) -> Opener:
    """Return the opener of a method, whose calls are answered by callbacks, synchronously, or by a task."""
    if isinstance(implementation, Callback):
        return partial(implementation.opens, method)
    if streams_out:
        kind = StreamTaskCall if streams_in else UnaryTaskCall
        return partial(kind, streaming_answer(implementation), method)
    if iscoroutinefunction(implementation):
        return partial(UnaryTaskCall, waiting_answer(implementation), method)
    return partial(FunctionCall, implementation, method)


def dispatcher(
    openers: Openers,
    keys: Keys | None,
    port: Role,
    metrics: Metrics,
    *,
    changes: Literal["all", "this machine", "none"] = "all",
    limits: ClientLimits | None = None,
) -> Callable[[Stream], CallListener]:
    """Return the function that opens or refuses each call of a port.

    Args:
        openers: openers of the calls, by path.
        keys: None when calls need no key.
        port: the API whose port it is, and the role that methods without a row need.
        metrics: counts calls refused because of their key or the limits of their client.
        changes: who may change models without authorization; see `ServerSettings.allows_management`.
        limits: the limits of each client, for calls with the inference role; None: no limits.
    """
    roles = {path: row.needs for path, row in grpc_rows(port).items() if row.needs != API_KEY}
    changing = frozenset(path for path, row in grpc_rows(port).items() if row.actions)

    def may_change(stream: Stream) -> bool:
        address, names = address_of(stream.client), (name for name, _ in stream.head.metadata)
        return changes == "all" or (changes == "this machine" and is_from_this_machine(address, names))

    def open_call(stream: Stream) -> CallListener:
        head = stream.head
        if head.method != "POST":
            _refuse(stream, StatusCode.INTERNAL, "expected POST", http_status=_NOT_POST)
        elif not _is_grpc(head.content_type):
            _refuse(
                stream,
                StatusCode.INTERNAL,
                f"content-type: found {head.content_type[:100]!r}, expected application/grpc",
                http_status=_NOT_GRPC,
            )
        elif head.flaw:
            _refuse(stream, head.flaw_code, head.flaw)
        elif (error := _refusal(stream, keys, role := roles.get(head.path, port), limits)) is not None:
            metrics.refused(error)
            audit(stream, "PERMISSION_DENIED")
            _refuse(stream, *failure(error, MANAGEMENT).trailers())
        elif head.path in changing and not may_change(stream):
            audit(stream, "PERMISSION_DENIED")
            _refuse(stream, StatusCode.PERMISSION_DENIED, _UNMANAGED)
        elif (opens := openers.get(head.path)) is not None:
            if role is None:
                stream.restrict(KEY_FREE_MESSAGE_BYTES)
            return opens(stream)
        else:
            _refuse(stream, StatusCode.UNIMPLEMENTED, "Method not found!")
        return ENDED

    return open_call


def _refuse(
    stream: Stream, code: StatusCode, message: str, details: bytes = b"", *, http_status: int = 200
) -> None:
    """Refuse a call, and write its line to the access log; for admitted calls, `Call` writes it."""
    stream.refuse(code, message, details, http_status=http_status)
    if access_log.enabled:
        line = f"gRPC {stream.head.path[1:MAX_LOGGED_PATH]} HTTP/2.0"
        access_log.add(stream.client, line, code, time.monotonic())


def _is_grpc(content_type: str) -> bool:
    # `application/grpc+proto` is accepted too; `application/grpc-web` is another protocol.
    return content_type.startswith(_GRPC) and content_type[len(_GRPC) : len(_GRPC) + 1] in ("", "+", ";")


def _refusal(
    stream: Stream, keys: Keys | None, role: Role | None, limits: ClientLimits | None
) -> Unauthorized | TooManyRequests | None:
    """Set the caller of a call; return the error if the caller lacks the role, or is over its limits."""
    stream.caller = address_of(stream.client)
    try:
        if keys is not None and role is not None:
            given = [str(value) for name, value in stream.head.metadata if name == "authorization"]
            named = keys.authorize(role, authorization_of(given), stream.subjects).name
            stream.caller = named or stream.caller
        if limits is not None and role == "inference" and stream.head.path not in HEALTH_ROUTES:
            limits.charge(stream.caller, time.monotonic())
    except (Unauthorized, TooManyRequests) as error:
        return error
    return None


def audit(
    stream: Stream, code: str, managed: tuple[str, str] = ("", ""), *, has_changed: bool = False
) -> None:
    """Write a call to the audit log if it changes models, with the name of its status code.

    `has_changed`: the change is in effect, although the call was cancelled, or ended with an error.
    """
    action = _ACTIONS.get(stream.head.path)
    if action is None:
        return
    address = address_of(stream.client)
    identity = "" if stream.caller == address else stream.caller
    outcome: Outcome = "refused" if code == StatusCode.PERMISSION_DENIED.name else "failed"
    if code == "OK" or has_changed:
        outcome = "done"
    audit_log.add(AuditedCall(identity, address, "grpc", action, *managed, outcome=outcome, status=code))


class ChangingCall(UnaryTaskCall):
    """A call that changes models; it is audited even if the server ends it before its message is decoded."""

    __slots__ = ("_code", "_named")

    def __init__(self, answer: Answerer, method: Method, stream: Stream) -> None:
        super().__init__(answer, method, stream)
        self._code = StatusCode.OK
        self._named = ("", "")  # model and version, as the message names them

    def begin(self, request: Any) -> None:
        """Start the task."""
        self._named = str(getattr(request, "model_name", "")), str(getattr(request, "model_version", ""))
        super().begin(request)

    def _end_with(self, code: StatusCode, message: str, details: bytes = b"") -> None:
        self._code = code
        if self.task is None:
            audit(self.stream, code.name)
        super()._end_with(code, message, details)

    def _done(self, task: asyncio.Task[None]) -> None:
        super()._done(task)
        is_cancelled = task.cancelled() and self._code is StatusCode.OK  # else the server has ended the call
        named, has_changed = self._named, False
        if self._scope is not None:
            has_changed = self._scope.has_changed
            named = self._scope.managed if self._scope.managed[0] else named
        code = StatusCode.CANCELLED if is_cancelled else self._code
        audit(self.stream, code.name, named, has_changed=has_changed)
