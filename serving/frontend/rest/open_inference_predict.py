"""Inference over REST by the Open Inference Protocol: JSON, binary tensors, generate, and event streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import msgspec
from starlette.types import Scope

from torchere.serving.errors import HandlerFailed, ServingError
from torchere.serving.frontend.model_facts import ModelFacts
from torchere.serving.frontend.open_inference.generate import Members, generate_request, generated, joined
from torchere.serving.frontend.open_inference.json_request import parse_request
from torchere.serving.frontend.open_inference.service import Outcome, whole
from torchere.serving.frontend.open_inference.tensor_request import TensorRequest
from torchere.serving.frontend.rest.call import Call, RawHeaders
from torchere.serving.frontend.rest.codec import SPELLED_HEADERS, Head, deadline_of, request_headers
from torchere.serving.frontend.rest.content_coding import Coding, deflated, inflated
from torchere.serving.frontend.rest.open_inference_wire import EVENTS, Wire, protocol_error, read_wire
from torchere.serving.frontend.rest.targets import Target
from torchere.serving.frontend.rest.tensor_exchange import (
    INLINE_JSON_BYTES,
    JSON,
    TensorExchange,
    check_accepted,
)
from torchere.serving.settings import Limits
from torchere.serving.types import InferResponse


class TensorPredictor:
    """Answers requests of the protocol. One for each event loop, used on it only."""

    def __init__(self, exchange: TensorExchange, limits: Limits) -> None:
        self._exchange = exchange
        self._limits = limits

    async def predict(
        self, call: Call, target: Target, head: Head, body: bytes | memoryview
    ) -> bytes | memoryview | None:
        """Answer a request, unless its body is for the handler as it is: then that is returned, inflated."""
        try:
            wire = read_wire(call.scope["headers"])
            if wire.coding is not None:
                body = await inflated(body, wire.coding, self._limits.max_request_bytes)
            facts = self._exchange.meant(target, wire, body)
            if facts is None:
                if wire.coding is not None:
                    _forget_coding(call.scope)
                return body
            request = await _request(target, wire, body, facts)
            outcome = await self._outcome(call, target, head, request, facts)
            if target.verb == "generate":
                members = await _generated_whole(outcome, self._limits.max_response_bytes)
                await _send(call, 200, [JSON], msgspec.json.encode(members), wire.answer_coding)
            elif wire.wants_events or target.verb == "generate_stream":
                await _send_events(call, outcome, is_generate=target.verb == "generate_stream")
            else:
                answer = self._exchange.answer(facts, request, whole(outcome))
                await _send(call, *answer, wire.answer_coding)
        except ServingError as error:
            if call.status:
                raise
            await call.answer(*protocol_error(error))
        return None

    async def _outcome(
        self, call: Call, target: Target, head: Head, request: TensorRequest, facts: ModelFacts
    ) -> Outcome:
        service = self._exchange.service
        asked = service.prepared(
            facts,
            request,
            request_id=call.request_id,
            headers=request_headers(call.scope) + target.headers,
            deadline_s=deadline_of(head, call.started_s),
        )
        return await service.ask(str(target.model), target.version, asked)


async def _request(target: Target, wire: Wire, body: bytes | memoryview, facts: ModelFacts) -> TensorRequest:
    length = len(body) if wire.json_bytes is None else wire.json_bytes
    if target.verb != "infer":
        if len(body) <= INLINE_JSON_BYTES:
            return generate_request(body, facts.signature)
        return await asyncio.to_thread(generate_request, body, facts.signature)
    if length <= INLINE_JSON_BYTES:
        request = parse_request(body, wire.json_bytes)
    else:
        request = await asyncio.to_thread(parse_request, body, wire.json_bytes)
    return _for_events(request) if wire.wants_events else request


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


async def _parts(response: Outcome) -> AsyncIterator[bytes]:
    if isinstance(response, InferResponse):
        check_accepted(response)
        yield response.body
        return
    async for chunk in response.chunks:
        yield chunk


async def _generated_whole(response: Outcome, max_bytes: int) -> Members:
    """The answer as one, however many parts it has; of those no more are held than one answer may have."""
    members, size = [], 0
    async for part in _parts(response):
        size += len(part)
        if size > max_bytes:
            raise HandlerFailed(f"The answer has more than max_response_size={max_bytes} bytes.", 500)
        members.append(generated(part))
    return joined(members)


async def _send_events(call: Call, response: Outcome, *, is_generate: bool) -> None:
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
        call.ends_with(error)
        await call.body_part(b"data: %b\n\n" % protocol_error(error)[2])
    await call.body_part(b"", last=True)
