"""The token API: a new key for the holder of the API key."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from torchere.serving.frontend.keys import Keys
from torchere.serving.frontend.rest.answers import ANY_METHOD, json_answer


def token_routes(keys: Keys) -> APIRouter:
    """`/token?type=inference|management`. The new key stands in the key file, not in the answer."""
    router = APIRouter()

    async def renew(request: Request) -> Response:
        keys.renew(request.query_params.get("type"), request.headers.get("authorization"))
        return json_answer("")

    router.add_api_route("/token", renew, methods=ANY_METHOD)
    return router
