"""Plain predictions, answered on the connection itself: no ASGI message, no task, no coroutine.

What uvicorn does around an ASGI app costs several times what parsing a request does: 94 us of processor
time against 21, for bare echoes on one machine. A prediction with no wishes of its own needs none of it. What
is not as plain goes the ASGI way (`predict.py`), with the same answers; `direct_predictions.py` chooses.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from torchere.serving.errors import ServingError, Unauthorized
from torchere.serving.frontend.access_log import access_log
from torchere.serving.frontend.call_scope import CLIENT_GONE
from torchere.serving.frontend.dataplane import DataPlane, Prediction
from torchere.serving.frontend.request_id import new_request_id
from torchere.serving.frontend.rest.body import WholeBody
from torchere.serving.frontend.rest.call import (
    CLOSE,
    KEEP,
    NO_CONTENT,
    RawHeaders,
    checked_status,
    cors_headers,
    error_answer,
    handler_headers,
    missing,
)
from torchere.serving.frontend.rest.codec import body_parameters, infer_request
from torchere.serving.frontend.rest.errors import status_and_type
from torchere.serving.frontend.rest.known_heads import DirectHead
from torchere.serving.frontend.rest.predict import send_stream
from torchere.serving.frontend.services import Services
from torchere.serving.telemetry.timeline import Timeline, fields_of
from torchere.serving.types import InferRequest, InferResponse, StreamedResponse

logger = logging.getLogger(__name__)


class Shared:
    """What the direct calls of one listener share. Used on its event loop only."""

    def __init__(self, services: Services, dataplane: DataPlane) -> None:
        self.dataplane = dataplane
        self.metrics = services.metrics
        self.keys = services.keys
        self.keep_lines = _lines(KEEP)
        self.close_lines = _lines(CLOSE)
        self.cors = cors_headers(services.cors)

    def authorize(self, head: DirectHead) -> None:
        """Let a request with the right key pass.

        Raises:
            Unauthorized: it has none.
        """
        if self.keys is not None and head.place.key is not None:
            self.keys.authorize(head.place.key, head.head.authorization)


class _NeverSet:
    """Stands for the event that uvicorn sets for an ASGI app that waits; here nothing waits."""

    def set(self) -> None:
        """Nobody to wake."""


class DirectCall:
    """One prediction from its head to its last byte. Answered once; used on the event loop only.

    It stands where uvicorn keeps the cycle of an ASGI request, and has the attributes it looks at there.
    """

    __slots__ = (
        *("_connection", "_head", "_prediction", "_read_s", "_shared", "_started_s", "_streaming"),
        *("_timeline", "body", "disconnected", "incoming", "keep_alive"),
        *("more_body", "request_id", "response_complete", "status"),
    )
    message_event = _NeverSet()

    def __init__(self, shared: Shared, connection: Any, head: DirectHead) -> None:
        self._shared = shared
        self._connection = connection
        self._head = head
        self._started_s = time.monotonic()
        self._read_s = 0.0  # when its body was there; 0: with the head
        self._timeline: Timeline | None = None
        self._prediction: Prediction | None = None
        self._streaming: asyncio.Task[None] | None = None
        self.request_id = new_request_id()
        self.keep_alive = head.keep_alive
        self.body: Any = b""  # bytes, or a view of them
        self.incoming: WholeBody | None = None  # where a large body goes
        self.more_body = True
        self.status = 0
        self.response_complete = False
        self.disconnected = False

    @property
    def missing(self) -> WholeBody | None:
        """The body, while it is a large one that is not whole."""
        return self.incoming if self.incoming is not None and self.incoming.room else None

    def take(self, piece: bytes) -> None:
        """The next bytes of the body; no more than were announced."""
        if self.incoming is None:
            self.body += piece
        else:
            self.incoming.add(piece)

    def run_late(self) -> None:
        """As `run`, when the body was longer on its way than the head."""
        self._read_s = time.monotonic()
        if self.incoming is not None:
            self.body = self.incoming.view
            self.incoming = None
        self.run()

    def run(self) -> None:
        """The request is there as a whole: have it answered."""
        try:
            self._prediction = prediction = self._admit()
            prediction.hurry()
        except Unauthorized as error:
            self._shared.metrics.refused(error)
            self._refuse(error)
        except ServingError as error:
            self._fail(error)
        except Exception as error:  # the top of a request: a bug is logged, and the client gets a 500
            self._break_down(error)

    def _admit(self) -> Prediction:
        shared, head = self._shared, self._head
        timeline = shared.metrics.timeline("rest", self.request_id, self._started_s, head.trace)
        timeline.read_s = self._read_s
        self._timeline = timeline
        shared.authorize(head)
        place = head.place
        return shared.dataplane.admit(
            place.model,
            place.target.version,
            self._asked(),
            self.reply,
            place.target.group,
            timeline=timeline,
        )

    def _asked(self) -> InferRequest:
        """What the data plane is asked."""
        head = self._head
        speaks_json = head.place.target.speaks_json
        parameters = body_parameters(head.head.content_type, bytes(self.body), speaks_json=speaks_json)
        self.body = b""  # or a large one would be held twice
        return infer_request(self.request_id, head.head, parameters, head.headers, self._started_s)

    def reply(self, outcome: InferResponse | StreamedResponse | ServingError) -> None:
        """Answer the client; `Reply` of the prediction."""
        try:
            if isinstance(outcome, ServingError):
                self._fail(outcome)
            else:
                self._succeed(outcome)
        except ServingError as error:
            self._fail(error)
        except Exception as error:  # others are answered after this one
            self._break_down(error)

    def _succeed(self, outcome: InferResponse | StreamedResponse) -> None:
        """Send what the handler gave."""
        if isinstance(outcome, InferResponse):
            self._answer(checked_status(outcome), handler_headers(outcome.headers), outcome.body)
        else:
            self._streaming = asyncio.get_running_loop().create_task(self._stream(outcome))
            self._connection.keep(self._streaming)

    def ended(self, status: int = CLIENT_GONE) -> None:
        """The connection ends before the answer does, or has given one of that status itself."""
        self.disconnected = True
        if not self.response_complete:
            self.response_complete = True
            self.status = status
            self.finished()
            if self._prediction is not None:
                self._prediction.withdraw()
            if self._streaming is not None:
                self._streaming.cancel()
            self._let_go()

    def _let_go(self) -> None:
        """Forget the request: the connection keeps this until the next one, which may be long."""
        self.body = b""
        self.incoming = None
        self._prediction = None
        self._timeline = None  # it knows the request

    def _fail(self, error: ServingError) -> None:
        """Send what went wrong with a prediction, in the form that the path's clients read."""
        self._refuse(error)

    def _refuse(self, error: ServingError) -> None:
        self._answer(*error_answer(error, show_detail=False))

    def _break_down(self, error: Exception) -> None:
        fields = fields_of(self.request_id, self._timeline)
        logger.error("request %s failed unexpectedly", self.request_id, exc_info=error, extra=fields)
        self._refuse(ServingError("Internal server error", repr(error)))

    def _answer(self, status: int, headers: RawHeaders, body: bytes) -> None:
        if self.response_complete:
            return
        framing = b"content-length: %d\r\n" % len(body)
        if status in NO_CONTENT:
            framing = body = b""
        self._connection.write_whole(self._head_lines(status, headers, framing), body)
        self._complete()

    def _head_lines(self, status: int, headers: RawHeaders, framing: bytes) -> bytes:
        self.status = status
        if self._timeline is not None:
            self._timeline.sending_s = time.monotonic()
        if status >= 400:
            self.keep_alive = False
        rest = self._shared.keep_lines if self.keep_alive else self._shared.close_lines
        if self._shared.cors:
            headers = headers + missing(self._shared.cors, headers)
        own = _lines(headers) + framing if headers else framing
        return b"%b%bx-request-id: %b\r\n%b\r\n" % (STATUS_LINE[status], own, self.request_id.encode(), rest)

    def _complete(self) -> None:
        self.response_complete = True
        self.finished()
        self._let_go()
        if not self.keep_alive:
            self._connection.transport.close()
        self._connection.on_direct_complete()

    def finished(self) -> None:
        """Count the answer and write its line in the access log."""
        self._shared.metrics.request_finished(self.status)
        if self._timeline is not None:
            self._timeline.finish(self.status)
        if access_log.enabled:
            access_log.add(
                self._connection.client,
                self._head.request_line,
                self.status,
                self._started_s,
                timeline=self._timeline,
                request_id=self.request_id,
            )

    async def _stream(self, response: StreamedResponse) -> None:
        try:
            await send_stream(self, response)
        except ServingError as error:
            self._fail(error)
        except Exception as error:  # as in run()
            if self.status:
                logger.exception("request %s: the stream broke off", self.request_id)
                self.break_off(ServingError("Internal server error"))
            else:
                self._break_down(error)

    async def start(self, status: int, headers: RawHeaders) -> None:
        """Send the head of an answer in chunks; of one without content, if that is what the status says."""
        framing = b"" if status in NO_CONTENT else b"transfer-encoding: chunked\r\n"
        self._write(self._head_lines(status, headers, framing))

    async def body_part(self, part: bytes, *, last: bool = False) -> None:
        """Send one chunk, once the client has taken in the ones before; none where there is no content."""
        flow = self._connection.flow
        if flow.write_paused and not self.disconnected:
            await flow.drain()
        if self.status not in NO_CONTENT:
            chunk = b"%x\r\n%b\r\n" % (len(part), part) if part else b""
            self._write(chunk + b"0\r\n\r\n" if last else chunk)
        if last and not self.disconnected:
            self._complete()

    def break_off(self, error: ServingError) -> None:
        """Leave the body without its end, which is what tells the client, and close."""
        if not self.response_complete:
            self.status = status_and_type(error)[0]
            self.keep_alive = False
            self._complete()

    def _write(self, data: bytes) -> None:
        if data and not self.disconnected:
            self._connection.write_whole(data)


def _lines(headers: RawHeaders) -> bytes:
    return b"".join([b"%b: %b\r\n" % line for line in headers])
