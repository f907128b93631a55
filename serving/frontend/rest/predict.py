"""The hot path: a prediction from ASGI messages to ASGI messages, with no framework in between."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import Protocol

from starlette.types import Receive

from torchere.serving.errors import InvalidRequest, LeftUnread, NotFound, ServingError
from torchere.serving.frontend import wording
from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.rest.body import read_body
from torchere.serving.frontend.rest.call import Call, RawHeaders, checked_status, handler_headers
from torchere.serving.frontend.rest.codec import (
    Head,
    body_parameters,
    form_parameters,
    infer_request,
    read_head,
    request_headers,
    takes_long,
)
from torchere.serving.frontend.rest.disconnect import DisconnectWatch
from torchere.serving.frontend.rest.open_inference_predict import TensorPredictor
from torchere.serving.frontend.rest.targets import Target
from torchere.serving.types import Parameter, StreamedResponse

logger = logging.getLogger(__name__)


class Predictor:
    """Answers every path that asks for a prediction. One for each event loop, used on it only."""

    def __init__(
        self, dataplane: DataPlane, max_request_bytes: int, tensors: TensorPredictor | None = None
    ) -> None:
        self._dataplane = dataplane
        self._max_request_bytes = max_request_bytes
        self._tensors = tensors  # None: requests of the Open Inference Protocol are bodies like others
        self._watch = DisconnectWatch()

    async def predict(self, call: Call, target: Target, receive: Receive) -> None:
        """Read the request, have it answered, send the answer.

        Raises:
            ServingError: before anything was sent; the caller answers it.
            BodyTooLarge, ClientGone: from reading the body, or the client went away while it waited.
        """
        head = read_head(call.scope["headers"])
        body: bytes | memoryview = await read_body(receive, head.length, self._max_request_bytes)
        call.telemetry.read_s = time.monotonic()
        if target.verb:
            rest = await self._as_tensors(call, target, head, body, receive)
            if rest is None:
                return
            body = rest
        read = partial(body_parameters, head.content_type, bytes(body), speaks_json=target.speaks_json)
        is_long = takes_long(head.content_type, len(body))
        parameters = await asyncio.to_thread(read) if is_long else read()
        query = form_parameters(call.scope["query_string"]) if target.takes_query else ()
        model = target.model if target.model is not None else self._model_named(query, parameters)
        parameters = query + parameters
        headers = request_headers(call.scope) + target.headers
        request = infer_request(call.request_id, head, parameters, headers, call.started_s)
        with self._watch.watching(receive):
            response = await self._dataplane.infer(model, target.version, request, target.group)
            if isinstance(response, StreamedResponse):
                await send_stream(call, response)
                return
        await call.answer(checked_status(response), handler_headers(response.headers), response.body)

    async def _as_tensors(
        self, call: Call, target: Target, head: Head, body: bytes | memoryview, receive: Receive
    ) -> bytes | memoryview | None:
        """Answer a request of the Open Inference Protocol; else return the body that is for the handler."""
        if self._tensors is None:
            if target.verb != "infer" or target.version is not None:
                raise NotFound(wording.NO_SUCH_RESOURCE)  # TorchServe has none of these
            return body
        with self._watch.watching(receive):
            return await self._tensors.predict(call, target, head, body)

    def _model_named(self, query: tuple[Parameter, ...], fields: tuple[Parameter, ...]) -> str:
        # What a form holds is for the handler where the start loaded one model only.
        for model in (_name_in(query), self._dataplane.sole_startup_model(), _name_in(fields)):
            if model is not None:
                return model
        raise InvalidRequest(wording.NO_MODEL_NAMED)


def _name_in(parameters: tuple[Parameter, ...]) -> str | None:
    named = (one.value for one in parameters if one.name == "model_name")
    return next((value.decode("utf-8", "replace") for value in named), None)


class Answering(Protocol):
    """What a streamed answer is sent through; see `Call`."""

    request_id: str

    async def start(self, status: int, headers: RawHeaders) -> None:
        """Send the head."""

    async def body_part(self, part: bytes, *, last: bool = False) -> None:
        """Send a part of the body."""

    def break_off(self, error: ServingError) -> None:
        """Leave the body without its end."""


async def send_stream(call: Answering, response: StreamedResponse) -> None:
    """Send a streamed answer, a chunk for each part.

    Raises:
        ServingError: before anything was sent.
    """
    chunks = aiter(response.chunks)
    # The first part is awaited before the head goes out: until then a failure still gets a proper answer.
    first = await anext(chunks, b"")
    headers = [*handler_headers(response.head.headers), (b"ts_stream_next", b"true")]
    await call.start(checked_status(response.head), headers)
    await call.body_part(first)
    try:
        async for chunk in chunks:
            await call.body_part(chunk)
    except ServingError as error:
        if not isinstance(error, LeftUnread):  # of which there is a line already
            logger.warning("request %s: the stream broke off: %s %s", call.request_id, error, error.detail)
        call.break_off(error)
        return
    await call.body_part(b"", last=True)
