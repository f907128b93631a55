"""Making a gRPC service of plain coroutines: each method by its path, ready to open calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from torchere.serving.frontend.grpc.call import Method
from torchere.serving.frontend.grpc.direct import Direct
from torchere.serving.frontend.grpc.errors import Table
from torchere.serving.frontend.grpc.fields import counted
from torchere.serving.frontend.grpc.running import Streaming, Unary, one_to_one, to_many
from torchere.serving.frontend.http2.messages import Received
from torchere.serving.frontend.http2.receiver import Receiver
from torchere.serving.frontend.http2.stream import Encoded, Stream

Opener = Callable[[Stream], Receiver]
Openers = dict[str, Opener]


class Coded(NamedTuple):
    """An implementation that has a way of its own to read or write messages; None: the descriptor's."""

    implementation: Unary | Streaming | Direct
    decode: Callable[[Received], Any] | None = None
    encode: Callable[[Any], Encoded] | None = None


Implementation = Unary | Streaming | Direct | Coded


def service(
    descriptor: ServiceDescriptor,
    methods: Mapping[str, Implementation],
    table: Table,
    name: str = "",
) -> Callable[[set[Any]], Openers]:
    """Describe a whole service; the result makes its methods, whose tasks are kept in the set it is given.

    Args:
        descriptor: what the .proto file says.
        methods: by the descriptor's names; a coroutine function or a `Direct` where the answer is one
            message, an async generator where it is a stream. What is missing answers UNIMPLEMENTED.
        table: what each error ends a call with.
        name: of the service, instead of the descriptor's.
    """
    name = name or descriptor.full_name

    def openers(tasks: set[Any]) -> Openers:
        return {
            f"/{name}/{method.name}": _opener(name, method, methods[method.name], table, tasks)
            for method in descriptor.methods
            if method.name in methods
        }

    return openers


def _opener(
    service_name: str, described: MethodDescriptor, implementation: Any, table: Table, tasks: set[Any]
) -> Opener:
    coded = implementation if isinstance(implementation, Coded) else Coded(implementation)
    implementation = coded.implementation
    method = Method(
        f"{service_name}/{described.name}",
        table,
        # Its stub knows of `bytes` only.
        coded.decode
        or counted(cast("Callable[[Received], Any]", GetMessageClass(described.input_type).FromString)),
        coded.encode or GetMessageClass(described.output_type).SerializeToString,
    )
    if described.server_streaming:
        return to_many(method, implementation, tasks, from_many=described.client_streaming)
    if isinstance(implementation, Direct):
        return lambda stream: implementation.call(method, stream, tasks)
    return one_to_one(method, implementation, tasks)
