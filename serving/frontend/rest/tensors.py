"""Inference of the Open Inference Protocol over REST: JSON, binary tensors, generate, event streams."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import msgspec

from torchere.handlers.encode import compact_json
from torchere.serving.errors import NotFound, OverBudget, ServingError
from torchere.serving.frontend.budgets import BudgetExceeded, outcome_of
from torchere.serving.frontend.dataplane import all_parts
from torchere.serving.frontend.model_facts import ModelFacts
from torchere.serving.frontend.open_inference.generate import generate_request, generated, joined
from torchere.serving.frontend.open_inference.json_request import (
    begins_like_request,
    looks_like_request,
    parse_request,
    tensor_alone,
)
from torchere.serving.frontend.open_inference.service import (
    KNOWN_HEAD_BYTES,
    filled,
    tensors_behind,
    whole,
)
from torchere.serving.frontend.open_inference.tensor_answer import (
    as_client_knows,
    check_accepted,
    in_plain_words,
)
from torchere.serving.frontend.open_inference.tensor_request import TensorRequest
from torchere.serving.frontend.rest.exchange import ClientConnection
from torchere.serving.frontend.rest.heads import Head
from torchere.serving.frontend.rest.predictions import Body, Prediction
from torchere.serving.frontend.rest.targets import Target
from torchere.serving.frontend.rest.wire import (
    DEFLATED_IN_THREAD_BYTES,
    EVENTS_IN_UTF8,
    JSON,
    Coding,
    RawHeaders,
    Wire,
    checked_status,
    deflate,
    handler_headers,
    handler_lines,
    inflate,
    inflate_if_short,
    protocol_error,
    read_wire,
)
from torchere.serving.types import InferRequest, InferResponse, StreamedResponse

_T = TypeVar("_T")
# Parsing more JSON than this blocks the loop for longer than a hand-over to a thread.
INLINE_JSON_BYTES = 65_536
BRIEF_JSON_BYTES = 4096  # parsed in less than half a millisecond, with any content


class TensorPrediction(Prediction):
    """A prediction at a path of the Open Inference Protocol; a plain one if the handler gets the raw body."""

    __slots__ = ("_for_handler",)

    def __init__(self, connection: ClientConnection, head: Head) -> None:
        super().__init__(connection, head)
        self._for_handler = False

    @property
    def _wire(self) -> Wire:
        wire = self.head.wire
        return read_wire(self.head.headers) if wire is None else wire

    def read(self, body: Body) -> None:
        """Decompress the body and parse its tensors, in a thread if it is long, and submit the request."""
        coding = self._wire.coding
        if coding is None:
            self._read_inflated(body)
            return
        limit_bytes = self.connection.listener.limits.max_request_bytes
        short = inflate_if_short(body, coding)
        if short is not None and len(short) <= limit_bytes:
            self._keep_inflated(short)
        else:
            self._refuse_unknown()
            lease = _room(self.connection.budget.lease_inflation, len(body), limit_bytes)
            self.off_loop(self._keep_inflated, partial(inflate, body, coding, limit_bytes), lease)

    def _keep_inflated(self, body: bytes) -> None:
        _room(self.connection.budget.take, len(body))
        self._read_inflated(body)

    def _read_inflated(self, body: Body) -> None:
        wire, target = self._wire, self.head.target
        if target is None:
            raise NotFound(f"{self.head.place.path} is no path of the Open Inference Protocol")
        if self._ask_known(target, wire, body):
            return
        facts = self._meant(target, wire, body)
        if facts is None:
            self._for_handler = True
            if wire.coding is not None:
                self.head = self.head.inflated()
            super().read(body)
            return
        if target.verb == "infer" and wire.json_bytes == 0:
            parse, length = partial(tensor_alone, body, facts.signature), 0
        elif target.verb == "infer":
            parse = partial(parse_request, body, wire.json_bytes)
            length = len(body) if wire.json_bytes is None else wire.json_bytes
        else:
            parse = partial(generate_request, body, facts.signature)
            length = len(body)
        turns = self.connection.listener.budgets.turns
        if length <= BRIEF_JSON_BYTES:
            self._ask_tensors(target, facts, parse(), body)
        elif length <= INLINE_JSON_BYTES and not turns.are_over:
            began_s = time.monotonic()
            try:
                request = parse()
            finally:
                turns.spend(time.monotonic() - began_s)
            self._ask_tensors(target, facts, request, body)
        else:
            self.in_turn(partial(self._keep_tensors, target, facts, length), parse)

    def _meant(self, target: Target, wire: Wire, body: Body) -> ModelFacts | None:
        """Return the version's facts if the body holds tensors; None if the handler gets it unparsed.

        Handlers behind an envelope, and handlers of archives without a signature, parse the JSON themselves.

        Raises:
            NotFound, Unavailable: the version is not registered; the refusal is counted.
        """
        is_infer = target.verb == "infer" and wire.json_bytes is None
        dataplane, service = self.connection.listener.dataplane, self.connection.listener.tensors
        try:
            facts = dataplane.facts(str(target.model), target.version)
        except NotFound as error:
            if is_infer and target.version is None and not _is_request(body):
                return None
            raise dataplane.refuse_unknown(error) from None
        # TorchServe has no versions in these paths, so a request with a version is not one for its handlers.
        is_opaque = service.enveloped(facts) or (facts.signature is None and target.version is None)
        return None if is_infer and is_opaque else facts

    def _keep_tensors(self, target: Target, facts: ModelFacts, length: int, request: TensorRequest) -> None:
        """Submit tensors that were parsed from `length` bytes of JSON; count the bytes that they add."""
        size = sum([len(tensor.raw) for tensor in request.inputs if isinstance(tensor.raw, bytes)])
        _room(self.connection.budget.take, max(0, size - length))
        self._ask_tensors(target, facts, request)

    def _ask_known(self, target: Target, wire: Wire, body: Body) -> bool:
        """Submit a request if its head is cached, with the bytes after it as tensors; False if it is not."""
        key = _key(target, wire, body)
        known = None if key is None else self.connection.listener.tensors.translated(key)
        if known is None or wire.json_bytes is None or sum(known.sizes) != len(body) - wire.json_bytes:
            return False
        self._submit(known.request, tensors_behind(memoryview(body), wire.json_bytes, known.sizes))
        return True

    def _ask_tensors(
        self, target: Target, facts: ModelFacts, request: TensorRequest, body: Body = b""
    ) -> None:
        service, wire = self.connection.listener.tensors, self._wire
        if target.verb == "infer" and wire.wants_events:
            request = _for_events(request)
        prepared = service.prepared(facts, request)
        key = _key(target, wire, body)
        # Heads with an id do not repeat, and would push out the others.
        if (
            key is not None
            and not request.id
            and _is_behind_head(request, len(body) - (wire.json_bytes or 0))
        ):
            service.keep(key, target.version, facts, prepared)
        self._submit(prepared)

    def _submit(self, prepared: InferRequest, tensors: Sequence[bytes | memoryview] = ()) -> None:
        """Submit a request with the headers and the deadline of this one."""
        self.fill(filled(prepared, tensors, self.request_id, self.head.texts, self.deadline()))
        if self.head.target is not None:
            self.admit(str(self.head.target.model))

    def reply(self, outcome: InferResponse | StreamedResponse | ServingError) -> None:
        """Answer the client with the outcome; errors get the status of this protocol."""
        if isinstance(outcome, ServingError) and not self._for_handler:
            outcome = as_client_knows(outcome)
        super().reply(outcome)

    def succeed(self, outcome: InferResponse | StreamedResponse) -> None:
        """Send the response in the form that the client asks for."""
        target = self.head.target
        if self._for_handler or target is None:
            super().succeed(outcome)
        elif target.verb == "generate":
            self.in_task(partial(self._send_generated, outcome))
        elif target.verb == "generate_stream" or self._wire.wants_events:
            self.in_task(partial(self._send_events, outcome, is_generate=target.verb == "generate_stream"))
        else:
            if isinstance(outcome, StreamedResponse):
                self.withdraw()  # no client will read its parts
            self._send_tensors(whole(outcome))

    def _send_tensors(self, response: InferResponse) -> None:
        """Send the handler's response, which its worker has encoded in the requested form."""
        coding = self._wire.answer_coding
        check_accepted(response)
        status = checked_status(response)
        if coding is None and not self.connection.listener.adds_headers:
            self.send_whole(status, handler_lines(response.headers), response.body)
        else:
            self._send_packed(status, handler_headers(response.headers), response.body, coding)

    def _send_packed(self, status: int, headers: RawHeaders, body: bytes, coding: Coding | None) -> None:
        """Send a complete response, compressed with `coding` if that makes it shorter."""
        if coding is None:
            self.answer(status, headers, body)
            return

        def send(packed: bytes) -> None:
            if len(packed) < len(body):
                self.answer(status, [*headers, (b"content-encoding", coding.encode())], packed)
            else:
                self.answer(status, headers, body)

        if len(body) <= DEFLATED_IN_THREAD_BYTES:
            send(deflate(body, coding))
        else:
            self.off_loop(send, partial(deflate, body, coding))

    async def _send_generated(self, outcome: InferResponse | StreamedResponse) -> None:
        """Send a response of any number of parts as one JSON object."""
        parts = await all_parts(_parts(outcome), self.connection.listener.limits.max_response_bytes)
        self._send_packed(200, [JSON], await self._generated(parts), self._wire.answer_coding)

    async def _send_events(self, outcome: InferResponse | StreamedResponse, *, is_generate: bool) -> None:
        """Send each part as a server-sent event; a later error is sent as the last event."""
        parts = aiter(_parts(outcome))
        # Up to the first event, an error becomes a plain response.
        first = await self._event(await anext(parts), is_generate=is_generate)
        head = self.start(200, [(b"content-type", EVENTS_IN_UTF8)])
        self.connection.write(head, self.framed(first))
        try:
            async for part in parts:
                await self.send_part(await self._event(part, is_generate=is_generate))
        except ServingError as error:
            status, _, text = protocol_error(error)
            await self.send_part(b"data: %b\n\n" % text)
            self.status = status  # the request is counted with the status of the error
        await self.send_part(b"", last=True)

    async def _event(self, part: bytes, *, is_generate: bool) -> bytes:
        """Return a part of a response as a server-sent event."""
        return b"data: %b\n\n" % (await self._generated([part]) if is_generate else part)

    async def _generated(self, parts: list[bytes]) -> bytes:
        """Join JSON responses of the protocol to one object of `generate`, in a thread if they are long."""
        if sum(map(len, parts)) <= INLINE_JSON_BYTES:
            return _generated_text(parts)
        work = partial(outcome_of, partial(_generated_text, parts), ServingError)
        outcome = await self.connection.listener.budgets.decodes.run(work, self.caller)
        if isinstance(outcome, ServingError):
            raise outcome
        return outcome

    def fail(self, error: ServingError) -> None:
        """Send an error in the protocol's form, or in TorchServe's if the handler gets the body as is."""
        if self._for_handler:
            super().fail(error)
        else:
            self.error = in_plain_words(error)
            self.answer(*protocol_error(self.error))


