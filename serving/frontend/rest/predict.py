"""The hot path: a prediction from ASGI messages to ASGI messages, with no framework in between."""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

from starlette.types import Receive

from torchere.serving.errors import HandlerFailed, InvalidRequest, ServingError
from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.rest.body import ClientGone, read_body
from torchere.serving.frontend.rest.call import Call, handler_headers
from torchere.serving.frontend.rest.codec import body_parameters, deadline, form_parameters, request_headers
from torchere.serving.frontend.rest.disconnect import DisconnectWatch
from torchere.serving.frontend.rest.targets import Target
from torchere.serving.types import NO_DEADLINE, InferRequest, InferResponse, Parameter, StreamedResponse

logger = logging.getLogger(__name__)


class _Head(NamedTuple):
    """The request headers that the server itself minds."""

    content_type: str = ""
    length: int = 0
    timeout_ms: bytes = b""


class Predictor:
    """Answers every path that asks for a prediction. One for each event loop, used on it only."""

    def __init__(self, dataplane: DataPlane, max_request_bytes: int) -> None:
        self._dataplane = dataplane
        self._max_request_bytes = max_request_bytes
        self._watch = DisconnectWatch()

    async def predict(self, call: Call, target: Target, receive: Receive) -> None:
        """Read the request, have it answered, send the answer.

        Raises:
            ServingError: before anything was sent; the caller answers it.
            BodyTooLarge, ClientGone: from reading the body, or the client went away while it waited.
        """
        head = _read_head(call)
        body = await read_body(receive, head.length, self._max_request_bytes)
        parameters = body_parameters(head.content_type, body)
        if target.takes_query:
            parameters = form_parameters(call.scope["query_string"]) + parameters
        model = target.model if target.model is not None else self._model_named_in(parameters)
        headers = request_headers(call.scope) + target.headers
        deadline_s = deadline(head.timeout_ms, call.started_s) if head.timeout_ms else NO_DEADLINE
        request = InferRequest(call.request_id, parameters, headers, deadline_s)
        watched = self._watch.enter(receive)
        try:
            response = await self._dataplane.infer(model, target.version, request, target.group)
            if isinstance(response, StreamedResponse):
                await _send_stream(call, response)
                return
        except asyncio.CancelledError:
            if watched.gone:
                _absorb_cancellation(watched.task)
                raise ClientGone from None
            raise
        finally:
            self._watch.leave(watched)
        await call.answer(_checked_status(response), handler_headers(response.headers), response.body)

    def _model_named_in(self, parameters: tuple[Parameter, ...]) -> str:
        # Query parameters come first in `parameters`, so they win over a field of a form.
        for parameter in parameters:
            if parameter.name == "model_name":
                return parameter.value.decode("utf-8", "replace")
        sole = self._dataplane.sole_startup_model()
        if sole is None:
            raise InvalidRequest("Parameter model_name is required.")
        return sole


def _read_head(call: Call) -> _Head:
    content_type, length, timeout_ms = "", 0, b""
    for name, value in call.scope["headers"]:
        if name == b"content-type":
            content_type = value.decode("latin-1")
        elif name == b"content-length":
            length = int(value)  # the HTTP parser let digits only through
        elif name == b"x-torchere-timeout-ms":
            timeout_ms = value
    return _Head(content_type, length, timeout_ms)


def _absorb_cancellation(task: asyncio.Task[object]) -> None:
    # From Python 3.11 a task counts its cancellations, and one that was dealt with must be taken back.
    uncancel = getattr(task, "uncancel", None)
    if uncancel is not None:
        uncancel()


def _checked_status(response: InferResponse) -> int:
    if 200 <= response.status <= 599:
        return response.status
    detail = f"the handler set the status {response.status}; a final HTTP status is from 200 to 599"
    raise HandlerFailed("Prediction failed", 500, detail)


async def _send_stream(call: Call, response: StreamedResponse) -> None:
    chunks = aiter(response.chunks)
    # The first part is awaited before the head goes out: until then a failure still gets a proper answer.
    first = await anext(chunks, b"")
    headers = [*handler_headers(response.head.headers), (b"ts_stream_next", b"true")]
    await call.start(_checked_status(response.head), headers)
    await call.body_part(first)
    try:
        async for chunk in chunks:
            await call.body_part(chunk)
    except ServingError as error:
        # The status is out already. Leaving the body without its end is what tells the client.
        logger.warning("request %s: the stream broke off: %s %s", call.request_id, error, error.detail)
        call.finished()
        return
    await call.body_part(b"", last=True)
