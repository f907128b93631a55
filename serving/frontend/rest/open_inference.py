"""The health and metadata routes of the Open Inference Protocol, as far as TorchServe has them (opt-in)."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.description import pretty
from torchere.serving.frontend.rest.answers import ANY_METHOD, json_answer

CONTRACT_VERSION = "0.12.0"
EXTENSIONS = ["kserve", "kubeflow"]
# The misspelt key is TorchServe's, and clients may read it; the right one stands beside it.
METADATA = {
    "name": "Torchserve",
    "version": CONTRACT_VERSION,
    "extenstion": EXTENSIONS,
    "extensions": EXTENSIONS,
}


def open_inference_routes(dataplane: DataPlane) -> APIRouter:
    """`/v2`, `/v2/health/live`, `/v2/health/ready`, and the refusal of model versions in paths."""
    router = APIRouter()

    async def metadata(request: Request) -> Response:
        return json_answer(pretty(METADATA))

    async def live(request: Request) -> Response:
        return json_answer(pretty({"live": True}))

    async def ready(request: Request) -> Response:
        is_ready = dataplane.readiness().ready
        return json_answer(pretty({"ready": is_ready}), 200 if is_ready else 503)

    async def no_versions(request: Request) -> Response:
        return json_answer(pretty({"error": "Model versioning is not yet supported."}), 501)

    router.add_api_route("/v2", metadata, methods=ANY_METHOD)
    router.add_api_route("/v2/health/live", live, methods=ANY_METHOD)
    router.add_api_route("/v2/health/ready", ready, methods=ANY_METHOD)
    router.add_api_route("/v2/models/{model}/versions/{rest:path}", no_versions, methods=ANY_METHOD)
    return router
