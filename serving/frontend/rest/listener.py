"""State shared by the connections of one REST port."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from torchere.serving.frontend.access_log import access_log
from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.rest.answer_parts import cors_headers
from torchere.serving.frontend.rest.authorisation import Surfaces
from torchere.serving.frontend.rest.deferred import DeferredApp
from torchere.serving.frontend.rest.heads import Heads
from torchere.serving.frontend.rest.tensors import Tensors
from torchere.serving.frontend.services import Services
from torchere.serving.logs.access_lines import Client

if TYPE_CHECKING:
    from torchere.serving.frontend.rest.connection import Connection

BAD_REQUEST = "GET /bad-request HTTP/1.1"  # TorchServe's access log shows this for a malformed request
KEEP_ALIVE_S = 75.0  # idle connections; longer than the 60 s of common load balancers, so they close first
# Size of one read: enough for a head and a small body. More would copy bytes of a large body, which can be
# read directly into its own buffer.
READ_BYTES = 32_768


class Listener:
    """Shared state of the connections of one REST port. Serves one event loop.

    Connections answer predictions themselves; `routes`, an ASGI app, answers all other requests.
    """

    def __init__(
        self, surfaces: Surfaces, services: Services, dataplane: DataPlane, routes: DeferredApp
    ) -> None:
        settings = services.settings
        self.routes = routes
        self.dataplane = dataplane
        self.metrics = services.metrics
        self.keys = services.keys
        self.limits = settings.limits
        self.budgets = services.budgets
        self.cors = cors_headers(services.cors)
        # Error details are for operators, not for clients of the other APIs.
        self.show_detail = surfaces == {"management"}
        self.tensors: Tensors | None = None  # None: handlers get requests of that protocol as plain bodies
        if settings.open_inference_protocol:
            self.tensors = Tensors(dataplane, settings.service_envelope)
        self.heads = Heads(
            surfaces, settings.limits.max_request_bytes, speaks_tensors=self.tensors is not None
        )
        self.buffer = bytearray(READ_BYTES)  # shared by all connections: see `Connection`
        self.view = memoryview(self.buffer)
        self.keep_alive_s = KEEP_ALIVE_S
        self.draining = False  # True: a response closes its connection
        self.connections: set[Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()  # tasks that answer requests

    def keep(self, task: asyncio.Task[None]) -> None:
        """Keep a reference to a task that answers a request; the server waits for it when it stops."""
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def refused(self, client: Client, status: int) -> None:
        """Count and log a malformed request that a connection has refused."""
        self.metrics.request_finished(status)
        if access_log.enabled:
            access_log.add(client, BAD_REQUEST, status, time.monotonic())
