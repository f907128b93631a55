"""Routes of the framework, and their responses: JSON in TorchServe's layout."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from torchere.serving.errors import NotAllowed
from torchere.serving.frontend import wording
from torchere.serving.frontend.rest.codec import text_headers
from torchere.serving.frontend.rest.wire import JSON, RawHeaders, checked_status, handler_headers
from torchere.serving.frontend.wording import pretty
from torchere.serving.types import InferResponse

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]

ANY_METHOD = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"]
READ = ["GET", "HEAD"]


def json_answer(text: str, status: int = 200) -> Response:
    """Return a JSON response with a final newline; no charset, as clients compare the content type."""
    return Response(text + "\n", status, {"content-type": "application/json"})


def status_answer(sentence: str, status: int = 200) -> Response:
    """Return the response `{"status": sentence}`."""
    return json_answer(pretty({"status": sentence}), status)


def raw_answer(status: int, headers: RawHeaders, body: bytes) -> Response:
    """Return a response whose headers have the form of `wire.py`."""
    return Response(body, status, dict(text_headers(headers)))


def handler_answer(response: InferResponse, body: bytes) -> Response:
    """Return a response with a handler's status and headers; JSON, unless these name another type.

    Raises:
        HandlerFailed: as `checked_status` and `handler_headers`.
    """
    return raw_answer(checked_status(response), [JSON, *handler_headers(response.headers)], body)


class _Route(Route):
    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in (self.methods or ()):  # the framework would answer this itself
            raise NotAllowed(wording.NO_SUCH_METHOD)
        await self.app(scope, receive, send)


def route(path: str, endpoint: Endpoint, methods: Sequence[str]) -> Route:
    """Return a route for the named methods only; the framework would add HEAD to GET."""
    made = _Route(path, endpoint)
    made.methods = set(methods)
    return made


async def no_such_method(request: Request) -> Response:
    """Raise `NotAllowed`: the endpoint for methods that a path does not support."""
    raise NotAllowed(wording.NO_SUCH_METHOD)
