"""Routes of the server's health: liveness, readiness, `/ping`, and the metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from torchere.serving.config.server_settings import MetricsMode
from torchere.serving.errors import Cancelled
from torchere.serving.frontend import wording
from torchere.serving.frontend.dataplane import DataPlane, Readiness
from torchere.serving.frontend.description import pretty
from torchere.serving.frontend.rest.answers import ANY_METHOD, READ, json_answer, route, status_answer
from torchere.serving.frontend.rest.wire import accepts_gzip, deflate
from torchere.serving.telemetry import exposition as openmetrics_format
from torchere.serving.telemetry.exposition import wants_openmetrics
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.telemetry.scrape import Exposure
from torchere.serving.telemetry.torchserve import LEGACY_METRICS

METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def probe_routes(dataplane: DataPlane) -> list[Route]:
    """Return the routes of the probes; none needs a key.

    `/livez` answers as long as the event loop runs. `/startupz` succeeds, permanently, once every startup
    model has loaded or failed to load. `/readyz` reports whether the server, or one model, can take traffic.
    """

    async def live(request: Request) -> Response:
        return json_answer(pretty({"status": "live"}))

    async def started(request: Request) -> Response:
        return _told(dataplane.startup(), "started", "starting")

    async def ready(request: Request) -> Response:
        return _told(dataplane.readiness(), "ready", "not ready")

    async def model_ready(request: Request) -> Response:
        named = request.path_params
        return _told(dataplane.model_readiness(named["model"], named.get("version")), "ready", "not ready")

    return [
        route("/livez", live, READ),
        route("/startupz", started, READ),
        route("/readyz", ready, READ),
        route("/readyz/{model}", model_ready, READ),
        route("/readyz/{model}/{version}", model_ready, READ),
    ]


def _told(readiness: Readiness, yes: str, no: str) -> Response:
    if readiness.ready:
        return json_answer(pretty({"status": yes}))
    return json_answer(pretty({"status": no, "reasons": list(readiness.reasons)}), 503)


def ping_routes(dataplane: DataPlane) -> list[Route]:
    """Return the route `/ping`, for any method."""

    async def ping(request: Request) -> Response:
        healthy = dataplane.healthy()
        return status_answer(wording.health(healthy), 200 if healthy else 500)

    return [route("/ping", ping, ANY_METHOD)]


def _page(exposure: Exposure, names: Collection[str], *, openmetrics: bool, zipped: bool) -> bytes:
    text = exposure.text(names, openmetrics=openmetrics).encode()
    return deflate(text, "gzip") if zipped else text


def metrics_routes(metrics: Metrics, mode: MetricsMode) -> list[Route]:
    """Return the routes `/metrics` and below, for any method; repeatable `name[]` selects samples."""
    turns = asyncio.Lock()  # so that scrapes together use one thread at most

    async def expose(request: Request) -> Response:
        names = frozenset(request.query_params.getlist("name[]"))
        if mode == "legacy":
            names = names & LEGACY_METRICS if names else LEGACY_METRICS
        if mode == "log" or (mode == "legacy" and not names):
            return Response("", headers={"content-type": METRICS_CONTENT_TYPE})
        openmetrics = wants_openmetrics(request.headers.get("accept", ""))
        zipped = accepts_gzip(request.headers.get("accept-encoding", ""))
        async with turns:
            if await request.is_disconnected():
                raise Cancelled  # the scrapes behind it, and the end of the server, would wait for its page
            exposure = await metrics.expose_in_turns()
            # Written in a thread, so as not to block the loop: with many models the text has megabytes.
            body = await asyncio.to_thread(_page, exposure, names, openmetrics=openmetrics, zipped=zipped)
        content_type = openmetrics_format.CONTENT_TYPE if openmetrics else METRICS_CONTENT_TYPE
        headers = {"content-type": content_type, "vary": "Accept, Accept-Encoding"}
        return Response(body, headers={**headers, "content-encoding": "gzip"} if zipped else headers)

    return [route(path, expose, ANY_METHOD) for path in ("/metrics", "/metrics/{rest:path}")]
