"""Making a gRPC service of plain coroutines: errors become statuses, and every call its access-log line."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, NoReturn

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from torchere.serving.errors import ServingError
from torchere.serving.frontend.access_log import access_log
from torchere.serving.frontend.call_scope import CallScope, current_call
from torchere.serving.frontend.grpc.errors import Table, failure

logger = logging.getLogger(__name__)

Context = Any  # grpc.aio.ServicerContext[Request, Response]: generic in the stubs only
Unary = Callable[[Any, Context], Awaitable[Message]]
Streaming = Callable[[Any, Context], AsyncIterator[Message]]


def service(
    descriptor: ServiceDescriptor, methods: Mapping[str, Unary | Streaming], table: Table, name: str = ""
) -> grpc.GenericRpcHandler:
    """Build the handler of a whole service.

    Args:
        descriptor: what the .proto file says.
        methods: by the descriptor's names; a coroutine function where the answer is one message, an async
            generator where it is a stream. What is missing answers UNIMPLEMENTED.
        table: what each error ends a call with.
        name: of the service, instead of the descriptor's.
    """
    name = name or descriptor.full_name
    handlers = {
        method.name: _handler(name, method, methods[method.name], table)
        for method in descriptor.methods
        if method.name in methods
    }
    return grpc.method_handlers_generic_handler(name, handlers)


def _handler(
    service_name: str, method: MethodDescriptor, implementation: Any, table: Table
) -> grpc.RpcMethodHandler[Any, Any]:
    ending = _Ending(f"{service_name}/{method.name}", table)
    decode = GetMessageClass(method.input_type).FromString
    encode = GetMessageClass(method.output_type).SerializeToString
    if not method.server_streaming:
        return grpc.unary_unary_rpc_method_handler(_unary(implementation, ending), decode, encode)
    if method.client_streaming:
        many = _stream(implementation, ending, many=True)
        return grpc.stream_stream_rpc_method_handler(many, decode, encode)
    return grpc.unary_stream_rpc_method_handler(_stream(implementation, ending), decode, encode)


class _Ending:
    """What every call of one method has at its end: its status, and a line in the access log."""

    __slots__ = ("_path", "_table")

    def __init__(self, path: str, table: Table) -> None:
        self._path = path
        self._table = table

    def begin(self, context: Context, *, many: bool = False) -> float:
        """Begin a call; returns when, in monotonic seconds. `many`: its client may send several requests."""
        started_s = time.monotonic()
        CallScope("grpc", started_s, lambda: _metadata(context), self._code_of, many=many)
        return started_s

    def _code_of(self, error: ServingError) -> str:
        return str(failure(error, self._table).code.name)

    def well(self, context: Context, started_s: float) -> None:
        """The call was answered."""
        self._log(context, grpc.StatusCode.OK, started_s)

    async def badly(self, context: Context, started_s: float, error: Exception) -> NoReturn:
        """Abort the call, which raises."""
        if isinstance(error, ServingError):
            ended = failure(error, self._table)
        else:  # a bug is logged, and the client gets INTERNAL
            logger.error("call of %s failed unexpectedly", self._path, exc_info=error)
            ended = failure(ServingError("Internal server error", repr(error)), self._table)
        self._log(context, ended.code, started_s)
        await context.abort(ended.code, ended.details)
        raise AssertionError("abort() raises")

    def _log(self, context: Context, code: grpc.StatusCode, started_s: float) -> None:
        call = current_call()
        timeline = None
        if call is not None:
            call.finish(code.name)
            timeline = call.timeline
        if access_log.enabled:
            line = f"gRPC {self._path} HTTP/2.0"
            access_log.add(_peer(context), line, code.value[0], started_s, timeline=timeline)


def _unary(implementation: Unary, ending: _Ending) -> Unary:
    async def call(request: Message, context: Context) -> Message:
        started_s = ending.begin(context)
        try:
            message = await implementation(request, context)
        except Exception as error:  # the top of every call
            await ending.badly(context, started_s, error)
        ending.well(context, started_s)
        return message

    return call


def _stream(implementation: Streaming, ending: _Ending, *, many: bool = False) -> Streaming:
    async def call(request: Any, context: Context) -> AsyncIterator[Message]:
        started_s = ending.begin(context, many=many)
        try:
            async for message in implementation(request, context):
                yield message
        except Exception as error:  # the top of every call
            await ending.badly(context, started_s, error)
        ending.well(context, started_s)

    return call


def _metadata(context: Context) -> Iterable[tuple[str, str | bytes]]:
    return context.invocation_metadata() or ()


def _peer(context: Context) -> str:
    family, _, address = str(context.peer()).partition(":")
    return address if family in ("ipv4", "ipv6") else str(context.peer())
