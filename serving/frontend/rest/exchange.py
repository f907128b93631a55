"""One request and its answer on a connection: what predictions and requests to the app have in common."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from torchere.serving.batching.request import Request
from torchere.serving.errors import ServingError, Unauthorized
from torchere.serving.frontend.access_log import access_log
from torchere.serving.frontend.call_scope import CLIENT_GONE
from torchere.serving.frontend.rest.answer_parts import (
    LAST_LINES,
    NO_CONTENT,
    STATUS_LINES,
    RawHeaders,
    error_answer,
    joined,
    missing,
)
from torchere.serving.frontend.rest.bodies import WholeBody
from torchere.serving.frontend.rest.errors import status_and_type
from torchere.serving.frontend.rest.heads import Head

if TYPE_CHECKING:
    from torchere.serving.frontend.rest.connection import Connection

LAST_CHUNK = b"0\r\n\r\n"


# The attributes of an exchange, for the slots of its subclasses: two classes with slots can't be combined.
# Predictions have `request_id` and `started_s` from `Request`.
SLOTS = ("body", "complete", "connection", "head", "is_chunked", "keep_alive", "status", "task")


class Exchange(ABC):
    """One request from its head to the last byte of its answer. Used on the event loop only.

    The connection calls `begin` when the head is there, `take` and `whole` while the body comes in, and
    `ended` when the client leaves, or gets another answer. `status` is 0 until the answer has begun; an
    answer that goes wrong midway counts with another status than it began with.
    """

    if not TYPE_CHECKING:  # a type checker takes these for all the attributes there are
        __slots__ = ()
    request_id: str
    started_s: float
    is_chunked: bool  # the body of an answer in parts

    def __init__(self, connection: Connection, head: Head) -> None:
        self.connection = connection
        self.head = head
        self.keep_alive = head.keep_alive and not connection.listener.draining
        self.status = 0
        self.complete = False  # nothing more is sent
        self.body: WholeBody | bytearray | None = None  # of the request, while it comes in
        self.task: asyncio.Task[None] | None = None  # that answers it, where it needs one

    @property
    def prediction(self) -> Request | None:
        """The request's prediction, made here or by the app; None if there is none yet."""
        return None

    @property
    def room(self) -> memoryview | None:
        """Where the next bytes of the body are to be written; None: hand them to `take`."""
        return None

    @abstractmethod
    def begin(self) -> None:
        """The head is there, and a body is to come."""

    def filled(self, size: int) -> None:
        """So many bytes were written to `room`."""
        raise RuntimeError("there is no room to write to")

    @abstractmethod
    def take(self, piece: bytes) -> None:
        """The next bytes of the body."""

    @abstractmethod
    def whole(self) -> None:
        """The request is there as a whole."""

    def authorized(self) -> bool:
        """Whether the request has the key that it needs; it was answered if not."""
        listener, head = self.connection.listener, self.head
        if listener.keys is None or head.key is None:
            return True
        try:
            listener.keys.authorize(head.key, head.authorization)
        except Unauthorized as error:
            self.refuse(error)
            return False
        return True

    def refuse(self, error: ServingError) -> None:
        """Answer with an error before the request is read."""
        self.connection.listener.metrics.refused(error)
        self.answer_error(error)

    def answer_error(self, error: ServingError) -> None:
        """Send the JSON body of an error."""
        status, headers, body = error_answer(error, show_detail=self.connection.listener.show_detail)
        self.answer(status, headers, body)

    def answer(self, status: int, headers: RawHeaders, body: bytes) -> None:
        """Send a complete answer; the headers that every answer has are added."""
        cors = self.connection.listener.cors
        if cors:
            headers = headers + missing(cors, headers)
        self.send_whole(status, joined(headers), body)

    def send_whole(self, status: int, lines: bytes, body: bytes) -> None:
        """As `answer`, with the header lines as they are sent."""
        if self.complete:
            return
        self._begun(status)
        if status in NO_CONTENT:
            body = b""
        else:
            lines += b"content-length: %d\r\n" % len(body)
        self.connection.write(self._head(lines), b"" if self.head.is_head else body)
        self.over()

    def start(self, status: int, headers: RawHeaders, *, is_sized: bool = False) -> bytes:
        """The head of an answer whose body follows in parts; `is_sized`: `headers` say how long it is."""
        self._begun(status)
        lines = joined(headers + missing(self.connection.listener.cors, headers))
        self.is_chunked = False
        if not (is_sized or self.head.is_head or status in NO_CONTENT):
            if self.head.is_old:  # RFC 9112, 6.1: its client knows no chunks, but the end of the connection
                self.keep_alive = False
                self._end_by_reset(True)
            else:
                self.is_chunked = True
                lines += b"transfer-encoding: chunked\r\n"
        return self._head(lines)

    def _head(self, lines: bytes) -> bytes:
        last_lines = LAST_LINES[self.keep_alive]
        return b"%b%bx-request-id: %b\r\n%b" % (
            STATUS_LINES[self.status],
            lines,
            self.request_id.encode(),
            last_lines,
        )

    def framed(self, part: bytes, *, last: bool = False) -> bytes:
        """A part of the body as it is sent; nothing where the answer has no content."""
        if self.status in NO_CONTENT or self.head.is_head:
            return b""
        if not self.is_chunked:
            return part
        chunk = b"%x\r\n%b\r\n" % (len(part), part) if part else b""
        return chunk + LAST_CHUNK if last else chunk

    def over(self) -> None:
        """The last byte of the answer was written: count it, and let the connection go on."""
        if self.complete:
            return
        self.complete = True
        self.finished(self.status)
        self.let_go()
        self.connection.answered(self.keep_alive)

    def end_body(self) -> None:
        """As `over`, after an answer in parts."""
        if self.head.is_old and not self.keep_alive and not self.complete:
            self._end_by_reset(False)  # in order, which says that the body is whole
        self.over()

    def break_off(self, error: ServingError) -> None:
        """Leave the body without its end, which is what tells the client, and close."""
        if self.complete:
            return
        self.complete = True
        self.finished(status_of(error))
        self.let_go()
        if self.head.is_old:
            self.connection.transport.abort()  # TLS would say farewell
        else:
            self.connection.transport.close()

    @abstractmethod
    def ended(self, status: int = CLIENT_GONE) -> None:
        """The connection ends before the answer does, or has given one of that status itself."""

    @abstractmethod
    def let_go(self) -> None:
        """Forget the request: the connection keeps this until the next one, which may be long."""

    def finished(self, status: int) -> None:
        """Count the answer and write its line in the access log."""
        self.connection.listener.metrics.request_finished(status, is_probe=self.head.is_probe)
        prediction = self.prediction
        if prediction is not None:
            self.connection.listener.metrics.prediction_ends(prediction, status)
        if access_log.enabled:
            access_log.add(
                self.connection.client,
                self.head.request_line,
                status,
                self.started_s,
                prediction=prediction,
                request_id=self.request_id,
            )

    def _begun(self, status: int) -> None:
        self.status = status
        if self.prediction is not None:
            self.prediction.sending_s = time.monotonic()
        if status >= 400:
            self.keep_alive = False

    def _end_by_reset(self, wanted: bool) -> None:
        """How the connection will end: in order, which tells that the body is whole, or broken off."""
        transport = self.connection.transport
        if not transport.is_closing():
            connection = transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", wanted, 0))


def status_of(error: ServingError) -> int:
    """What an error is answered with."""
    return status_and_type(error)[0]
