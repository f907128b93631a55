"""Answers of the framework's routes: JSON in TorchServe's layout, and the texts for what it raises itself."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from torchere.serving.errors import NotAllowed, NotFound, ServingError
from torchere.serving.frontend import wording
from torchere.serving.frontend.description import pretty


def json_answer(text: str, status: int = 200) -> Response:
    """JSON text, closed by a newline; the content type has no charset, as clients compare it."""
    response = Response(text + "\n", status)
    response.headers["content-type"] = "application/json"
    return response


def status_answer(sentence: str, status: int = 200) -> Response:
    """`{"status": sentence}`."""
    return json_answer(pretty({"status": sentence}), status)


async def no_such_path(request: Request) -> Response:
    """For paths that nothing answers."""
    raise NotFound(wording.NO_SUCH_RESOURCE)


async def no_such_method(request: Request) -> Response:
    """For paths that exist with other methods."""
    raise NotAllowed(wording.NO_SUCH_METHOD)


def framework_error(status: int) -> ServingError:
    """What the framework's own 404 and 405 are in our error tree; any other one is a bad request."""
    if status == 404:
        return NotFound(wording.NO_SUCH_RESOURCE)
    if status == 405:
        return NotAllowed(wording.NO_SUCH_METHOD)
    return ServingError("Internal server error", f"the framework answered {status}")
