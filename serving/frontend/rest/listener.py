"""State shared by the connections of one REST port."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable
from typing import Protocol

from starlette.types import ASGIApp

from torchere.serving.frontend.authorisation import RestPort, Surfaces
from torchere.serving.frontend.connection_limit import IdleConnection, limit_of_listener
from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.open_inference.service import TensorService
from torchere.serving.frontend.rest.browser_guard import BrowserGuard
from torchere.serving.frontend.rest.heads import Heads
from torchere.serving.frontend.rest.wire import cors_headers
from torchere.serving.frontend.services import Services
from torchere.serving.io.watchdog import STOPPING_TIMEOUT_S
from torchere.serving.logs.access_lines import Client, access_log

BAD_REQUEST = "GET /bad-request HTTP/1.1"  # TorchServe's access log shows this for a malformed request
# Size of one read: enough for a head and a small body. More would copy bytes of a large body, which can be
# read directly into its own buffer.
READ_BYTES = 32_768


class ListedConnection(IdleConnection, Hashable, Protocol):
    """The part of a connection that its listener and the server use."""

    def announce_end(self) -> None:
        """Close after the next response."""

    def shutdown(self) -> None:
        """Close after the current response, or after a short time if no request runs."""


class Listener:
    """Shared state of the connections of one REST port. Serves one event loop.

    Connections answer predictions themselves; `routes`, an ASGI app, answers all other requests.
    """

    def __init__(self, surfaces: Surfaces, services: Services, dataplane: DataPlane, routes: ASGIApp) -> None:
        settings = services.settings
        self.routes = routes
        self.dataplane = dataplane
        self.metrics = services.metrics
        self.keys = services.keys
        self.client_limits = services.client_limits
        self.is_open = self.keys is None and self.client_limits is None  # no request needs `authorized`
        # Models may be changed from this machine only.
        self.is_for_this_machine = "management" in surfaces and not settings.allows_management(
            settings.management_address
        )
        self.limits = settings.limits
        self.budgets = services.budgets
        self.cors = cors_headers(settings)
        self.answers_preflights = settings.cors_allowed_origin != ""
        self.server_timing = settings.server_timing
        self.adds_headers = bool(self.cors or self.server_timing)  # to answers of handlers
        # Details of errors are for operators alone.
        self.show_detail = surfaces == {"management"} and not settings.strict_compatibility
        self.tensors = TensorService(dataplane, settings.service_envelope)
        port = RestPort(
            surfaces,
            authorizes=services.keys is not None,
            asks_for_metrics=settings.metrics_authorization,
        )
        self.heads = Heads(
            port,
            settings.limits.max_request_bytes,
            BrowserGuard(surfaces, settings),
            speaks_tensors=settings.open_inference_protocol,
            takes_tokens=services.keys is not None and settings.token_auth_enabled,
        )
        self.buffer = bytearray(READ_BYTES)  # shared by all connections: see `Connection`
        self.view = memoryview(self.buffer)
        self.keep_alive_s = settings.keep_alive_s
        self.draining = False  # True: a response closes its connection
        # True: connections whose TLS handshakes end now are closed once they are idle; see also `timeout_s`
        self.stopping = False
        self.connections: set[ListedConnection] = set()
        self.connection_limit = limit_of_listener(
            "inference" in surfaces, settings.limits.max_connections, services.budgets
        )
        self.tasks: set[asyncio.Task[None]] = set()  # tasks that answer requests

    def timeout_s(self, usual_s: float) -> float:
        """Return the timeout of an incomplete request, which is shorter while the server stops."""
        return min(usual_s, STOPPING_TIMEOUT_S) if self.stopping else usual_s

    def keep(self, task: asyncio.Task[None]) -> None:
        """Keep a reference to a task that answers a request; the server waits for it when it stops."""
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def refused(self, client: Client, status: int) -> None:
        """Count and log a malformed request that a connection has refused."""
        self.metrics.request_finished(status)
        if access_log.enabled:
            access_log.add(client, BAD_REQUEST, status, time.monotonic())
