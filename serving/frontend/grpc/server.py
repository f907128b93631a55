"""Running the gRPC listeners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from torchere.serving.frontend.controlplane import ControlPlane
from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.grpc.authorisation import TokenInterceptor
from torchere.serving.frontend.grpc.errors import INFERENCE, MANAGEMENT
from torchere.serving.frontend.grpc.health import HealthService
from torchere.serving.frontend.grpc.inference import InferenceService
from torchere.serving.frontend.grpc.management import ManagementService
from torchere.serving.frontend.grpc.open_inference_descriptors import (
    PUBLIC_NAME,
    TORCHSERVE_NAME,
    reflection_pool,
)
from torchere.serving.frontend.grpc.open_inference_services import open_inference_services
from torchere.serving.frontend.grpc.protos import inference_pb2, management_pb2
from torchere.serving.frontend.grpc.service import service
from torchere.serving.frontend.services import Services
from torchere.serving.settings import Address, ServerSettings

Api = Literal["inference", "management"]

_INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceAPIsService"]
_MANAGEMENT = management_pb2.DESCRIPTOR.services_by_name["ManagementAPIsService"]
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
_FILES = (
    *(descriptor.file for descriptor in (_INFERENCE, _MANAGEMENT, _HEALTH)),
    reflection_pb2.DESCRIPTOR,
)
_MESSAGE_OVERHEAD_BYTES = 4096  # names and tags around a body of the greatest size


class GrpcServer:
    """One gRPC listener of one API. Start and stop it on the event loop that serves.

    Example:
        server = inference_server(dataplane, controlplane, services, Address(port=0))
        address = await server.start()      # has the port that was free
        ...
        await server.stop(grace_s=30)
    """

    def __init__(
        self,
        api: Api,
        address: Address,
        services: Services,
        handlers: Sequence[grpc.GenericRpcHandler],
        names: Sequence[str],
    ) -> None:
        self.api: Api = api
        self.address = address
        self._services = services
        self._handlers = handlers
        self._names = names
        self._server: grpc.aio.Server | None = None

    async def start(self) -> Address:
        """Bind and begin to serve; returns the address with its real port.

        Raises:
            OSError: the address can't be bound.
        """
        keys = self._services.keys
        server = grpc.aio.server(
            interceptors=() if keys is None else (TokenInterceptor(keys, self.api),),
            options=_options(self.api, self._services.settings),
        )
        server.add_generic_rpc_handlers(tuple(self._handlers))
        names = (*self._names, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server, reflection_pool(_FILES))
        port = self._bind(server)
        await server.start()
        self._server = server
        self.address = Address(self.address.host, port, self.address.unix_path, self.address.tls)
        return self.address

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let those that run finish for at most `grace_s`, then cancel them."""
        if self._server is not None:
            await self._server.stop(grace_s)

    def _bind(self, server: grpc.aio.Server) -> int:
        host = f"[{self.address.host}]" if ":" in self.address.host else self.address.host
        target = f"unix:{self.address.unix_path}" if self.address.unix_path else f"{host}:{self.address.port}"
        credentials = _credentials(self._services)
        try:
            if credentials is None:
                return server.add_insecure_port(target)
            return server.add_secure_port(target, credentials)
        except RuntimeError as err:
            raise OSError(f"gRPC can't bind {target}: {err}") from err


def inference_server(
    dataplane: DataPlane, controlplane: ControlPlane, services: Services, address: Address
) -> GrpcServer:
    """The listener of the inference services, with health and reflection."""
    names = [_INFERENCE.full_name]
    handlers = [service(_INFERENCE, InferenceService(dataplane).methods(), INFERENCE)]
    if services.settings.open_inference_protocol:
        names += [PUBLIC_NAME, TORCHSERVE_NAME]
        handlers += open_inference_services(dataplane, controlplane, services)
    health = HealthService(dataplane, frozenset(names))
    handlers.append(service(_HEALTH, health.methods(), MANAGEMENT))
    return GrpcServer("inference", address, services, handlers, (*names, _HEALTH.full_name))


def management_server(
    dataplane: DataPlane, controlplane: ControlPlane, services: Services, address: Address
) -> GrpcServer:
    """The listener of the management service, with health and reflection."""
    names = (_MANAGEMENT.full_name, _HEALTH.full_name)
    health = HealthService(dataplane, frozenset({_MANAGEMENT.full_name}))
    handlers = [
        service(_MANAGEMENT, ManagementService(controlplane).methods(), MANAGEMENT),
        service(_HEALTH, health.methods(), MANAGEMENT),
    ]
    return GrpcServer("management", address, services, handlers, names)


def grpc_listeners(dataplane: DataPlane, controlplane: ControlPlane, services: Services) -> list[GrpcServer]:
    """The listeners that the settings ask for, not started."""
    settings = services.settings
    wanted: list[GrpcServer] = []
    if settings.grpc_inference_address is not None:
        wanted.append(inference_server(dataplane, controlplane, services, settings.grpc_inference_address))
    if settings.grpc_management_address is not None:
        wanted.append(management_server(dataplane, controlplane, services, settings.grpc_management_address))
    return wanted


def _options(api: Api, settings: ServerSettings) -> list[tuple[str, int]]:
    options = [
        ("grpc.max_receive_message_length", settings.limits.max_request_bytes + _MESSAGE_OVERHEAD_BYTES),
        ("grpc.max_send_message_length", settings.limits.max_response_bytes + _MESSAGE_OVERHEAD_BYTES),
        ("grpc.so_reuseport", 0),  # two servers on one port is a mistake, and must fail
    ]
    age_ms, grace_ms = {
        "inference": (
            settings.grpc_inference_max_connection_age_ms,
            settings.grpc_inference_max_connection_age_grace_ms,
        ),
        "management": (
            settings.grpc_management_max_connection_age_ms,
            settings.grpc_management_max_connection_age_grace_ms,
        ),
    }[api]
    if age_ms is not None:
        options.append(("grpc.max_connection_age_ms", age_ms))
    if grace_ms is not None:
        options.append(("grpc.max_connection_age_grace_ms", grace_ms))
    return options


def _credentials(services: Services) -> grpc.ServerCredentials | None:
    """Credentials that ask for the certificate at each new connection, so that it can be replaced."""
    if not services.settings.grpc_tls_enabled:
        return None
    certificates = services.certificates
    if certificates is None:
        raise OSError("enable_grpc_ssl needs private_key_file and certificate_file, and one is not set")

    def current() -> grpc.ServerCertificateConfiguration:
        pair = certificates.pair
        return grpc.ssl_server_certificate_configuration([(pair.private_key, pair.certificate)])

    return grpc.dynamic_ssl_server_credentials(current(), current)
