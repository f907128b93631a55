"""Construction of the ASGI app behind a REST port: all routes except predictions."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from torchere.serving.config.server_settings import ServerSettings
from torchere.serving.errors import InvalidRequest, NotFound
from torchere.serving.frontend import wording
from torchere.serving.frontend.authorisation import Surfaces
from torchere.serving.frontend.control import ControlPlane
from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.description import pretty
from torchere.serving.frontend.rest.answers import (
    ANY_METHOD,
    READ,
    Endpoint,
    json_answer,
    no_such_method,
    route,
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
from torchere.serving.frontend.rest.probes import metrics_routes, ping_routes, probe_routes
from torchere.serving.frontend.rest.targets import prediction_target
from torchere.serving.frontend.rest.workflows import workflow_predictions, workflow_routes
from torchere.serving.frontend.services import Services


def routes(
    surfaces: Surfaces, dataplane: DataPlane, controlplane: ControlPlane, services: Services
) -> ASGIApp:
    """Build the app of a port that serves the named APIs. It raises its errors. Use it on one event loop."""
    found = _description_routes(surfaces, services)
    if surfaces != {"metrics"}:
        found += probe_routes(dataplane)
    if "metrics" in surfaces:
        found += metrics_routes(services.metrics, services.settings.metrics_mode)
    if "inference" in surfaces:
        found += _inference_routes(dataplane, services, is_management="management" in surfaces)
        found += workflow_predictions(controlplane.workflows, services)
    if "management" in surfaces:
        found += _management_routes(controlplane, services)
    if "inference" in surfaces:
        found += prediction_options(dataplane)
    return Router(found, redirect_slashes=False, default=_no_such_path)


async def _no_such_path(scope: Scope, receive: Receive, send: Send) -> None:
    raise NotFound(wording.NO_SUCH_RESOURCE)


def _inference_routes(dataplane: DataPlane, services: Services, *, is_management: bool) -> list[Route]:
    found = ping_routes(dataplane)
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


def prediction_options(dataplane: DataPlane) -> list[Route]:
    """Return the route of `OPTIONS` on prediction paths. It matches every path, so it goes last."""

    async def describe(request: Request) -> Response:
        target = prediction_target(request.scope["path"]) if request.method == "OPTIONS" else None
        if target is None:
            raise NotFound(wording.NO_SUCH_RESOURCE)
        model = target.model
        if model is None:
            model = request.query_params.get("model_name", dataplane.sole_startup_model())
        if model is None:
            raise InvalidRequest(wording.NO_MODEL_NAMED)
        signature = dataplane.signature_text(model, target.version)
        return json_answer(pretty(prediction_document(model, signature)))

    return [route("/{path:path}", describe, ANY_METHOD)]
