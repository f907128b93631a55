"""`python -m transport.fronts TRANSPORT PORT SOCKET`: a gRPC server of one method that asks the worker.

Every front reads and writes `ModelInfer` with the server's own code, so that the transport alone differs.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import sys
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import grpc
import uvloop

from torchere.serving.frontend.grpc.open_inference_messages import (
    TensorReply,
    decode_request,
    encode_response,
)
from torchere.serving.frontend.grpc.protos.open_inference_pb2 import ModelInferResponse
from torchere.serving.frontend.http2.connection import Connection
from torchere.serving.frontend.http2.listener import Listener
from torchere.serving.frontend.http2.messages import MessageFailed
from torchere.serving.frontend.http2.stream import CallListener, Stream
from transport.link import Link, connected

METHOD = "/inference.GRPCInferenceService/ModelInfer"
MODELS = {"mlp": 0, "identity": 1}
LIMIT_BYTES = 64 * 2**20
POOL_THREADS = 32
GRPC_OPTIONS = [
    ("grpc.max_receive_message_length", LIMIT_BYTES),
    ("grpc.max_send_message_length", LIMIT_BYTES),
]


class Asked:
    """One request: what is asked, and how its answer is written."""

    __slots__ = ("_fields", "body", "model")

    def __init__(self, message: bytes | memoryview) -> None:
        request = decode_request(message)
        fields, raw = request.fields, request.raw
        tensor = fields.inputs[0]
        if len(raw) != 1 or tensor.datatype != "FP32" or math.prod(tensor.shape) * 4 != len(raw[0]):
            raise ValueError("expected one raw tensor of FP32")
        self.model, self.body, self._fields = MODELS[fields.model_name], raw[0], fields

    def answer(self, body: memoryview) -> Any:
        """Encode the answer, in parts when it is long."""
        response = ModelInferResponse(model_name=self._fields.model_name, model_version="1.0")
        response.outputs.add(name="y", datatype="FP32", shape=self._fields.inputs[0].shape)
        return encode_response(TensorReply(response, [body]))


def joined(encoded: Any) -> bytes:
    """Return an encoded answer in one piece, as grpcio needs it."""
    return encoded if isinstance(encoded, bytes) else b"".join(encoded)


async def ours(port: int, link: Link) -> None:
    """Serve with `serving/frontend/http2`."""

    class Call(CallListener):
        takes_one: ClassVar[bool] = True
        __slots__ = ("asked", "message", "stream")

        def __init__(self, stream: Stream) -> None:
            self.stream = stream

        def on_message(self, message: Any) -> None:
            self.message = message

        def on_half_close(self) -> None:
            self.asked = Asked(self.message)
            self.stream.consumed_all()
            link.ask(self.asked.model, self.asked.body, self.answered)

        def answered(self, status: int, body: memoryview) -> None:
            self.stream.answer(self.asked.answer(body))

        def on_failure(self, error: MessageFailed) -> None:
            self.stream.end(error.code, str(error))

    listener = Listener(Call, LIMIT_BYTES, LIMIT_BYTES)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(listener), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


def _generic(handle: Any) -> Any:
    service, _, name = METHOD[1:].rpartition("/")
    handler: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(handle)
    return grpc.method_handlers_generic_handler(service, {name: handler})


async def grpc_aio(port: int, link: Link) -> None:
    """Serve with grpcio's asyncio server."""
    loop = asyncio.get_running_loop()

    async def handle(message: bytes, context: Any) -> bytes:
        asked, future = Asked(message), loop.create_future()

        def answered(status: int, body: memoryview) -> None:
            if not future.done():  # its client may have cancelled the call
                future.set_result(body)

        link.ask(asked.model, asked.body, answered)
        return joined(asked.answer(await future))

    server = grpc.aio.server(options=GRPC_OPTIONS)
    server.add_generic_rpc_handlers((_generic(handle),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


async def grpc_pool(port: int, link: Link) -> None:
    """Serve with grpcio's pool of threads."""
    loop = asyncio.get_running_loop()

    def handle(message: bytes, context: Any) -> bytes:
        asked, future = Asked(message), concurrent.futures.Future[memoryview]()
        loop.call_soon_threadsafe(
            link.ask, asked.model, asked.body, lambda status, body: future.set_result(body)
        )
        return joined(asked.answer(future.result()))

    server = grpc.server(concurrent.futures.ThreadPoolExecutor(POOL_THREADS), options=GRPC_OPTIONS)
    server.add_generic_rpc_handlers((_generic(handle),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    await asyncio.Event().wait()


FRONTS: dict[str, Callable[[int, Link], Awaitable[None]]] = {
    "ours": ours,
    "grpc.aio": grpc_aio,
    "grpc threads": grpc_pool,
}


async def main(transport: str, port: int, path: str) -> None:
    """Serve until the process is ended."""
    await FRONTS[transport](port, await connected(path))


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
