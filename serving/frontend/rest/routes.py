"""Construction of the ASGI app behind a REST port: all routes except predictions.

Importing the framework takes longer than importing all our modules, so it is deferred (`listener.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from torchere.serving.config.server_settings import ServerSettings
from torchere.serving.errors import InvalidRequest, NotFound
from torchere.serving.frontend import wording
from torchere.serving.frontend.authorisation import Surfaces
from torchere.serving.frontend.control import ControlPlane
from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.description import pretty
from torchere.serving.frontend.rest.answers import ANY_METHOD, answer_errors, json_answer, no_such_method
from torchere.serving.frontend.rest.management import (
    ModelRoutes,
    log_level_routes,
    token_routes,
)
from torchere.serving.frontend.rest.open_inference import (
    absent_routes,
    health_routes,
    model_routes,
    repository_routes,
)
from torchere.serving.frontend.rest.openapi import (
    listener_document,
    open_inference_operations,
    prediction_document,
    workflow_operations,
)
from torchere.serving.frontend.rest.page import page, wants_page
from torchere.serving.frontend.rest.probes import metrics_routes, ping_routes, probe_routes
from torchere.serving.frontend.rest.targets import prediction_target
from torchere.serving.frontend.rest.workflows import WorkflowRoutes, workflow_predictions
from torchere.serving.frontend.services import Services


def routes(
    surfaces: Surfaces, dataplane: DataPlane, controlplane: ControlPlane, services: Services
) -> ASGIApp:
    """Build the app of a port that serves the named APIs. Call it in any thread; use the app on one loop."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    answer_errors(app, show_detail=services.shows_detail(surfaces))
    app.include_router(_description_routes(surfaces, services))
    if surfaces != {"metrics"}:
        app.include_router(probe_routes(dataplane))
    if "metrics" in surfaces:
        app.include_router(metrics_routes(services.metrics, services.settings.metrics_mode))
    if "inference" in surfaces:
        _add_inference(app, dataplane, services, is_management="management" in surfaces)
        app.include_router(workflow_predictions(controlplane.workflows, services))
    if "management" in surfaces:
        _add_management(app, controlplane, services)
    if "inference" in surfaces:
        app.include_router(prediction_options(dataplane))
    return app


def _add_inference(app: FastAPI, dataplane: DataPlane, services: Services, *, is_management: bool) -> None:
    app.include_router(ping_routes(dataplane))
    if services.settings.open_inference_protocol:
        app.include_router(health_routes(dataplane))
        app.include_router(model_routes(dataplane))
        app.include_router(absent_routes(is_management))


def _add_management(app: FastAPI, controlplane: ControlPlane, services: Services) -> None:
    settings = services.settings
    max_request_bytes = settings.limits.max_request_bytes
    app.include_router(ModelRoutes(controlplane, max_request_bytes, settings.strict_compatibility).router())
    app.include_router(WorkflowRoutes(controlplane.workflows, max_request_bytes).router())
    app.include_router(log_level_routes())
    if services.settings.open_inference_protocol:
        app.include_router(repository_routes(controlplane, max_request_bytes))
    if services.keys is not None:
        app.include_router(token_routes(services.keys))


def _description_routes(surfaces: Surfaces, services: Services) -> APIRouter:
    router = APIRouter()
    more = workflow_operations(surfaces)
    more += open_inference_operations(surfaces) if services.settings.open_inference_protocol else []
    text = pretty(listener_document(surfaces, services.server_version, more))

    async def describe_api(request: Request) -> Response:
        return json_answer(text)

    router.add_api_route("/", describe_api, methods=["OPTIONS"])
    if "inference" in surfaces:
        router.add_api_route("/", _page_endpoint(surfaces, services.settings), methods=["GET", "HEAD"])
    router.add_api_route("/", no_such_method, methods=ANY_METHOD)
    router.add_api_route("/api-description", describe_api, methods=ANY_METHOD)
    return router


def _page_endpoint(surfaces: Surfaces, settings: ServerSettings) -> Callable[[Request], Awaitable[Response]]:
    text, headers = page(surfaces, settings)

    async def browse(request: Request) -> Response:
        if not wants_page(request.method.encode(), request.headers.raw):
            return await no_such_method(request)
        return Response(text, headers=headers)

    return browse


def prediction_options(dataplane: DataPlane) -> APIRouter:
    """Return the route of `OPTIONS` on prediction paths. It matches every path, so include it last."""
    router = APIRouter()

    async def describe(request: Request) -> Response:
        target = prediction_target(request.scope["path"]) if request.method == "OPTIONS" else None
        if target is None:
            raise NotFound(wording.NO_SUCH_RESOURCE)
        model = target.model
        if model is None:
            model = request.query_params.get("model_name", dataplane.sole_startup_model())
        if model is None:
            raise InvalidRequest(wording.NO_MODEL_NAMED)
        dataplane.check_exists(model, target.version)
        signature = dataplane.signature_text(model, target.version)
        return json_answer(pretty(prediction_document(model, signature)))

    router.add_api_route("/{path:path}", describe, methods=ANY_METHOD)
    return router
