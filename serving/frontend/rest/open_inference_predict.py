"""Inference over REST by the Open Inference Protocol: JSON, binary tensors, generate, and event streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import NamedTuple

import msgspec
from starlette.types import Scope

from torchere.serving.errors import InvalidRequest, NotFound, ServingError
from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.model_facts import ModelFacts
from torchere.serving.frontend.open_inference.errors import refused_by_handler
from torchere.serving.frontend.open_inference.generate import generate_request, generated, joined
from torchere.serving.frontend.open_inference.json_request import looks_like_request, parse_request
from torchere.serving.frontend.open_inference.service import STREAMS, TensorService
from torchere.serving.frontend.open_inference.tensor_answer import encode_answer, read_json
from torchere.serving.frontend.open_inference.tensor_request import TensorRequest
from torchere.serving.frontend.rest.call import Call, RawHeaders, error_answer, handler_headers
from torchere.serving.frontend.rest.codec import SPELLED_HEADERS, Head, deadline_of, request_headers
from torchere.serving.frontend.rest.content_coding import (
    KNOWN,
    Coding,
    answer_coding,
    deflated,
    inflated,
    request_coding,
)
from torchere.serving.frontend.rest.errors import UnknownCoding
from torchere.serving.frontend.rest.targets import Target
from torchere.serving.types import InferResponse, StreamedResponse

LENGTH = "inference-header-content-length"
EVENTS = b"text/event-stream"
_JSON = (b"content-type", b"application/json")
_OCTETS = (b"content-type", b"application/octet-stream")
# Parsing more JSON than this holds the loop up for longer than handing it to a thread does.
INLINE_JSON_BYTES = 65_536


class Wire(NamedTuple):
    """The headers that only this protocol minds."""

    json_bytes: int | None = None  # how much of the body, inflated, is JSON; None: all
    wants_events: bool = False
    coding: Coding | None = None  # of the body
    answer_coding: Coding | None = None


def read_wire(headers: Iterable[tuple[bytes, bytes]]) -> Wire:
    """Pick them out.

    Raises:
        InvalidRequest: a length that is none, or a body that is compressed in an unknown way.
    """
    wire = Wire()
    for name, value in headers:
        if name == b"inference-header-content-length":
            digits = value.strip()
            if not digits.isdigit() or len(digits) > 18:
                shown = ascii(value[:80].decode("latin-1"))
                raise InvalidRequest(f"Inference-Header-Content-Length: found {shown}, expected a number")
            wire = wire._replace(json_bytes=int(digits))
        elif name == b"accept" and EVENTS in value:
            wire = wire._replace(wants_events=True)
        elif name == b"content-encoding":
            wire = wire._replace(coding=request_coding(value))
        elif name == b"accept-encoding":
            wire = wire._replace(answer_coding=answer_coding(value))
    return wire


class TensorPredictor:
    """Answers requests of the protocol. One for each event loop, used on it only."""

    def __init__(self, dataplane: DataPlane, envelope: str | None, max_request_bytes: int) -> None:
        self._dataplane = dataplane
        self._service = TensorService(dataplane, envelope)
        self._max_request_bytes = max_request_bytes

    async def predict(
        self, call: Call, target: Target, head: Head, body: bytes | memoryview
    ) -> bytes | memoryview | None:
        """Answer a request, unless its body is for the handler as it is: then that is returned, inflated.

        That is so behind an envelope, and for handlers of archives without a signature, which read the JSON
        themselves.
        """
        try:
            wire = read_wire(call.scope["headers"])
            if wire.coding is not None:
                body = await inflated(body, wire.coding, self._max_request_bytes)
            facts = self._facts(target, wire, body)
            if facts is None or (request := await self._request(target, wire, body, facts)) is None:
                if wire.coding is not None:
                    _forget_coding(call.scope)
                return body
            translated = target.verb == "infer" and self._service.enveloped(facts)
            await self._answer(call, target, head, request, wire, translated=translated)
        except ServingError as error:
            if call.status:
                raise
            await call.answer(*protocol_error(error))
        return None

    def _facts(self, target: Target, wire: Wire, body: bytes | memoryview) -> ModelFacts | None:
        """The version that is meant; None when it is not there, and the client speaks no protocol of ours."""
        try:
            return self._dataplane.facts(str(target.model), target.version)
        except NotFound:
            is_ours = target.verb != "infer" or target.version is not None or wire.json_bytes is not None
            if not is_ours and not looks_like_request(body):
                return None
            raise

    async def _request(
        self, target: Target, wire: Wire, body: bytes | memoryview, facts: ModelFacts
    ) -> TensorRequest | None:
        """The request; None when the body is for the handler as it is."""
        if target.verb != "infer":
            return generate_request(body, facts.signature)
        if wire.json_bytes is None and self._is_for_handler(target, facts):
            return None
        request = await self._parsed(body, wire.json_bytes)
        return _for_events(request) if wire.wants_events else request

    def _is_for_handler(self, target: Target, facts: ModelFacts) -> bool:
        """Whether JSON at this path is the handler's own affair, as it is with TorchServe.

        TorchServe has no versions in such paths, so what names one was not written for it.
        """
        return self._service.enveloped(facts) or (facts.signature is None and target.version is None)

    async def _parsed(self, body: bytes | memoryview, json_bytes: int | None) -> TensorRequest:
        if (len(body) if json_bytes is None else json_bytes) <= INLINE_JSON_BYTES:
            return parse_request(body, json_bytes)
        return await asyncio.to_thread(parse_request, body, json_bytes)

    async def _answer(
        self,
        call: Call,
        target: Target,
        head: Head,
        request: TensorRequest,
        wire: Wire,
        *,
        translated: bool,
    ) -> None:
        response = await self._service.ask(
            str(target.model),
            target.version,
            request,
            request_id=call.request_id,
            headers=request_headers(call.scope) + target.headers,
            deadline_s=deadline_of(head, call.started_s),
        )
        if isinstance(response, InferResponse) and response.status >= 400:
            raise refused_by_handler(response)
        if target.verb == "generate":
            await _send_generated(call, response, wire.answer_coding)
        elif wire.wants_events or target.verb == "generate_stream":
            await _send_events(call, response, is_generate=target.verb == "generate_stream")
        elif isinstance(response, StreamedResponse):
            raise InvalidRequest(STREAMS)
        elif translated:
            await _send_translated(call, response, request, wire.answer_coding)
        else:
            headers = handler_headers(response.headers)
            await _send(call, response.status, headers, response.body, wire.answer_coding)


def protocol_error(error: ServingError) -> tuple[int, RawHeaders, bytes]:
    """Status, headers and body of an error, as this protocol's clients read it."""
    status, headers, _ = error_answer(error, show_detail=False)
    if isinstance(error, UnknownCoding):
        headers.append((b"accept-encoding", KNOWN.encode()))
    return status, headers, msgspec.json.encode({"error": error.message})


