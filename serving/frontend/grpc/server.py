"""Servers of the gRPC listeners, with the services of each: TorchServe's, v2, health and reflection."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from torchere.serving.config.server_settings import Address, ServerSettings
from torchere.serving.errors import ModelNotFound, VersionNotFound
from torchere.serving.frontend.budgets import MESSAGE_OVERHEAD_BYTES
from torchere.serving.frontend.connection_limit import limit_of_listener
from torchere.serving.frontend.control import ControlPlane
from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.grpc.call import Call
from torchere.serving.frontend.grpc.errors import INFERENCE, MANAGEMENT, OPEN_INFERENCE, Table
from torchere.serving.frontend.grpc.health import HEALTH, HealthService
from torchere.serving.frontend.grpc.inference import InferenceService
from torchere.serving.frontend.grpc.management import ManagementService
from torchere.serving.frontend.grpc.open_inference import Tensors
from torchere.serving.frontend.grpc.open_inference_control import ModelCalls
from torchere.serving.frontend.grpc.open_inference_descriptors import (
    PUBLIC_NAME,
    REFLECTION,
    REFLECTION_NAMES,
    SERVICE,
    TORCHSERVE_NAME,
    reflection_pool,
)
from torchere.serving.frontend.grpc.open_inference_messages import RawAnswers
from torchere.serving.frontend.grpc.protos import inference_pb2, management_pb2
from torchere.serving.frontend.grpc.service import Openers, Service, dispatcher, service
from torchere.serving.frontend.grpc.streams import SHUTTING_DOWN
from torchere.serving.frontend.http2.connection import Connection
from torchere.serving.frontend.http2.listener import Listener
from torchere.serving.frontend.http2.messages import MessageFailed, StatusCode
from torchere.serving.frontend.open_inference.service import TensorService
from torchere.serving.frontend.services import Services
from torchere.serving.frontend.tls_server import TlsServer, bound_sockets

Api = Literal["inference", "management"]

_INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceAPIsService"]
_MANAGEMENT = management_pb2.DESCRIPTOR.services_by_name["ManagementAPIsService"]
_BACKLOG = 1024
_SENDING_S = 0.5  # how long to wait for clients to read the status of their ended calls
_ENDING_S = 5.0  # how long to wait for cancelled calls to end


class GrpcServer:
    """One gRPC listener of one API. Start and stop it on the event loop that serves.

    Example:
        server = inference_server(dataplane, controlplane, services, Address(port=0))
        address = await server.start()      # has the port that was chosen
        ...
        await server.stop(grace_s=30)
    """

    def __init__(
        self, api: Api, address: Address, services: Services, offered: Sequence[Service], names: Iterable[str]
    ) -> None:
        self.api: Api = api
        self.address = address
        self._services = services
        self._tasks: set[asyncio.Task[None]] = set()
        settings = services.settings
        is_local = settings.insecure_management == "local"
        openers: Openers = {}
        for one in (*offered, *reflection_services(names)):
            openers |= one(self._tasks, services.metrics)
        self.methods = frozenset(openers)  # paths
        limits = settings.limits
        self._limit = limit_of_listener(api == "inference", limits.max_connections, services.budgets)
        self._listener = Listener(
            dispatcher(
                openers,
                services.keys,
                api,
                services.metrics,
                changes="all"
                if settings.allows_management(address)
                else ("this machine" if is_local else "none"),
                limits=services.client_limits,
            ),
            limits.max_request_bytes + MESSAGE_OVERHEAD_BYTES,
            limits.max_response_bytes + MESSAGE_OVERHEAD_BYTES,
            *_ages(api, settings),
            budgets=services.budgets,
            min_upload_rate=limits.min_upload_rate,
            connection_limit=self._limit,
        )
        self._servers: Sequence[asyncio.Server | TlsServer] = ()

    async def start(self) -> Address:
        """Bind and begin to serve; return the address with its actual port.

        Raises:
            OSError: the address can't be bound.
        """
        context, listener = _tls(self._services), self._listener
        sockets = await bound_sockets(self.address, _BACKLOG)
        if self.address.unix_path is None:
            for each in sockets:  # connections inherit it; detects clients that vanished
                each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            port = sockets[0].getsockname()[1]
            self.address = Address(self.address.host, port, tls=self.address.tls)
        connected = partial(Connection, listener)
        if context is not None:
            self._servers = [TlsServer(sockets, context, self._limit, listener.connections, connected)]
        else:
            loop = asyncio.get_running_loop()
            self._servers = [
                await loop.create_server(connected, sock=each, backlog=_BACKLOG) for each in sockets
            ]
        return self.address

    async def stop(self, grace_s: float) -> None:
        """Refuse new connections; end calls that still run after `grace_s` with UNAVAILABLE."""
        if not self._servers:
            return
        for server in self._servers:
            server.close()
        self._listener.drain()
        await self._listener.all_closed(grace_s)
        self._listener.end_calls(MessageFailed(StatusCode.UNAVAILABLE, SHUTTING_DOWN))
        await self._listener.all_closed(_SENDING_S)
        self._listener.abort()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_ENDING_S)
        if self.address.unix_path is not None:
            Path(self.address.unix_path).unlink(missing_ok=True)


def inference_server(
    dataplane: DataPlane, controlplane: ControlPlane, services: Services, address: Address
) -> GrpcServer:
    """Return the listener of the inference services, with health and reflection."""
    names = [_INFERENCE.full_name]
    offered = [service(_INFERENCE, InferenceService(dataplane).methods(), INFERENCE)]
    if services.settings.open_inference_protocol:
        names += [PUBLIC_NAME, TORCHSERVE_NAME]
        offered += open_inference_services(dataplane, controlplane, services)
    health = HealthService(dataplane, frozenset(names), services.budgets)
    offered.append(service(HEALTH, health.methods(), MANAGEMENT))
    return GrpcServer("inference", address, services, offered, (*names, HEALTH.full_name))


def management_server(
    dataplane: DataPlane, controlplane: ControlPlane, services: Services, address: Address
) -> GrpcServer:
    """Return the listener of the management service, with health and reflection."""
    names = (_MANAGEMENT.full_name, HEALTH.full_name)
    health = HealthService(dataplane, frozenset({_MANAGEMENT.full_name}), services.budgets)
    offered = [
        service(_MANAGEMENT, ManagementService(controlplane).methods(), MANAGEMENT),
        service(HEALTH, health.methods(), MANAGEMENT),
    ]
    return GrpcServer("management", address, services, offered, names)


def grpc_listeners(dataplane: DataPlane, controlplane: ControlPlane, services: Services) -> list[GrpcServer]:
    """Return the configured listeners, not started."""
    settings = services.settings
    wanted: list[GrpcServer] = []
    if settings.grpc_inference_address is not None:
        wanted.append(inference_server(dataplane, controlplane, services, settings.grpc_inference_address))
    if settings.grpc_management_address is not None:
        wanted.append(management_server(dataplane, controlplane, services, settings.grpc_management_address))
    return wanted


def _ages(api: Api, settings: ServerSettings) -> tuple[float | None, float | None]:
    """Return the maximum age of connections, and the grace period for their last calls, both in seconds."""
    if api == "inference":
        age_ms = settings.grpc_inference_max_connection_age_ms
        grace_ms = settings.grpc_inference_max_connection_age_grace_ms
    else:
        age_ms = settings.grpc_management_max_connection_age_ms
        grace_ms = settings.grpc_management_max_connection_age_grace_ms
    return None if age_ms is None else age_ms / 1000, None if grace_ms is None else grace_ms / 1000


def _tls(services: Services) -> ssl.SSLContext | None:
    if not services.settings.grpc_tls_enabled:
        return None
    if services.certificates is None:
        raise OSError("enable_grpc_ssl needs private_key_file and certificate_file, and one is not set")
    return services.certificates.server_context(http2=True)


# TorchServe's service answers INTERNAL to an inference request for a model that is not registered, as its
# other inference service does, and NOT_FOUND to other calls for such a model.
_TORCHSERVE_MODELS: Table = {
    **INFERENCE,
    ModelNotFound: MANAGEMENT[ModelNotFound],
    VersionNotFound: MANAGEMENT[VersionNotFound],
}


def open_inference_services(
    dataplane: DataPlane, controlplane: ControlPlane, services: Services
) -> list[Service]:
    """Return the services under the protocol's name and TorchServe's; `Tensors` tells the differences."""
    tensors = TensorService(dataplane, services.settings.service_envelope)
    answers = RawAnswers()
    public = Tensors(dataplane, tensors, answers, as_torchserve=False).methods()
    torchserves = Tensors(dataplane, tensors, answers, as_torchserve=True).methods()
    public_models = ModelCalls(dataplane, controlplane, unknown_is_unready=True).methods()
    torchserves_models = ModelCalls(dataplane, controlplane, unknown_is_unready=False).methods()
    return [
        service(SERVICE, public_models, OPEN_INFERENCE, PUBLIC_NAME),
        service(SERVICE, public, OPEN_INFERENCE, PUBLIC_NAME),
        service(SERVICE, torchserves_models, _TORCHSERVE_MODELS, TORCHSERVE_NAME),
        service(SERVICE, torchserves, INFERENCE, TORCHSERVE_NAME),
    ]


_FILES = (inference_pb2.DESCRIPTOR, management_pb2.DESCRIPTOR, HEALTH.file)


def reflection_services(names: Iterable[str]) -> list[Service]:
    """Return reflection under both of its names, for the services with these names and for itself."""

    @cache
    def servicer() -> Any:
        from grpc_reflection.v1alpha import reflection  # noqa: PLC0415 - loads all of grpcio, and few call it

        return reflection.aio.ReflectionServicer((*names, *REFLECTION_NAMES), reflection_pool(_FILES))

    async def info(requests: AsyncIterator[Any], call: Call) -> AsyncIterator[Any]:
        async for answer in servicer().ServerReflectionInfo(requests, None):
            yield answer

    methods = {"ServerReflectionInfo": info}
    return [service(REFLECTION, methods, MANAGEMENT, name) for name in REFLECTION_NAMES]
