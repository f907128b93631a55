"""The standard health service: SERVING while the data plane is ready."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable, Mapping
from functools import partial

from grpc_health.v1.health_pb2 import DESCRIPTOR, HealthCheckRequest, HealthCheckResponse

from torchere.serving.errors import NotFound
from torchere.serving.frontend.budgets import WATCHES, Budgets
from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.grpc.call import OWN_MARKS, SLOTS, Call, Method, UnaryCall
from torchere.serving.frontend.grpc.service import Callback, Implementation
from torchere.serving.frontend.http2.messages import StatusCode
from torchere.serving.frontend.http2.stream import Stream

HEALTH = DESCRIPTOR.services_by_name["Health"]
# Interval of readiness checks, because no event calls `look` when an executor is lost or comes back.
LOOK_S = 1.0
# Watches need no key, and each holds 7 KiB without a time limit. gRPC clients hold one watch per channel.
MAX_CONNECTION_WATCHES = 64
MAX_WATCHES = 4096  # of a port
MAX_NAME = 100  # characters of a service's name in errors


class HealthService:
    """The standard health service. The server ("") and all services of its port share one state."""

    def __init__(
        self, dataplane: DataPlane, services: frozenset[str], budgets: Budgets | None = None
    ) -> None:
        self._dataplane = dataplane
        self._services = services | {""}
        self._budgets = budgets or Budgets()  # counts refusals
        self._open: dict[_Watch, Hashable] = {}  # all watches, oldest first, with their connections
        self._held: Counter[Hashable] = Counter()  # watches of each connection
        self._watches: set[_Watch] = set()  # those of known services
        self._told = False  # the state last sent to the watches
        self._timer: asyncio.TimerHandle | None = None

    def methods(self) -> Mapping[str, Implementation]:
        """Return the methods by their names in the .proto file; `List` of newer versions is left out."""
        return {"Check": self.check, "Watch": Callback(partial(_Watch, self))}

    def check(self, request: HealthCheckRequest, call: Call) -> HealthCheckResponse:
        """Return the state of a service."""
        if request.service not in self._services:
            raise NotFound(f"There is no service {request.service[:MAX_NAME]!r} here.")
        return _response(self._dataplane.readiness().ready)

    def watch(self, watch: _Watch, service: str) -> None:
        """Send the state of a service to a watch, now and on each change.

        An unknown service does not end the call, because clients would call again at once.
        """
        if not self._has_room(watch):
            self._refuse(watch)
            return
        self._open[watch] = watch.stream.connection
        self._held[watch.stream.connection] += 1
        if service not in self._services:
            watch.tell(HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN))
            return
        if not self._watches:
            self._dataplane.readiness_listeners.add(self.look)
            self._look_later()
        self.look()  # updates `_told`, and the other watches if it changed
        self._watches.add(watch)
        watch.tell(_response(self._told))

    def _has_room(self, watch: _Watch) -> bool:
        """Return whether a watch may begin; at `MAX_WATCHES` the oldest watch is ended to make room.

        Only the first watch of a connection ends another watch. So a few connections can't take all watches,
        and every client that loses its watch gets a new one when it calls again.
        """
        held = self._held[watch.stream.connection]
        if len(self._open) < MAX_WATCHES or held:
            return held < MAX_CONNECTION_WATCHES and len(self._open) < MAX_WATCHES
        self._refuse(next(iter(self._open)))
        return True

    def _refuse(self, watch: _Watch) -> None:
        self._budgets.refused[WATCHES] += 1
        watch.refuse()

    def forget(self, watch: _Watch) -> None:
        """Remove a watch; removing the last one stops the timer."""
        connection = self._open.pop(watch, None)
        if connection is not None:
            self._held[connection] -= 1
            if not self._held[connection]:
                del self._held[connection]
        self._watches.discard(watch)
        if not self._watches and self._timer is not None:
            self._dataplane.readiness_listeners.discard(self.look)
            self._timer.cancel()
            self._timer = None

    def look(self) -> None:
        """Check readiness once for all watches, and send it to them if it has changed."""
        ready = self._dataplane.readiness().ready
        if ready != self._told:
            self._told = ready
            for watch in list(self._watches):
                watch.tell(_response(ready))

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._look_later()
        self.look()


class _Watch(UnaryCall):
    """A call of `Watch`: it ends when the client cancels, at its deadline, or with the connection."""

    __slots__ = (*SLOTS, *OWN_MARKS, "_draining", "_expiry", "_service")

    def __init__(self, service: HealthService, method: Method, stream: Stream) -> None:
        UnaryCall.__init__(self, method, stream)
        self._service = service
        self._draining = False
        self._expiry: asyncio.TimerHandle | None = None

    def begin(self, request: HealthCheckRequest) -> None:
        """Send the state of a service to the client, and register for its changes."""
        self._expiry = self.expire_later()
        self._service.watch(self, request.service)
        if self._draining and not self.stream.ended:
            self.end()

    def tell(self, response: HealthCheckResponse) -> None:
        """Send a state. The transport disconnects a client that does not read."""
        self.stream.send(self.method.encode(response))

    def refuse(self) -> None:
        """End the call, because there are too many watches."""
        self._end_with(StatusCode.RESOURCE_EXHAUSTED, "There are too many watches: try again later")

    def on_drain(self, *, is_stop: bool) -> None:
        """Send the last state and end the call, because a watch would keep the connection open."""
        self._draining = True
        if self.read_s:  # it has begun
            self._service.look()
            self.end()

    def _ended(self, code: StatusCode) -> None:
        self._service.forget(self)
        if self._expiry is not None:
            self._expiry.cancel()
        super()._ended(code)


def _response(ready: bool) -> HealthCheckResponse:
    status = HealthCheckResponse.SERVING if ready else HealthCheckResponse.NOT_SERVING
    return HealthCheckResponse(status=status)
