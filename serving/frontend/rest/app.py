"""Builds the ASGI app of each REST port."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from torchere.serving.frontend.controlplane import ControlPlane
from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.description import pretty
from torchere.serving.frontend.rest.answers import ANY_METHOD, answer_errors, json_answer, no_such_method
from torchere.serving.frontend.rest.authorisation import Surfaces
from torchere.serving.frontend.rest.direct import DirectPredictions
from torchere.serving.frontend.rest.inference import inference_routes, prediction_options
from torchere.serving.frontend.rest.listener import Listener
from torchere.serving.frontend.rest.log_level import log_level_routes
from torchere.serving.frontend.rest.management import ModelRoutes
from torchere.serving.frontend.rest.open_inference import health_routes, model_routes, repository_routes
from torchere.serving.frontend.rest.open_inference_predict import TensorPredictor
from torchere.serving.frontend.rest.openapi import listener_document
from torchere.serving.frontend.rest.predict import Predictor
from torchere.serving.frontend.rest.probes import metrics_routes, ping_routes, probe_routes
from torchere.serving.frontend.rest.tokens import token_routes
from torchere.serving.frontend.rest.workflows import workflow_routes
from torchere.serving.frontend.services import Services
from torchere.serving.settings import Address, ServerSettings


def inference_app(dataplane: DataPlane, controlplane: ControlPlane, services: Services) -> ASGIApp:
    """The app of the inference port."""
    return listener_app(frozenset({"inference"}), dataplane, controlplane, services)


def management_app(dataplane: DataPlane, controlplane: ControlPlane, services: Services) -> ASGIApp:
    """The app of the management port."""
    return listener_app(frozenset({"management"}), dataplane, controlplane, services)


def metrics_app(dataplane: DataPlane, controlplane: ControlPlane, services: Services) -> ASGIApp:
    """The app of the metrics port."""
    return listener_app(frozenset({"metrics"}), dataplane, controlplane, services)


def shared_app(dataplane: DataPlane, controlplane: ControlPlane, services: Services) -> ASGIApp:
    """The app of a port that answers all three APIs."""
    return listener_app(frozenset({"inference", "management", "metrics"}), dataplane, controlplane, services)


def listener_app(
    surfaces: Surfaces, dataplane: DataPlane, controlplane: ControlPlane, services: Services
) -> ASGIApp:
    """The app of a port that answers the named APIs. Use it on one event loop only."""
    settings = services.settings
    max_request_bytes = settings.limits.max_request_bytes
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    answer_errors(app, show_detail=surfaces == {"management"})
    app.include_router(_description_routes(surfaces, services))
    if surfaces != {"metrics"}:
        app.include_router(probe_routes(dataplane))
    if "metrics" in surfaces:
        app.include_router(metrics_routes(services.metrics, services.settings.metrics_mode))
    if "inference" in surfaces:
        app.include_router(ping_routes(dataplane))
        if settings.open_inference_protocol:
            app.include_router(health_routes(dataplane))
            app.include_router(model_routes(dataplane))
        app.include_router(inference_routes())
    if "management" in surfaces:
        app.include_router(ModelRoutes(controlplane, max_request_bytes).router())
        app.include_router(workflow_routes())
        app.include_router(log_level_routes())
        if settings.open_inference_protocol:
            app.include_router(repository_routes(controlplane, max_request_bytes))
        if services.keys is not None:
            app.include_router(token_routes(services.keys))
    predictor = direct = None
    if "inference" in surfaces:
        app.include_router(prediction_options(dataplane))
        tensors = None
        if settings.open_inference_protocol:
            tensors = TensorPredictor(dataplane, settings.service_envelope)
        predictor = Predictor(dataplane, max_request_bytes, tensors)
        direct = DirectPredictions(surfaces, services, dataplane)
    return Listener(surfaces, services, app, predictor, direct)


def listeners(settings: ServerSettings) -> list[tuple[Address, Surfaces]]:
    """Which ports to open, and what each answers: equal addresses share one listener.

    Port 0 means any free port, so two of those are never the same. A listener that two or more APIs share
    answers the metrics as well, as long as there is a metrics listener at all.
    """
    wanted: list[tuple[Address, Surfaces]] = [
        (settings.inference_address, frozenset({"inference"})),
        (settings.management_address, frozenset({"management"})),
    ]
    if settings.metrics_address is not None:
        wanted.append((settings.metrics_address, frozenset({"metrics"})))
    merged: list[tuple[Address, Surfaces]] = []
    for address, surfaces in wanted:
        same = [i for i, (other, _) in enumerate(merged) if other == address and _is_fixed(address)]
        if same:
            merged[same[0]] = (address, merged[same[0]][1] | surfaces)
        else:
            merged.append((address, surfaces))
    extra: Surfaces = frozenset() if settings.metrics_address is None else frozenset({"metrics"})
    return [(address, surfaces | extra if len(surfaces) > 1 else surfaces) for address, surfaces in merged]


def _is_fixed(address: Address) -> bool:
    return address.unix_path is not None or address.port != 0


def _description_routes(surfaces: Surfaces, services: Services) -> APIRouter:
    router = APIRouter()
    text = pretty(listener_document(surfaces, services.server_version))

    async def describe_api(request: Request) -> Response:
        return json_answer(text)

    router.add_api_route("/", describe_api, methods=["OPTIONS"])
    router.add_api_route("/", no_such_method, methods=ANY_METHOD)
    router.add_api_route("/api-description", describe_api, methods=ANY_METHOD)
    return router
