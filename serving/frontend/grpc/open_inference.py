"""Inference methods of the Open Inference Protocol over gRPC: unary and streaming."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from torchere.serving.errors import InvalidRequest, NotFound, ServingError
from torchere.serving.frontend.dataplane import DataPlane, Response
from torchere.serving.frontend.grpc.call import Asked, Call, GrpcPrediction, Method
from torchere.serving.frontend.grpc.errors import OPEN_INFERENCE, failure
from torchere.serving.frontend.grpc.open_inference_messages import (
    Raw,
    RawAnswers,
    TensorMessage,
    decode_request,
    encode_response,
    infer_response,
    takes_long,
)
from torchere.serving.frontend.grpc.protos.open_inference_pb2 import (
    ModelInferRequest,
    ModelInferResponse,
    ModelStreamInferResponse,
)
from torchere.serving.frontend.grpc.service import Callback, Implementation, WithCodec
from torchere.serving.frontend.http2.messages import MessageFailed, Received
from torchere.serving.frontend.http2.stream import Encoded, Stream
from torchere.serving.frontend.open_inference.service import TensorService, filled, whole
from torchere.serving.frontend.open_inference.tensor_answer import (
    TensorAnswer,
    as_client_knows,
    check_accepted,
    in_plain_words,
    read_framed,
)
from torchere.serving.frontend.open_inference.tensor_request import MAX_NAME_LENGTH, check_length
from torchere.serving.frontend.priority import HEADER as PRIORITY_HEADER
from torchere.serving.frontend.request_id import new_request_id
from torchere.serving.logs.trace_context import trace_headers
from torchere.serving.types import InferRequest, InferResponse, StreamedResponse

FINAL = "triton_final_response"  # response parameter: whether this part is the last one
WANTS_FINAL = "triton_enable_empty_final_response"  # request parameter: end a stream with an empty part


class Tensors(NamedTuple):
    """The inference methods of one service. Used on the data plane's event loop only.

    `as_torchserve` is set for the service under TorchServe's name. It selects TorchServe's error codes. With
    an envelope, it also selects base64 for BYTES elements in the handler's JSON, and JSON for BYTES elements
    of the response.
    """

    dataplane: DataPlane
    service: TensorService
    answers: RawAnswers
    as_torchserve: bool

    def methods(self) -> Mapping[str, Implementation]:
        """Return the methods by their names in the .proto file."""
        infer = Callback(partial(_ModelInfer, self))
        return {
            "ModelInfer": WithCodec(infer, self.decode, _as_encoded, takes_long),
            "ModelStreamInfer": WithCodec(self.infer_stream, self.decode, takes_long=takes_long),
        }

    def infer_stream(
        self, requests: AsyncIterator[TensorMessage], call: Call
    ) -> AsyncGenerator[ModelStreamInferResponse, None]:
        """Answer the requests of a stream in order; an error is reported in place of the response."""
        return InferStream(self, call).answers(requests)

    def decode(self, message: Received) -> TensorMessage:
        """Decode a message; see `decode_request`."""
        return decode_request(message, self.service.known)

    def asked(self, request: TensorMessage, call: Call) -> Asked:
        """Translate a message to a prediction.

        Raises:
            ServingError: the message is not a valid request, or the model is not registered.
        """
        known = self.service.translated(request.head)
        if known is not None and list(map(len, request.raw)) == known.sizes:
            check_length("id", request.id)
            return _of_call(known.model, known.version, known.request, request.raw, call)
        message = request.fields
        if not message.model_name:
            raise InvalidRequest("Parameter model_name is required.")
        model, version = message.model_name, message.model_version or None
        tensors = request.translated()
        try:
            facts = self.dataplane.facts(model, version)
        except NotFound as error:
            raise self.dataplane.refuse_unknown(error) from None
        prepared = self.service.prepared(facts, tensors, "base64" if self.as_torchserve else "text")
        if request.raw and request.head:
            self.service.keep(request.head, version, facts, prepared)
        return _of_call(model, version, prepared, (), call)


def _of_call(
    model: str, version: str | None, prepared: InferRequest, tensors: Sequence[Raw], call: Call
) -> Asked:
    """Return the prediction of a call, with the trace context for handlers, and the priority."""
    priority = [(name, str(value)) for name, value in call.metadata if name == PRIORITY_HEADER]
    headers = (*trace_headers(call.metadata), *priority)
    return Asked(model, version, filled(prepared, tensors, new_request_id(), headers, call.deadline_s))


class _ModelInfer(GrpcPrediction):
    """A unary inference. The response has the form of the request: raw bytes or typed fields."""

    __slots__ = ("_id", "_raw", "_tensors")

    def __init__(self, tensors: Tensors, method: Method, stream: Stream) -> None:
        GrpcPrediction.__init__(self, tensors.dataplane, method, stream)
        self._tensors = tensors
        self._raw = True
        self._id = ""

    def asked(self, message: TensorMessage) -> Asked:
        if message.size > self.stream.kept_bytes:  # the decoded tensors are longer than the message
            self.stream.keep(message.size - self.stream.kept_bytes)
        asked = self._tensors.asked(message, self)
        self._raw, self._id = message.is_raw, message.id
        return asked

    def message_of(self, response: InferResponse) -> Encoded:
        if self._raw:
            return self._tensors.answers.encode(response, self._id)
        check_accepted(response)
        return encode_response(infer_response(read_framed(response.body), raw=self._raw, call_id=self._id))

    def reply(self, outcome: Response | ServingError) -> None:
        """Answer the client with the outcome of the prediction."""
        if isinstance(outcome, ServingError) and not self._tensors.as_torchserve:
            outcome = as_client_knows(outcome)
        super().reply(outcome)

    def fail(self, error: Exception) -> None:
        """End the call with an error, in the protocol's wording for the service under the protocol's name."""
        if isinstance(error, ServingError) and not self._tensors.as_torchserve:
            error = in_plain_words(error)
        super().fail(error)

    def _take_parts(self, response: StreamedResponse) -> None:
        self.withdraw()  # no client will read its parts
        whole(response)


class InferStream:
    """One call of `ModelStreamInfer`: its unanswered requests, and the bytes that its answers hold."""

    __slots__ = ("_ahead_bytes", "_answered", "_call", "_tensors", "_unanswered")

    def __init__(self, tensors: Tensors, call: Call) -> None:
        self._tensors = tensors
        self._call = call
        self._ahead_bytes = 0  # of answers that wait for earlier answers
        self._answered = asyncio.Event()
        self._unanswered: dict[TensorMessage, None] = {}  # in the order of their answers

    async def answers(
        self, requests: AsyncIterator[TensorMessage]
    ) -> AsyncGenerator[ModelStreamInferResponse, None]:
        """Yield the answers to all requests, in order."""
        try:
            async with aclosing(in_order(self._paced(requests), self._answer)) as parts:
                async for part, size in parts:
                    self._ahead_bytes -= size
                    self._call.stream.release(size)
                    yield part
        finally:
            self._call.stream.release(self._ahead_bytes)

    async def _paced(self, requests: AsyncIterator[TensorMessage]) -> AsyncIterator[TensorMessage]:
        """Yield the requests; wait while unanswered requests hold `IN_FLIGHT_BYTES`."""
        async for request in requests:
            while self._call.stream.kept_bytes >= IN_FLIGHT_BYTES:
                self._answered.clear()
                await self._answered.wait()
            self._call.stream.keep(request.size)
            self._unanswered[request] = None
            yield request

    async def _answer(self, request: TensorMessage) -> AsyncIterator[tuple[ModelStreamInferResponse, int]]:
        """Yield the parts of the answer to one request, or its error, each with its size in bytes."""
        try:
            async for response in self.parts(request):
                yield self._held(ModelStreamInferResponse(infer_response=response), request)
            return
        except ServingError as error:
            text = failure(in_plain_words(error), OPEN_INFERENCE).message
        except MessageFailed as error:
            text = str(error)
        finally:
            self._call.stream.let_go(request.size)
            self._unanswered.pop(request, None)
            self._answered.set()
        # Truncated, because dozens of answers wait in memory, and megabytes of a name compress to a kilobyte.
        names = request.fields.model_name[:MAX_NAME_LENGTH], request.fields.id[:MAX_NAME_LENGTH]
        named = ModelInferResponse(model_name=names[0], id=names[1])
        yield self._held(ModelStreamInferResponse(error_message=text, infer_response=named), request)

    def _held(
        self, part: ModelStreamInferResponse, request: TensorMessage
    ) -> tuple[ModelStreamInferResponse, int]:
        """Count the bytes of a part until it is sent; return the part with its size in bytes.

        Raises:
            MessageFailed: the part is too long, or clients have too many unread bytes of answers.
        """
        size = part.ByteSize()
        self._call.stream.check(size)  # an error while sending would end the stream with all its requests
        self._call.stream.hold(size, is_next=next(iter(self._unanswered), request) is request)
        self._ahead_bytes += size
        return part, size

    async def parts(self, asked: TensorMessage) -> AsyncIterator[ModelInferResponse]:
        """Yield the messages that answer one request; errors of the server or of the model are raised."""
        outcome = await self._tensors.dataplane.infer(*self._tensors.asked(asked, self._call))
        is_stream = isinstance(outcome, StreamedResponse)
        last: TensorAnswer | None = None
        async for last in _answers(outcome):
            part = infer_response(last, raw=asked.is_raw, call_id=asked.id).whole()
            part.parameters[FINAL].bool_param = not is_stream
            yield part
        parameters = asked.fields.parameters
        if is_stream and WANTS_FINAL in parameters and parameters[WANTS_FINAL].bool_param:
            yield _empty_end(asked.fields, last)


async def _answers(outcome: Response) -> AsyncIterator[TensorAnswer]:
    if isinstance(outcome, InferResponse):
        check_accepted(outcome)
        yield read_framed(outcome.body)
        return
    async for chunk in outcome.chunks:
        yield read_framed(chunk)


def _empty_end(message: ModelInferRequest, last: TensorAnswer | None) -> ModelInferResponse:
    response = ModelInferResponse(
        model_name=message.model_name,
        model_version=message.model_version if last is None else last.model_version,
        id=message.id,
    )
    response.parameters[FINAL].bool_param = True
    return response


def _as_encoded(message: Encoded) -> Encoded:
    return message


Request = TypeVar("Request")
Part = TypeVar("Part")
Item = TypeVar("Item")

IN_FLIGHT = 64  # requests of one stream read ahead of the answers; beyond that reading pauses
IN_FLIGHT_BYTES = 2**24  # also a limit on these requests, in bytes; far below the budget of their connection
PARTS_AHEAD = 16  # parts of one answer buffered while earlier answers are sent


async def in_order(
    requests: AsyncIterator[Request], answer: Callable[[Request], AsyncIterator[Part]]
) -> AsyncGenerator[Part, None]:
    """Yield the parts of the answers to all requests.

    Requests start, and their answers are yielded, in the order of arrival, so requests of a sequence stay in
    order. Closing this iterator cancels all running requests. An exception from `answer` ends the stream, so
    `answer` must report the error of one request as a part.

    Raises:
        Exception: reading `requests` failed; raised after the answers to the requests that were read.
    """
    running: set[asyncio.Task[None]] = set()

    def pumped(source: AsyncIterator[Item], ahead: int) -> _Pipe[Item]:
        pipe: _Pipe[Item] = _Pipe(ahead)
        task = asyncio.ensure_future(pipe.fill(source))
        running.add(task)
        task.add_done_callback(running.discard)
        return pipe

    async def begun() -> AsyncIterator[_Pipe[Part]]:
        async for request in requests:
            yield pumped(answer(request), PARTS_AHEAD)

    try:
        async for pipe in pumped(begun(), IN_FLIGHT).items():
            async for part in pipe.items():
                yield part
    finally:
        ended = list(running)
        for task in ended:
            task.cancel()
        await asyncio.gather(*ended, return_exceptions=True)


_END = object()  # after the last item of a pipe


class _Pipe(Generic[Item]):
    """A bounded queue between two tasks: one puts items, the other takes them; at most `ahead` are queued."""

    def __init__(self, ahead: int) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue(ahead)
        self._error: Exception | None = None  # the error that ended the source

    async def fill(self, source: AsyncIterator[Item]) -> None:
        """Put all items of `source` into the queue."""
        try:
            async for item in source:
                await self._queue.put(item)
        except Exception as error:  # the top of the task: `items` raises it
            self._error = error
        await self._queue.put(_END)

    async def items(self) -> AsyncIterator[Item]:
        """Yield the queued items until the end; then raise the error of `source`, if any."""
        while (item := await self._queue.get()) is not _END:
            yield item
        if self._error is not None:
            raise self._error
