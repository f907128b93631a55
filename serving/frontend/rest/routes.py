"""The ASGI app of a REST port, and its routes about the server itself: descriptions, probes, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from torchere.serving.config.server_settings import MetricsMode, ServerSettings
from torchere.serving.errors import Cancelled, InvalidRequest, NotFound
from torchere.serving.frontend import wording
from torchere.serving.frontend.authorisation import Surfaces
from torchere.serving.frontend.control import ControlPlane
from torchere.serving.frontend.dataplane import DataPlane, Readiness
from torchere.serving.frontend.rest.answers import (
    ANY_METHOD,
    READ,
    Endpoint,
    json_answer,
    no_such_method,
    route,
    status_answer,
)
from torchere.serving.frontend.rest.management import (
    log_level_routes,
    management_routes,
    token_routes,
)
from torchere.serving.frontend.rest.open_inference import (
    absent_routes,
    health_routes,
    model_routes,
    repository_routes,
)
from torchere.serving.frontend.rest.openapi import listener_document, prediction_document
from torchere.serving.frontend.rest.page import page, wants_page
from torchere.serving.frontend.rest.targets import prediction_target
from torchere.serving.frontend.rest.wire import accepts_gzip, deflate
from torchere.serving.frontend.rest.workflows import workflow_predictions, workflow_routes
from torchere.serving.frontend.services import Services
from torchere.serving.frontend.wording import pretty
from torchere.serving.telemetry import exposition as openmetrics_format
from torchere.serving.telemetry.declared import LEGACY_METRICS
from torchere.serving.telemetry.exposition import wants_openmetrics
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.telemetry.scrape import Exposure

METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def routes(
    surfaces: Surfaces, dataplane: DataPlane, controlplane: ControlPlane, services: Services
) -> ASGIApp:
    """Build the app, for one event loop, of a port that serves the named APIs. Its caller handles errors."""
    found = _description_routes(surfaces, services)
    if surfaces != {"metrics"}:
        found += _probe_routes(dataplane)
    if "metrics" in surfaces:
        found += _metrics_routes(services.metrics, services.settings.metrics_mode)
    if "inference" in surfaces:
        found += _inference_routes(dataplane, services, is_management="management" in surfaces)
        found += workflow_predictions(controlplane.workflows, services)
    if "management" in surfaces:
        found += _management_routes(controlplane, services)
    if "inference" in surfaces:
        found += _prediction_options(dataplane)
    return Router(found, redirect_slashes=False, default=_no_such_path)


async def _no_such_path(scope: Scope, receive: Receive, send: Send) -> None:
    raise NotFound(wording.NO_SUCH_RESOURCE)


def _inference_routes(dataplane: DataPlane, services: Services, *, is_management: bool) -> list[Route]:
    async def ping(request: Request) -> Response:
        healthy = dataplane.healthy()
        return status_answer(wording.health(healthy), 200 if healthy else 500)

    found = [route("/ping", ping, ANY_METHOD)]
    if services.settings.open_inference_protocol:
        found += health_routes(dataplane) + model_routes(dataplane) + absent_routes(is_management)
    return found


def _management_routes(controlplane: ControlPlane, services: Services) -> list[Route]:
    settings = services.settings
    max_request_bytes = settings.limits.max_request_bytes
    found = management_routes(controlplane, max_request_bytes, is_strict=settings.strict_compatibility)
    found += workflow_routes(controlplane.workflows, max_request_bytes)
    found += log_level_routes()
    if services.settings.open_inference_protocol:
        found += repository_routes(controlplane, max_request_bytes)
    if services.keys is not None:
        found += token_routes(services.keys)
    return found


def _description_routes(surfaces: Surfaces, services: Services) -> list[Route]:
    settings = services.settings
    document = listener_document(
        surfaces, services.server_version, open_inference=settings.open_inference_protocol
    )
    text = pretty(document)

    async def describe_api(request: Request) -> Response:
        return json_answer(text)

    found = [route("/", describe_api, ["OPTIONS"])]
    if "inference" in surfaces:
        found.append(route("/", _page_endpoint(surfaces, settings), READ))
    found.append(route("/", no_such_method, ANY_METHOD))
    found.append(route("/api-description", describe_api, ANY_METHOD))
    return found


def _page_endpoint(surfaces: Surfaces, settings: ServerSettings) -> Endpoint:
    text, headers = page(surfaces, settings)

    async def browse(request: Request) -> Response:
        if not wants_page(request.method.encode(), request.headers.raw):
            return await no_such_method(request)
        return Response(text, headers=headers)

    return browse


def _probe_routes(dataplane: DataPlane) -> list[Route]:
    """Return the routes of the probes; none needs a key.

    `/livez` answers as long as the event loop runs. `/startupz` succeeds, permanently, once every startup
    model has loaded or failed to load. `/readyz` reports whether the server, or one model, can take traffic.
    """

    async def live(request: Request) -> Response:
        return status_answer("live")

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
        return status_answer(yes)
    return json_answer(pretty({"status": no, "reasons": list(readiness.reasons)}), 503)


def _metrics_page(exposure: Exposure, names: Collection[str], *, openmetrics: bool, zipped: bool) -> bytes:
    text = exposure.text(names, openmetrics=openmetrics).encode()
    return deflate(text, "gzip") if zipped else text


def _metrics_routes(metrics: Metrics, mode: MetricsMode) -> list[Route]:
    """Return the routes `/metrics` and below, for any method; repeatable `name[]` selects samples."""
    turns = asyncio.Lock()  # so that scrapes together use one thread at most

    async def expose(request: Request) -> Response:
        # Not whether there are exemplars by now: a client's `traceparent` must not change the format.
        has_exemplars = metrics.tracing is not None and mode == "prometheus"
        names = frozenset(request.query_params.getlist("name[]"))
        if mode == "legacy":
            names = names & LEGACY_METRICS if names else LEGACY_METRICS
        if mode == "log" or (mode == "legacy" and not names):
            return Response("", headers={"content-type": METRICS_CONTENT_TYPE})
        openmetrics = wants_openmetrics(request.headers.get("accept", ""), has_exemplars=has_exemplars)
        zipped = accepts_gzip(request.headers.get("accept-encoding", ""))
        async with turns:
            if await request.is_disconnected():
                raise Cancelled  # later scrapes, and shutdown, would wait for its page
            exposure = await metrics.expose_in_turns()
            # Written in a thread, so as not to block the loop: with many models the text has megabytes.
            body = await asyncio.to_thread(
                _metrics_page, exposure, names, openmetrics=openmetrics, zipped=zipped
            )
        content_type = openmetrics_format.CONTENT_TYPE if openmetrics else METRICS_CONTENT_TYPE
        headers = {"content-type": content_type, "vary": "Accept, Accept-Encoding"}
        return Response(body, headers={**headers, "content-encoding": "gzip"} if zipped else headers)

    return [route(path, expose, ANY_METHOD) for path in ("/metrics", "/metrics/{rest:path}")]


def _prediction_options(dataplane: DataPlane) -> list[Route]:
    """Return the route of `OPTIONS` on prediction paths. It matches every path, so it goes last."""

    async def describe(request: Request) -> Response:
        target = prediction_target(request.scope["path"]) if request.method == "OPTIONS" else None
        if target is None:
            raise NotFound(wording.NO_SUCH_RESOURCE)
        model = target.model
        if model is None:
            model = request.query_params.get("model_name") or dataplane.sole_startup_model()
        if model is None:
            raise InvalidRequest(wording.NO_MODEL_NAMED)
        signature = dataplane.signature_text(model, target.version)
        return json_answer(pretty(prediction_document(model, signature)))

    return [route("/{path:path}", describe, ANY_METHOD)]
