"""Routes that show and change what is logged."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from torchere.serving.errors import InvalidRequest
from torchere.serving.frontend.description import pretty
from torchere.serving.frontend.rest.answers import ANY_METHOD, json_answer, no_such_method
from torchere.serving.frontend.rest.codec import text_values
from torchere.serving.telemetry.log_levels import LogLevelError, change_level, levels

PATH = "/log-level"


def log_level_routes() -> APIRouter:
    """`GET /log-level` shows all levels, `PUT /log-level?logger=NAME&level=LEVEL` sets one until the end."""
    router = APIRouter()

    async def show(request: Request) -> Response:
        return json_answer(pretty(levels()))

    async def change(request: Request) -> Response:
        query = text_values(request.scope["query_string"])
        try:
            change_level(query.get("logger", ""), query.get("level", ""))
        except LogLevelError as err:
            raise InvalidRequest(str(err)) from err
        return json_answer(pretty(levels()))

    router.add_api_route(PATH, show, methods=["GET"])
    router.add_api_route(PATH, change, methods=["PUT"])
    router.add_api_route(PATH, no_such_method, methods=ANY_METHOD)
    return router
