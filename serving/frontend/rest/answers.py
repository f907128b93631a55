"""Responses of the framework's routes: JSON in TorchServe's layout, and handlers for raised errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from torchere.serving.errors import NotAllowed, NotFound, ServingError
from torchere.serving.frontend import wording
from torchere.serving.frontend.description import pretty
from torchere.serving.frontend.rest.bodies import BodyTooLarge, ClientGone
from torchere.serving.frontend.rest.errors import BodyTooLong
from torchere.serving.frontend.rest.wire import RawHeaders, error_answer

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]
Handler: TypeAlias = Callable[[Request, Exception], Awaitable[Response]]

ANY_METHOD = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"]
READ = ["GET", "HEAD"]


def json_answer(text: str, status: int = 200) -> Response:
    """Return a JSON response with a final newline; no charset, as clients compare the content type."""
    return Response(text + "\n", status, {"content-type": "application/json"})


def status_answer(sentence: str, status: int = 200) -> Response:
    """Return the response `{"status": sentence}`."""
    return json_answer(pretty({"status": sentence}), status)


def raw_answer(status: int, headers: RawHeaders, body: bytes) -> Response:
    """Return a response of the parts that the connection sends for a prediction."""
    return Response(body, status, {name.decode(): value.decode() for name, value in headers})


def route(path: str, endpoint: Endpoint, methods: Sequence[str]) -> Route:
    """Return a route for the named methods only; the framework would add HEAD to GET."""
    made = Route(path, endpoint)
    made.methods = set(methods)
    return made


async def no_such_method(request: Request) -> Response:
    """Raise `NotAllowed`: the endpoint for methods that a path does not support."""
    raise NotAllowed(wording.NO_SUCH_METHOD)


def error_handlers(*, show_detail: bool) -> dict[type[Exception], Handler]:
    """Return exception handlers that turn every error of the app's routes into a response.

    After answering an unexpected error, the framework raises it again, so that the listener can log it.
    """

    # All handlers are coroutines: the framework runs plain functions in a thread.
    def handler(convert: Callable[[Exception], ServingError]) -> Handler:
        async def answer(request: Request, error: Exception) -> Response:
            return raw_answer(
                *error_answer(convert(error), show_detail=show_detail, path=request.scope["path"])
            )

        return answer

    def empty(status: int) -> Handler:
        async def answer(request: Request, error: Exception) -> Response:
            return Response(status_code=status)

        return answer

    return {
        ServingError: handler(_as_it_is),
        HTTPException: handler(_of_framework),
        Exception: handler(_of_bug),
        BodyTooLarge: handler(_too_long),
        ClientGone: empty(499),
    }


def _too_long(error: Exception) -> ServingError:
    return BodyTooLong(error.max_bytes if isinstance(error, BodyTooLarge) else 0)


def _as_it_is(error: Exception) -> ServingError:
    return error if isinstance(error, ServingError) else _of_bug(error)


def _of_framework(error: Exception) -> ServingError:
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status == 404:
        return NotFound(wording.NO_SUCH_RESOURCE)
    return NotAllowed(wording.NO_SUCH_METHOD) if status == 405 else _of_bug(error)


def _of_bug(error: Exception) -> ServingError:
    return ServingError("Internal server error", repr(error))
