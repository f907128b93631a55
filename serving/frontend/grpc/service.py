"""Making a gRPC service of plain coroutines: errors become statuses, and every call its access-log line."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from torchere.serving.errors import ServingError
from torchere.serving.frontend import access_log
from torchere.serving.frontend.grpc.errors import Failure, Table, failure

logger = logging.getLogger(__name__)

Context = Any  # grpc.aio.ServicerContext[Request, Response]: generic in the stubs only
Unary = Callable[[Any, Context], Awaitable[Message]]
Streaming = Callable[[Any, Context], AsyncIterator[Message]]


def service(
    descriptor: ServiceDescriptor, methods: Mapping[str, Unary | Streaming], table: Table
) -> grpc.GenericRpcHandler:
    """Build the handler of a whole service.

    Args:
        descriptor: what the .proto file says.
        methods: by the descriptor's names; a coroutine function where the answer is one message, an async
            generator where it is a stream. What is missing answers UNIMPLEMENTED.
        table: what each error ends a call with.
    """
    handlers = {
        method.name: _handler(descriptor.full_name, method, methods[method.name], table)
        for method in descriptor.methods
        if method.name in methods
    }
    return grpc.method_handlers_generic_handler(descriptor.full_name, handlers)


def _handler(
    service_name: str, method: MethodDescriptor, implementation: Any, table: Table
) -> grpc.RpcMethodHandler[Any, Any]:
    frame = _frame(f"{service_name}/{method.name}", table)
    decode = GetMessageClass(method.input_type).FromString
    encode = GetMessageClass(method.output_type).SerializeToString
    if not method.server_streaming:
        return grpc.unary_unary_rpc_method_handler(_unary(implementation, frame), decode, encode)
    if method.client_streaming:
        return grpc.stream_stream_rpc_method_handler(_stream(implementation, frame), decode, encode)
    return grpc.unary_stream_rpc_method_handler(_stream(implementation, frame), decode, encode)


Frame = Callable[[Context], AbstractAsyncContextManager[None]]


def _unary(implementation: Unary, frame: Frame) -> Unary:
    async def call(request: Message, context: Context) -> Message:
        async with frame(context):
            return await implementation(request, context)
        raise AssertionError("the frame ended the call")  # it aborts, which raises

    return call


def _stream(implementation: Streaming, frame: Frame) -> Streaming:
    async def call(request: Any, context: Context) -> AsyncIterator[Message]:
        async with frame(context):
            async for message in implementation(request, context):
                yield message

    return call


def _frame(path: str, table: Table) -> Frame:
    @asynccontextmanager
    async def frame(context: Context) -> AsyncIterator[None]:
        started_s = time.monotonic()
        ended: Failure | None = None
        try:
            yield
        except ServingError as error:
            ended = failure(error, table)
        except Exception as error:  # the top of every call: a bug is logged, and the client gets INTERNAL
            logger.exception("call of %s failed unexpectedly", path)
            ended = failure(ServingError("Internal server error", repr(error)), table)
        code = grpc.StatusCode.OK if ended is None else ended.code
        if access_log.logger.isEnabledFor(logging.INFO):
            line = f"gRPC {path} HTTP/2.0"
            access_log.log_access(_peer(context), line, code.value[0], started_s)
        if ended is not None:
            await context.abort(ended.code, ended.details)

    return frame


def _peer(context: Context) -> str:
    family, _, address = str(context.peer()).partition(":")
    return address if family in ("ipv4", "ipv6") else str(context.peer())