def _key(target: Target, wire: Wire, body: Body) -> Hashable | None:
    """Return the key of a head's translation in the cache; None if the translation is never kept."""
    if target.verb != "infer" or wire.json_bytes is None or wire.json_bytes > KNOWN_HEAD_BYTES:
        return None
    return target.model, target.version, wire.wants_events, bytes(body[: wire.json_bytes])


def _is_request(body: Body) -> bool:
    return looks_like_request(body) if len(body) <= INLINE_JSON_BYTES else begins_like_request(body)


def _is_behind_head(request: TensorRequest, size: int) -> bool:
    """Tell whether all inputs are views of the body, and together the `size` bytes after its JSON."""
    raws = [tensor.raw for tensor in request.inputs]
    return all(isinstance(raw, memoryview) for raw in raws) and sum(map(len, raws)) == size


def _for_events(request: TensorRequest) -> TensorRequest:
    """Return the request with all outputs as JSON, because events are text."""
    outputs = tuple(msgspec.structs.replace(output, binary=False) for output in request.outputs)
    return replace(request, binary=False, outputs=outputs)


async def _parts(response: InferResponse | StreamedResponse) -> AsyncIterator[bytes]:
    if isinstance(response, InferResponse):
        check_accepted(response)
        yield bytes(response.body)
        return
    async for chunk in response.chunks:
        yield chunk


def _generated_text(parts: Sequence[bytes]) -> bytes:
    return compact_json(joined([generated(part) for part in parts]))


def _room(ask: Callable[..., _T], *arguments: int) -> _T:
    """Call a method of a budget; turn its `BudgetExceeded` into `OverBudget`, which becomes the response."""
    try:
        return ask(*arguments)
    except BudgetExceeded as err:
        raise OverBudget(str(err)) from err
