"""Predictions over REST, served by the connection: no ASGI, no coroutine, a task for streams only.

The overhead of an ASGI server around an app is several times the cost of parsing a request: 94 us of CPU time
against 21 us, for bare echoes on one machine (uvicorn).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from torchere.serving.batching.request import Request
from torchere.serving.errors import InvalidRequest, LeftUnread, NotFound, ServingError
from torchere.serving.frontend import wording
from torchere.serving.frontend.budgets import Lease, QueuedDecode, in_thread, outcome_of
from torchere.serving.frontend.call_scope import CLIENT_GONE
from torchere.serving.frontend.priority import parse_priority
from torchere.serving.frontend.request_id import new_request_id
from torchere.serving.frontend.rest.bodies import WholeBody
from torchere.serving.frontend.rest.codec import body_parameters, form_parameters, takes_long
from torchere.serving.frontend.rest.codec import deadline as deadline_of
from torchere.serving.frontend.rest.errors import BodyTooLong
from torchere.serving.frontend.rest.exchange import SLOTS, ClientConnection, Exchange, status_of
from torchere.serving.frontend.rest.heads import CHUNKED, Head
from torchere.serving.frontend.rest.targets import Target
from torchere.serving.frontend.rest.wire import (
    CONTINUE,
    NO_CONTENT,
    RESET_CONTENT,
    RawHeaders,
    checked_status,
    handler_headers,
    handler_lines,
)
from torchere.serving.logs.access_lines import fields_of
from torchere.serving.types import NO_DEADLINE, InferResponse, Parameter, StreamedResponse

if TYPE_CHECKING:
    from torchere.serving.registry.version import Version

Body = bytes | memoryview
LAST_CHUNK = b"0\r\n\r\n"

logger = logging.getLogger(__name__)


class Prediction(Exchange, Request):
    """One prediction: the exchange with the client and the data plane's `Request` in one object.

    Answered once; used on the event loop only.

    The body is validated here, before admission: a refused request does not count as run.
    """

    __slots__ = (*SLOTS, "_decode", "version")

    def __init__(self, connection: ClientConnection, head: Head) -> None:
        Request.__init__(self, new_request_id(), time.monotonic())
        Exchange.__init__(self, connection, head)
        self.version: Version | None = None  # the version that admitted it
        self._decode: QueuedDecode | None = None  # the queued decoding of a long body

    @property
    def prediction(self) -> Request | None:
        """This prediction itself."""
        return self

    def begin(self) -> None:
        """Allocate the buffer for the body; refuse a body that is too long without reading it."""
        length = self.head.length
        if length > self.connection.listener.limits.max_request_bytes:
            self._refuse_body()
            return
        if length > 0:
            self.body = WholeBody(length)
        elif length == CHUNKED:
            self.body = bytearray()
        if self.head.expects:
            self.connection.write(CONTINUE)

    def take(self, piece: bytes) -> None:
        """Append the next bytes of the body."""
        body = self.body
        if isinstance(body, WholeBody):
            body.add(piece)
        elif body is not None:
            body += piece
            if len(body) > self.connection.listener.limits.max_request_bytes:
                self._refuse_body()

    def _refuse_body(self) -> None:
        """Answer 413 before the body is read; TorchServe's answer has no text."""
        listener = self.connection.listener
        listener.metrics.refused_body()
        self.answer_error(BodyTooLong(listener.limits.max_request_bytes))

    def whole(self) -> None:
        """Run the request: its body, which did not arrive with the head, is complete."""
        read_s = time.monotonic()
        body, self.body = self.body, None
        if isinstance(body, WholeBody):
            self.run(body.view, read_s)
        else:
            self.run(b"" if body is None else bytes(body), read_s)

    def run(self, body: Body, read_s: float = 0.0) -> None:
        """Run a complete request.

        `read_s`: monotonic seconds when the body was complete; 0: it arrived with the head.
        """
        self.trace = self.head.trace
        self.read_s = read_s
        self.connection.listener.metrics.prediction_begins(self)
        try:
            self.read(body)
        except ServingError as error:
            self.fail(error)
        except Exception as error:
            self._break_down(error)

    def read(self, body: Body) -> None:
        """Convert the body to the handler's parameters, and submit the request.

        A form becomes one parameter for each field; any other body becomes one parameter called `body`.
        """
        head = self.head
        if not head.is_form:
            self._ask((Parameter("body", bytes(body), head.mime),))
            return
        speaks_json = head.target is not None and head.target.speaks_json
        parse = partial(body_parameters, head.content_type, body, speaks_json=speaks_json)
        if takes_long(head.content_type, body):
            self._refuse_unknown()
            self.in_turn(self._ask, parse)
        else:
            self._ask(parse())

    def _refuse_unknown(self) -> None:
        """Refuse a request to an unknown model before decoding its form, if path or query name the model.

        Raises:
            NotFound, Unavailable: the path, or the model, does not exist.
        """
        target = self._target()
        query = form_parameters(self.head.place.query) if target.takes_query else ()
        model = self._model_of(target, query)
        if model is not None:
            try:
                self.connection.listener.dataplane.check_exists(model, target.version)
            except NotFound:
                self.admit(model)  # refuses and counts it

    def off_loop(
        self, then: Callable[..., None], work: Callable[[], Any], lease: Lease | None = None
    ) -> None:
        """Run `work` in a thread, then `then` with its result on the loop, unless the request has ended.

        An error of `work` becomes the response. `lease` ends when `work` does.
        """
        working = in_thread(work)
        if lease is not None:
            working.add_done_callback(lambda _: lease.end())
        working.add_done_callback(partial(self._come_back, then))

    def in_turn(self, then: Callable[..., None], work: Callable[[], Any]) -> None:
        """As `off_loop`, for work on a long body: it is queued, and dropped if the request ends earlier."""
        work, come_back = partial(outcome_of, work, ServingError), partial(self._come_back, then)
        self._decode = self.connection.listener.budgets.decodes.add(work, come_back, self.caller)

    def _come_back(self, then: Callable[..., None], done: asyncio.Future[Any]) -> None:
        if done.cancelled():
            return
        outcome = done.exception() or done.result()  # even if too late: asyncio logs unread exceptions
        if self.complete:
            return
        try:
            if isinstance(outcome, BaseException):
                raise outcome
            then(outcome)
        except ServingError as error:
            self.fail(error)
        except Exception as error:  # the top of a request: a bug is logged, and the client gets a 500
            self._break_down(error)

    def _target(self) -> Target:
        head = self.head
        target = head.target
        if target is None or (target.verb and not head.is_tensors and not _is_torchserves(target)):
            raise NotFound(wording.NO_SUCH_RESOURCE)
        return target

    def _ask(self, parameters: tuple[Parameter, ...]) -> None:
        head = self.head
        target = self._target()
        model = target.model
        if target.takes_query:
            query = form_parameters(head.place.query)
            model = self._model_of(target, query, parameters)
            if model is None:
                raise InvalidRequest(wording.NO_MODEL_NAMED)
            parameters = query + parameters
        self.parameters = parameters
        self.headers = head.texts
        if head.timeout_ms:
            self.deadline_s = self.deadline()
        if head.priority:
            self.priority = parse_priority(head.priority)
        self.group = head.group
        self.admit(str(model))

    def deadline(self) -> float:
        """Return the deadline in monotonic seconds, or `NO_DEADLINE`; raises `InvalidRequest`."""
        timeout_ms = self.head.timeout_ms
        return deadline_of(timeout_ms, self.started_s) if timeout_ms else NO_DEADLINE

    def _model_of(
        self, target: Target, query: tuple[Parameter, ...], fields: tuple[Parameter, ...] = ()
    ) -> str | None:
        if target.model is not None:
            return target.model
        # With a sole startup model, a form field called `model_name` is for the handler.
        sole = self.connection.listener.dataplane.sole_startup_model()
        asked = _name_in(query)
        named = (asked or None, sole, asked, _name_in(fields))  # an empty name gives way to the sole model
        return next((model for model in named if model is not None), None)

    def admit(self, model: str) -> None:
        """Submit the request to the data plane; unless this raises, `reply` is called once."""
        target = self.head.target
        version = None if target is None else target.version
        self.version = self.connection.listener.dataplane.admit(self, model, version)

    def withdraw(self) -> None:
        """Withdraw the request from its batcher: the outcome is no longer needed."""
        if self.version is not None:
            self.version.batcher.withdraw(self)

    def reply(self, outcome: InferResponse | StreamedResponse | ServingError) -> None:
        """Answer the client with the outcome, unless the exchange has ended. Never raises an `Exception`.

        The other requests of the batch are answered after this one.
        """
        if self.complete:
            return
        try:
            if isinstance(outcome, ServingError):
                self.fail(outcome)
            else:
                self.succeed(outcome)
        except ServingError as error:
            self.fail(error)
        except Exception as error:
            self._break_down(error)

    def succeed(self, outcome: InferResponse | StreamedResponse) -> None:
        """Send the response of the handler."""
        if not isinstance(outcome, InferResponse):
            self.in_task(partial(self._send_stream, outcome))
        elif self.connection.listener.adds_headers:
            self.answer(checked_status(outcome), handler_headers(outcome.headers), outcome.body)
        else:
            self.send_whole(checked_status(outcome), handler_lines(outcome.headers), outcome.body)

    def fail(self, error: ServingError) -> None:
        """Send an error in the format of the path's protocol."""
        self.error = error
        self.answer_error(error)

    def _break_down(self, error: Exception) -> None:
        fields = fields_of(self.request_id, self)
        logger.error("request %s failed unexpectedly", self.request_id, exc_info=error, extra=fields)
        self.error = ServingError("Internal server error", repr(error))
        self.answer_error(self.error)

    def in_task(self, send: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Send a response in a task that the listener waits for when it stops."""
        self.task = asyncio.get_running_loop().create_task(self._guarded_task(send))
        self.connection.listener.keep(self.task)

    async def _guarded_task(self, send: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            # The coroutine is created here: a task cancelled before its start would never await it.
            await send()
        except ServingError as error:
            if self.status:  # the response has begun; `LeftUnread` is logged elsewhere
                if not isinstance(error, LeftUnread):
                    logger.warning(
                        "request %s: the stream broke off: %s %s", self.request_id, error, error.detail
                    )
                self.break_off(error)
            else:
                self.withdraw()  # no client will read further parts
                self.fail(error.with_traceback(None))  # the frames of a traceback hold the stream of parts
        except Exception as error:  # as in `_come_back`
            if self.status:
                logger.exception("request %s: the stream broke off", self.request_id)
                self.break_off(ServingError("Internal server error"))
            else:
                self._break_down(error)

    def break_off(self, error: ServingError) -> None:
        """Close the connection without ending the body, so that the client detects the failure.

        The request is counted with the status of the error, not with that of its response.
        """
        if self.complete:
            return
        self.complete = True
        self.error = error
        self.finished(status_of(error))
        self.let_go()
        if self.head.is_old:
            self.connection.transport.abort()  # `close` would send TLS's close_notify, as after a whole body
        else:
            self.connection.transport.close()

    async def _send_stream(self, response: StreamedResponse) -> None:
        """Send a streamed response, one chunk for each part."""
        chunks = aiter(response.chunks)
        # Await the first part before sending the head: a failure until then still gets an error response.
        first = await anext(chunks, b"")
        headers = [*handler_headers(response.head.headers), (b"ts_stream_next", b"true")]
        head = self.start(checked_status(response.head), headers)
        self.connection.write(head, self.framed(first))
        async for chunk in chunks:
            await self.send_part(chunk)
        await self.send_part(b"", last=True)

    def start(self, status: int, headers: RawHeaders) -> bytes:
        """Return the head of a response whose body follows in parts."""
        self._begun(status)
        lines = self._lines(headers)
        if status == RESET_CONTENT:
            lines += b"content-length: 0\r\n"
        elif not (self.head.is_head or status in NO_CONTENT):
            if self.head.is_old:  # RFC 9112, 6.1: HTTP/1.0 has no chunks, so closing delimits the body
                self.keep_alive = False
                self._end_by_reset(True)
            else:
                lines += b"transfer-encoding: chunked\r\n"
        return self._head(lines)

    def framed(self, part: bytes, *, last: bool = False) -> bytes:
        """Encode a part of the body, as a chunk if needed; empty if the response has no content."""
        if self.status in NO_CONTENT or self.status == RESET_CONTENT or self.head.is_head:
            return b""
        if self.head.is_old:
            return part
        chunk = b"%x\r\n%b\r\n" % (len(part), part) if part else b""
        return chunk + LAST_CHUNK if last else chunk

    def _end_by_reset(self, wanted: bool) -> None:
        """Let closing reset the connection if `wanted`, else end it in order (with a FIN)."""
        transport = self.connection.transport
        if not transport.is_closing():
            connection = transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", wanted, 0))

    async def send_part(self, part: bytes, *, last: bool = False) -> None:
        """Send a part of the body; wait first while the write buffer is full."""
        connection = self.connection
        if connection.write_paused:
            await connection.drain()
        if self.complete:
            return
        framed = self.framed(part, last=last)
        if framed:
            connection.write(framed)
        if last:
            if self.head.is_old and not self.keep_alive:
                self._end_by_reset(False)  # a FIN, not a reset, shows that the body is complete
            self.over()

    def ended(self, status: int = CLIENT_GONE) -> None:
        """End the prediction: the client disconnected, or the connection sent a response with `status`."""
        if self.complete:
            return
        self.complete = True
        self.finished(status)
        self.withdraw()
        if self.task is not None:
            self.task.cancel()
        self.let_go()

    def let_go(self) -> None:
        """Release the request's memory: the connection keeps this object until its next request."""
        self.body = None
        self.version = None
        if self._decode is not None:
            self._decode.withdraw()
            self._decode = None


def _is_torchserves(target: Target) -> bool:
    """Tell whether TorchServe has the path too; the other paths are those of the Open Inference Protocol."""
    return target.verb == "infer" and target.version is None


def _name_in(parameters: tuple[Parameter, ...]) -> str | None:
    named = (one.value for one in parameters if one.name == "model_name")
    return next((value.decode("utf-8", "replace") for value in named), None)
