"""The standard health service: SERVING while the data plane is ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

from grpc_health.v1.health_pb2 import DESCRIPTOR, HealthCheckRequest, HealthCheckResponse

from torchere.serving.errors import NotFound
from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.grpc.call import Call
from torchere.serving.frontend.grpc.service import Implementation

HEALTH = DESCRIPTOR.services_by_name["Health"]
WATCH_S = 1.0  # how often `Watch` looks; probes do not mind a second


class HealthService:
    """Answers for the whole server ("") and for each service of this port alike."""

    def __init__(self, dataplane: DataPlane, services: frozenset[str]) -> None:
        self._dataplane = dataplane
        self._services = services | {""}

    def methods(self) -> Mapping[str, Implementation]:
        """The methods by the names of the .proto file; `List`, which newer ones have, is left out."""
        return {"Check": self.check, "Watch": self.watch}

    async def check(self, request: HealthCheckRequest, call: Call) -> HealthCheckResponse:
        """How a service is now."""
        if request.service not in self._services:
            raise NotFound(f"There is no service {request.service!r} here.")
        return self._now()

    async def watch(self, request: HealthCheckRequest, call: Call) -> AsyncIterator[HealthCheckResponse]:
        """How a service is now, and again whenever that changes, to the end of the connection.

        One that is unknown is no reason to end: clients ask again at once.
        """
        told = None
        while True:
            known = request.service in self._services
            now = self._now() if known else HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN)
            if now != told:
                yield now
                told = now
            if call.stream.connection.farewell.last_taken is not None:
                return  # or the connection would wait for its client, which waits for news
            await asyncio.sleep(WATCH_S)

    def _now(self) -> HealthCheckResponse:
        ready = self._dataplane.readiness().ready
        status = HealthCheckResponse.SERVING if ready else HealthCheckResponse.NOT_SERVING
        return HealthCheckResponse(status=status)
