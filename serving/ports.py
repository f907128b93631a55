"""The listening ports of one server, REST and gRPC: opened in turn, drained and closed together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchere.serving.addresses import refuse_taken, said_plainly
from torchere.serving.frontend.controlplane import ControlPlane
from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.grpc.server import GrpcServer, grpc_listeners
from torchere.serving.frontend.rest.app import listener_of, listeners
from torchere.serving.frontend.rest.deferred import DeferredApp
from torchere.serving.frontend.rest.server import RestServer
from torchere.serving.frontend.services import Services
from torchere.serving.settings import Address, ServerSettings


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where a started server listens, by API ("inference", "management", "metrics")."""

    rest: dict[str, Address] = field(default_factory=dict)
    grpc: dict[str, Address] = field(default_factory=dict)


class Ports:
    """The ports that the settings ask for. Lives on the event loop; `open`, `drain`, `close`, each once."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._routes: list[DeferredApp] = []
        self._rest: list[RestServer] = []
        self._metrics_only: list[RestServer] = []
        self._grpc: list[GrpcServer] = []

    async def refuse_if_taken(self) -> None:
        """Look whether other servers have the addresses; nothing is opened.

        Raises:
            ServingError: one is taken.
        """
        settings = self._settings
        rest = [address for address, _ in listeners(settings)]
        grpc = filter(None, (settings.grpc_inference_address, settings.grpc_management_address))
        await asyncio.to_thread(refuse_taken, [*rest, *grpc])

    async def open(self, dataplane: DataPlane, controlplane: ControlPlane, services: Services) -> Endpoints:
        """Open all of them.

        Raises:
            ServingError: one can't be listened on; those before it stay open until they are closed.
        """
        endpoints = Endpoints()
        for address, surfaces in listeners(self._settings):
            listener = listener_of(surfaces, dataplane, controlplane, services)
            rest = RestServer(
                listener,
                address,
                drain_timeout_s=self._settings.drain_timeout_s,
                certificates=services.certificates,
            )
            with said_plainly(address):
                bound = await rest.start()
            (self._metrics_only if surfaces == {"metrics"} else self._rest).append(rest)
            self._routes.append(listener.routes)
            endpoints.rest.update(dict.fromkeys(surfaces, bound))
        for grpc in grpc_listeners(dataplane, controlplane, services):
            with said_plainly(grpc.address):
                endpoints.grpc[grpc.api] = await grpc.start()
            self._grpc.append(grpc)
        return endpoints

    @property
    def routes(self) -> Sequence[DeferredApp]:
        """What is built of the REST ports once the server serves: see `rest/deferred.py`."""
        return self._routes

    def drain(self) -> None:
        """Serve on, and end each REST connection with its next answer; see `RestServer.drain`."""
        for rest in self._rest:
            rest.drain()

    async def close(self) -> None:
        """Close all ports but those of metrics alone; what is in is answered within `drain_timeout_s`."""
        await asyncio.gather(
            *(rest.stop() for rest in self._rest),
            *(grpc.stop(self._settings.drain_timeout_s) for grpc in self._grpc),
        )

    async def close_metrics(self) -> None:
        """Close the ports of metrics alone, which stay open longer so that the drain can be watched."""
        await asyncio.gather(*(rest.stop() for rest in self._metrics_only))