def _for_events(request: TensorRequest) -> TensorRequest:
    """Events are text, so all outputs come as JSON."""
    outputs = tuple(msgspec.structs.replace(output, binary=False) for output in request.outputs)
    return replace(request, binary=False, outputs=outputs)


def _forget_coding(scope: Scope) -> None:
    """Take `Content-Encoding` out of what a handler sees, because the body it sees is inflated."""
    for key in ("headers", SPELLED_HEADERS):
        lines = scope.get(key, ())
        scope[key] = [(name, value) for name, value in lines if name.lower() != b"content-encoding"]


async def _send(call: Call, status: int, headers: RawHeaders, body: bytes, coding: Coding | None) -> None:
    """Send a whole answer; compressed, where that is asked for and makes it shorter."""
    if coding is not None:
        packed = await deflated(body, coding)
        if len(packed) < len(body):
            body = packed
            headers.append((b"content-encoding", coding.encode()))
    await call.answer(status, headers, body)


async def _send_translated(
    call: Call, response: InferResponse, request: TensorRequest, coding: Coding | None
) -> None:
    """Send what an envelope wrote, in the form the client asks for."""
    encoded = encode_answer(read_json(response), request)
    if encoded.json_bytes is None:
        await _send(call, 200, [_JSON], encoded.body, coding)
        return
    headers = [_OCTETS, (LENGTH.encode(), b"%d" % encoded.json_bytes)]
    await _send(call, 200, headers, encoded.body, coding)


async def _parts(response: InferResponse | StreamedResponse) -> AsyncIterator[bytes]:
    if isinstance(response, InferResponse):
        yield response.body
        return
    async for chunk in response.chunks:
        yield chunk


async def _send_generated(
    call: Call, response: InferResponse | StreamedResponse, coding: Coding | None
) -> None:
    whole = joined([generated(part) async for part in _parts(response)])
    await _send(call, 200, [_JSON], msgspec.json.encode(whole), coding)


async def _send_events(call: Call, response: InferResponse | StreamedResponse, *, is_generate: bool) -> None:
    """Send each part as a server-sent event; an error after the first one is the last event."""
    parts = aiter(_parts(response))
    part: bytes | None = await anext(parts)
    await call.start(200, [(b"content-type", EVENTS)])
    try:
        while part is not None:
            data = msgspec.json.encode(generated(part)) if is_generate else part
            await call.body_part(b"data: %b\n\n" % data)
            part = await anext(parts, None)
    except ServingError as error:
        await call.body_part(b"data: %b\n\n" % protocol_error(error)[2])
    await call.body_part(b"", last=True)
