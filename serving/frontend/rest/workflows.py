"""Routes of the workflow API as TorchServe's last commit answers it: registering is off, so there is none."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from torchere.serving.errors import InvalidRequest
from torchere.serving.frontend.description import pretty
from torchere.serving.frontend.rest.answers import ANY_METHOD, json_answer, no_such_method
from torchere.serving.frontend.rest.errors import WorkflowNotFound


def workflow_routes() -> APIRouter:
    """`/workflows` and `/workflows/{w}`."""
    router = APIRouter()
    router.add_api_route("/workflows", _list, methods=["GET"])
    router.add_api_route("/workflows", _register, methods=["POST"])
    router.add_api_route("/workflows/{workflow}", _not_found, methods=["GET", "DELETE"])
    for path in ("/workflows", "/workflows/{workflow}"):
        router.add_api_route(path, no_such_method, methods=ANY_METHOD)
    return router


async def _list() -> Response:
    return json_answer(pretty({"workflows": []}))


async def _register() -> Response:
    raise InvalidRequest("Registering new workflows is disabled.")


async def _not_found(workflow: str) -> Response:
    raise WorkflowNotFound(f"Workflow not found: {workflow}")
