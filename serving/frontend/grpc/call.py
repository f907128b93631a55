"""gRPC calls with one request message, handled by callbacks without a task or a coroutine."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from google.protobuf.message import DecodeError

from torchere.serving.batching.request import Request
from torchere.serving.errors import ServingError
from torchere.serving.frontend.budgets import Lease, in_thread, outcome_of
from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.grpc.errors import Table, failure
from torchere.serving.frontend.grpc.fields import LONG_BYTES
from torchere.serving.frontend.http2.header_blocks import Metadata
from torchere.serving.frontend.http2.messages import (
    Compressed,
    MessageFailed,
    MessageTooLong,
    Received,
    StatusCode,
)
from torchere.serving.frontend.http2.stream import CallListener, Encoded, Stream
from torchere.serving.logs.access_lines import access_log
from torchere.serving.logs.trace_context import trace_of_headers
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.telemetry.numbers import Operation
from torchere.serving.types import NO_DEADLINE, InferRequest, InferResponse, StreamedResponse

if TYPE_CHECKING:
    from torchere.serving.registry.version import Version

logger = logging.getLogger(__name__)

# Delay after its deadline until a call is ended here. The data plane ends and counts predictions at their
# deadline; this timer is for calls that wait for other things.
LATE_S = 0.1


class Method(NamedTuple):
    """The codec, error table, running tasks and metrics that all calls of one method share."""

    path: str  # `package.Service/Method`
    table: Table  # the status of each error
    decode: Callable[[Received], Any]
    encode: Callable[[Any], Encoded]
    tasks: set[Any]  # running tasks of its calls
    metrics: Metrics
    takes_long: Callable[[Received], bool] | None = None  # whether to decode a long message in a thread

    def code_of(self, error: ServingError) -> str:
        """Return the name of the status code of an error."""
        return str(failure(error, self.table).code.name)


# Slots for the concrete subclasses of `Call`, which has none itself: Python can't combine two base classes
# that both have slots. `Request` already has slots for `OWN_MARKS`.
SLOTS = ("_has_line", "_message", "method", "stream")
OWN_MARKS = ("deadline_s", "read_s", "started_s")


class Call(CallListener):
    """One call. Ended once, by `answer`, `end` or `fail`. Used on the event loop only.

    Attributes:
        started_s: monotonic seconds when its headers arrived.
        deadline_s: deadline of the client in monotonic seconds, or `NO_DEADLINE`.
        read_s: monotonic seconds when its only message was complete; 0: incomplete, or a stream of messages.
    """

    if not TYPE_CHECKING:  # a type checker would take these for the complete list of attributes
        __slots__ = ()
    deadline_s: float
    read_s: float
    started_s: float
    takes_one: ClassVar[bool] = True

    def __init__(self, method: Method, stream: Stream) -> None:
        self.method = method
        self.stream = stream
        self.started_s = time.monotonic()
        timeout_s = stream.timeout_s
        self.deadline_s = NO_DEADLINE if timeout_s is None else self.started_s + timeout_s
        self.read_s = 0.0
        self._has_line = False  # whether the access log has its line, because a cancelled call may end twice
        self._message: Received | Compressed | None = None

    @property
    def prediction(self) -> Request | None:
        """The call's prediction; None before it is made, or if the call may make several."""
        return None

    @property
    def metadata(self) -> Metadata:
        """The client's metadata, with names in lower case; values of names that end in `-bin` are bytes."""
        return self.stream.head.metadata

    def operation(self) -> Operation:
        """Return the call by OpenTelemetry's conventions for RPC, for spans."""
        attributes = {"rpc.system.name": "grpc", "rpc.method": self.method.path}
        if isinstance(self.stream.client, tuple):
            attributes["client.address"] = str(self.stream.client[0])
        return Operation(self.method.path, attributes)

    def decoded(self, message: Received) -> Any:
        """Decode a message of the client.

        Raises:
            MessageFailed: the bytes are not a valid message of this method.
        """
        try:
            return self.method.decode(message)
        except DecodeError as err:
            raise MessageFailed(StatusCode.INTERNAL, "Exception deserializing request!") from err

    def takes_long(self, message: Received) -> bool:
        """Return whether a message takes so long to decode that a thread must decode it."""
        takes_long = self.method.takes_long
        return len(message) >= LONG_BYTES and takes_long is not None and takes_long(message)

    def decoded_apart(self, message: Received) -> Any:
        """As `decoded`, for the decoding thread: return a `MessageFailed`, and None if the call has ended."""
        return None if self.stream.ended else outcome_of(partial(self.decoded, message), MessageFailed)

    def end(self) -> None:
        """End the call with status OK, after the messages already sent."""
        self.stream.end()
        self._ended(StatusCode.OK)

    def answer(self, message: Any) -> None:
        """Send the only message and status OK.

        Raises:
            MessageFailed: the message is longer than the limit.
        """
        self.stream.answer(self.method.encode(message))
        self._ended(StatusCode.OK)

    def fail(self, error: Exception) -> None:
        """End the call with the status of an error; an unexpected one is logged, and gives INTERNAL."""
        if isinstance(error, MessageFailed):
            if isinstance(error, MessageTooLong):
                self.method.metrics.refused_body()
            self._end_with(error.code, str(error))
            return
        if not isinstance(error, ServingError):
            logger.error("call of %s failed unexpectedly", self.method.path, exc_info=error)
            error = ServingError("Internal server error", repr(error))
        if self.prediction is not None:
            self.prediction.error = error
        self._end_with(*failure(error, self.method.table).trailers())

    def on_failure(self, error: MessageFailed) -> None:
        """End the call with an error, because a message can't be accepted."""
        self.fail(error)

    def on_cancel(self) -> None:
        """End the call as cancelled; subclasses also stop its running work."""
        self._ended(StatusCode.CANCELLED)

    def expire_later(self) -> asyncio.TimerHandle | None:
        """Return a timer that ends the call `LATE_S` after its deadline; None if it has no deadline."""
        if self.deadline_s == NO_DEADLINE:
            return None
        delay_s = self.deadline_s - self.started_s + LATE_S
        return asyncio.get_running_loop().call_later(delay_s, self._expire)

    def _expire(self) -> None:
        if not self.stream.ended:  # uvloop runs this before a task's callback can cancel the timer
            self._end_with(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            self.on_cancel()

    def _end_with(self, code: StatusCode, message: str, details: bytes = b"") -> None:
        self.stream.end(code, message, details)
        self._ended(code)

    def _ended(self, code: StatusCode) -> None:
        self.stream.consumed_all()  # the client may read the answer slowly
        if access_log.enabled and not self._has_line:
            self._has_line = True
            line = f"gRPC {self.method.path} HTTP/2.0"
            access_log.add(self.stream.client, line, code, self.started_s, prediction=self.prediction)


class UnaryCall(Call, ABC):
    """A call with one request message."""

    if not TYPE_CHECKING:  # a type checker would take these for the complete list of attributes
        __slots__ = ()

    @abstractmethod
    def begin(self, request: Any) -> None:
        """Start to handle the decoded message."""

    def on_message(self, message: Received | Compressed) -> None:
        """Keep the message until the client's half-close."""
        if self._message is None:
            self._message = message
        else:
            self.on_failure(MessageFailed(StatusCode.INTERNAL, "found several messages, expected one"))

    def on_half_close(self) -> None:
        """Decompress the message if needed, decode it, and begin."""
        message = self._message
        if message is None:
            self.on_failure(MessageFailed(StatusCode.INTERNAL, "found no message, expected one"))
        elif isinstance(message, Compressed):
            self._inflate(message)
        elif self.takes_long(message):
            self._decode_apart(message)
        else:
            self._decode(message)

    def _decode(self, message: Received) -> None:
        try:
            self._keep(len(message))
            request = self.decoded(message)
        except MessageFailed as err:
            self.fail(err)
            return
        self.begin(request)

    def _decode_apart(self, message: Received) -> None:
        """Decode the message in a thread, under a lease, because it stays queued even if the call ends."""
        self._message = b""
        self.stream.consumed_all()
        try:
            lease = self.stream.lease(len(message))
        except MessageFailed as err:
            self.fail(err)
            return
        self._queue_decode(message, lease)

    def _queue_decode(self, message: Received, lease: Lease) -> None:
        decode, then = partial(self.decoded_apart, message), partial(self._decoded, lease, len(message))
        self.stream.budgets.decodes.add(decode, then, self.stream.caller)

    def _keep(self, size: int) -> None:
        """Count the message of `size` bytes until the call ends, because a request may wait in a queue."""
        self.read_s = time.monotonic()
        self._message = b""
        self.stream.consumed_all()
        if not self.stream.key_free:  # a health watch lasts for hours, and does not need its message
            self.stream.keep(size)

    def _inflate(self, message: Compressed) -> None:
        """Decompress the message and decode it.

        A long message is decompressed in a thread, under a lease for its maximum decompressed size. Then its
        decoding is queued, because a few kilobytes can hold fields that take tens of milliseconds.
        """
        self._message = b""
        try:
            inflated = message.inflated_if_short()
            if inflated is not None:
                self._decode(inflated)
                return
            lease = self.stream.hold_while_inflating(message)
        except MessageFailed as err:
            self.fail(err)
            return
        in_thread(message.inflated).add_done_callback(partial(self._inflated, lease))

    def _inflated(self, lease: Lease, inflating: asyncio.Future[bytes]) -> None:
        # Not `result`, which adds this frame to the error's traceback. The frame references the future, and
        # the future the error, so this cycle would keep the message's bytes until the garbage collector runs.
        error = None if inflating.cancelled() else inflating.exception()  # else asyncio would log the error
        if inflating.cancelled() or self.stream.ended:
            lease.end()
            return  # the client cancelled the call
        if error is None:
            self._queue_decode(inflating.result(), lease)
            return
        lease.end()
        if isinstance(error, Exception):  # the top of a call: `fail` logs an unexpected error
            self.fail(error)

    def _decoded(self, lease: Lease, size: int, decoding: asyncio.Future[Any]) -> None:
        lease.end()
        found = decoding.exception() or decoding.result()
        if self.stream.ended:
            return
        if isinstance(found, Exception):
            self.fail(found)
            return
        try:
            self._keep(size)
        except MessageFailed as err:
            self.fail(err)
            return
        self.begin(found)


class FunctionCall(UnaryCall):
    """A call that a synchronous function answers."""

    __slots__ = (*SLOTS, *OWN_MARKS, "_function")

    def __init__(self, function: Callable[[Any, Call], Any], method: Method, stream: Stream) -> None:
        UnaryCall.__init__(self, method, stream)
        self._function = function

    def begin(self, request: Any) -> None:
        """Call the function and answer with its result or its error."""
        try:
            self.answer(self._function(request, self))
        except Exception as error:  # the top of a call
            self.fail(error)


class Asked(NamedTuple):
    """Arguments of a prediction for the data plane."""

    model: str
    version: str | None
    request: InferRequest


class GrpcPrediction(UnaryCall, Request, ABC):
    """A call that makes one prediction: the gRPC call and the data plane's `Request` in one object."""

    __slots__ = (*SLOTS, "_dataplane", "_joining", "_version")
    protocol = "grpc"

    def __init__(self, dataplane: DataPlane, method: Method, stream: Stream) -> None:
        Request.__init__(self, "", 0.0)  # `UnaryCall` sets the start time, `begin` the request id
        UnaryCall.__init__(self, method, stream)
        self._dataplane = dataplane
        self._version: Version | None = None  # the version that admitted it
        self._joining: asyncio.Task[None] | None = None

    @property
    def prediction(self) -> Request | None:
        """The call itself, after `begin` has set its request id; None before."""
        return self if self.request_id else None

    @abstractmethod
    def asked(self, message: Any) -> Asked:
        """Translate the client's message.

        Raises:
            ServingError: the message is not a valid request.
        """

    @abstractmethod
    def message_of(self, response: InferResponse) -> Any:
        """Translate the response to a message. An error that this method raises ends the call."""

    def begin(self, request: Any) -> None:
        """Submit the request to the data plane."""
        try:
            model, version, asked = self.asked(request)
            self.fill(asked)
            self.caller = self.stream.caller
            self.trace = trace_of_headers(self.stream.head.metadata)
            self.method.metrics.prediction_begins(self)
            self._version = self._dataplane.admit(self, model, version)
        except Exception as error:  # the top of a call
            if isinstance(error, ServingError):
                self.error = error  # `fail` sets it only for requests with an id
            self.fail(error)

    def reply(self, outcome: InferResponse | StreamedResponse | ServingError) -> None:
        """Answer the client with the outcome of the prediction."""
        try:
            if isinstance(outcome, InferResponse):
                self.answer(self.message_of(outcome))
            elif isinstance(outcome, StreamedResponse):
                self._take_parts(outcome)
            else:
                self.fail(outcome)
        except Exception as error:  # broad, because the other calls of the batch are answered after this one
            self.fail(error)

    def on_cancel(self) -> None:
        """Withdraw the prediction."""
        super().on_cancel()
        self.withdraw()
        if self._joining is not None:
            self._joining.cancel()

    def withdraw(self) -> None:
        """Withdraw the prediction from its batcher, so that it does not run, or its outcome is dropped."""
        if self._version is not None:
            self._version.batcher.withdraw(self)

    def _ended(self, code: StatusCode) -> None:
        self.method.metrics.prediction_ends(self, code.name)
        super()._ended(code)

    def _take_parts(self, response: StreamedResponse) -> None:
        """Join all parts of a streamed response into one message, in a task."""
        tasks = self.method.tasks
        self._joining = asyncio.get_running_loop().create_task(self._join(response))
        tasks.add(self._joining)
        self._joining.add_done_callback(tasks.discard)

    async def _join(self, response: StreamedResponse) -> None:
        try:
            chunks, size = [], 0
            async for chunk in response.chunks:
                chunks.append(chunk)
                size += len(chunk)
                self.stream.check(size)  # so that an answer over the limit is not buffered whole
            self.answer(self.message_of(InferResponse(b"".join(chunks))))
        except Exception as error:  # the top of a task
            self.fail(error)
