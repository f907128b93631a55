"""Routes that tell how the server is: liveness, readiness, `/ping`, and the metrics."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from torchere.serving.frontend import wording
from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.description import pretty
from torchere.serving.frontend.rest.answers import ANY_METHOD, json_answer, status_answer
from torchere.serving.settings import MetricsMode
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.telemetry.server_metrics import LEGACY_METRICS

METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def probe_routes(dataplane: DataPlane) -> APIRouter:
    """`/livez` answers as long as the event loop turns; `/readyz` says whether traffic may come."""
    router = APIRouter()

    async def live(request: Request) -> Response:
        return json_answer(pretty({"status": "live"}))

    async def ready(request: Request) -> Response:
        readiness = dataplane.readiness()
        if readiness.ready:
            return json_answer(pretty({"status": "ready"}))
        return json_answer(pretty({"status": "not ready", "reasons": list(readiness.reasons)}), 503)

    router.add_api_route("/livez", live, methods=["GET", "HEAD"])
    router.add_api_route("/readyz", ready, methods=["GET", "HEAD"])
    return router


def ping_routes(dataplane: DataPlane) -> APIRouter:
    """`/ping`, with any method."""
    router = APIRouter()

    async def ping(request: Request) -> Response:
        healthy = dataplane.healthy()
        return status_answer(wording.health(healthy), 200 if healthy else 500)

    router.add_api_route("/ping", ping, methods=ANY_METHOD)
    return router


def metrics_routes(metrics: Metrics, mode: MetricsMode) -> APIRouter:
    """`/metrics`, with any method and anything below it; repeatable `name[]` picks samples."""
    router = APIRouter()

    async def expose(request: Request) -> Response:
        names = frozenset(request.query_params.getlist("name[]"))
        if mode == "legacy":
            names = names & LEGACY_METRICS if names else LEGACY_METRICS
        hidden = mode == "log" or (mode == "legacy" and not names)
        text = "" if hidden else metrics.exposition(names)
        return Response(text, headers={"content-type": METRICS_CONTENT_TYPE})

    router.add_api_route("/metrics", expose, methods=ANY_METHOD)
    router.add_api_route("/metrics/{rest:path}", expose, methods=ANY_METHOD)
    return router
