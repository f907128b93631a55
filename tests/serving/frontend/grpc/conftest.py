"""A real gRPC server over the fakes, and calls to it."""

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass

from torchere.serving.config.server_settings import Address
from torchere.serving.frontend.grpc.protos import inference_pb2, management_pb2
from torchere.serving.frontend.grpc.server import inference_server, management_server

SERVICES = {
    "inference": inference_pb2.DESCRIPTOR.services_by_name["InferenceAPIsService"],
    "management": management_pb2.DESCRIPTOR.services_by_name["ManagementAPIsService"],
}


class Client:
    """Calls methods by name; the shape of a call comes from the descriptor, as in generated stubs."""

    def __init__(self, channel: grpc.aio.Channel, service) -> None:
        self._channel = channel
        self._service = service

    def __call__(self, method: str, request, **options):
        described = self._service.methods_by_name[method]
        shape: Any = {
            (False, False): self._channel.unary_unary,
            (False, True): self._channel.unary_stream,
            (True, True): self._channel.stream_stream,
        }[(described.client_streaming, described.server_streaming)]
        call = shape(
            f"/{self._service.full_name}/{method}",
            GetMessageClass(described.input_type).SerializeToString,
            GetMessageClass(described.output_type).FromString,
        )
        return call(request, **options)


@pytest.fixture
def serving(planes):
    """`async with serving("inference") as call:` a server of that API; `call.address`, `call.channel` too."""

    @contextlib.asynccontextmanager
    async def start(api: str, **settings):
        services = planes.services(**settings)
        if api == "inference":
            server = inference_server(planes.data, planes.control, services, Address(port=0))
        else:
            server = management_server(planes.data, planes.control, services, Address(port=0))
        address = await server.start()
        async with grpc.aio.insecure_channel(f"{address.host}:{address.port}") as channel:
            client = Client(channel, SERVICES[api])
            try:
                yield SimpleNamespace(call=client, channel=channel, address=address, server=server)
            finally:
                await server.stop(1)

    return start


@pytest.fixture
def ask_grpc(serving):
    """`ask_grpc(api, method, request, **options)`: one unary call to a fresh server."""

    def ask(api: str, method: str, request, settings=None, **options):
        async def main():
            async with serving(api, **(settings or {})) as served:
                return await served.call(method, request, timeout=20, **options)

        return asyncio.run(main())

    return ask


@pytest.fixture
def refusal(ask_grpc):
    """`refusal(api, method, request)`: code name and details of a call that must fail."""

    def ask(*args, **options):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            ask_grpc(*args, **options)
        return failed.value.code().name, failed.value.details()

    return ask
