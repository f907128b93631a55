"""Routes of the inference API except predictions: per-model OpenAPI documents and workflows."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from torchere.serving.errors import InvalidRequest, NotFound
from torchere.serving.frontend import wording
from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.description import pretty
from torchere.serving.frontend.rest.answers import ANY_METHOD, json_answer
from torchere.serving.frontend.rest.errors import WorkflowNotFound
from torchere.serving.frontend.rest.openapi import prediction_document
from torchere.serving.frontend.rest.targets import prediction_target


def inference_routes() -> APIRouter:
    """Return the routes of workflow predictions, which answer 404."""
    router = APIRouter()

    async def predict_workflow(workflow: str) -> Response:
        raise WorkflowNotFound(f"Workflow not found: {workflow}")

    router.add_api_route("/wfpredict/{workflow}", predict_workflow, methods=ANY_METHOD)
    return router


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
