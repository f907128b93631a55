"""One request and its response on a connection: the base class of predictions and requests to the app."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

from torchere.serving.access.identity import is_from_this_machine
from torchere.serving.batching.request import Request
from torchere.serving.errors import Forbidden, ServingError, TooManyRequests, Unauthorized
from torchere.serving.frontend.budgets import ConnectionBudget
from torchere.serving.frontend.call_scope import CLIENT_GONE
from torchere.serving.frontend.rest.bodies import WholeBody
from torchere.serving.frontend.rest.errors import status_and_type
from torchere.serving.frontend.rest.heads import Head
from torchere.serving.frontend.rest.wire import (
    LAST_LINES,
    NO_CONTENT,
    RESET_CONTENT,
    STATUS_LINES,
    RawHeaders,
    error_answer,
    joined,
    missing,
)
from torchere.serving.logs.access_lines import access_log
from torchere.serving.telemetry.numbers import Operation
from torchere.serving.telemetry.stages import server_timing

if TYPE_CHECKING:
    from torchere.serving.access.client_limits import Account
    from torchere.serving.frontend.rest.listener import Listener

# RFC 9110 and 5789; OpenTelemetry's spans name no others.
_METHODS = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"})
FOR_THIS_MACHINE = (
    "Tokens are off, so only clients on this machine may change models. Switch token authorization on, or "
    "set insecure_management=true."
)


# Slots for the concrete subclasses of `Exchange`, which has none itself: Python can't combine two base
# classes that both have slots. Predictions get `request_id` and `started_s` from `Request`.
SLOTS = ("body", "complete", "connection", "head", "keep_alive", "status", "task")


class ClientConnection(Protocol):
    """The connection of an exchange, as exchanges use it (`connection.py` has the object)."""

    listener: Listener
    budget: ConnectionBudget
    client: Any  # host and port; None on a Unix socket
    address: str  # of the client, without its port
    subjects: tuple[str, ...]  # the names in the client's certificate
    transport: asyncio.Transport
    write_paused: bool

    def write(self, head: bytes, body: bytes = b"") -> None:
        """Send bytes of the response."""

    async def drain(self) -> None:
        """Wait until the write buffer has room."""

    def hold(self) -> None:
        """Pause reading until `release`."""

    def release(self) -> None:
        """Resume reading."""

    def answered(self, keep_alive: bool) -> None:
        """Go on with the next request, or close the connection."""


class Exchange(ABC):
    """One request, from its head to the last byte of its response. Used on the event loop only.

    The connection calls `begin` after the head, `take` for each piece of the body, `whole` after its end, and
    `ended` when the client disconnects, or when the connection sent a response itself. `status` is 0 until
    the response begins.
    """

    if not TYPE_CHECKING:  # a type checker would take these for the complete list of attributes
        __slots__ = ()
    request_id: str
    started_s: float
    caller: str  # names the client: its identity, or its address
    account: Account | None  # of the client; None: no limits apply to it

    def __init__(self, connection: ClientConnection, head: Head) -> None:
        self.connection = connection
        self.head = head
        self.caller = connection.address
        self.keep_alive = head.keep_alive and not connection.listener.draining
        self.status = 0
        self.complete = False  # True: nothing more is sent
        self.body: WholeBody | bytearray | None = None  # of the request, while it arrives
        self.task: asyncio.Task[None] | None = None  # sends the response, if that needs a task

    @property
    def prediction(self) -> Request | None:
        """The request's prediction, made here or by the app; None if there is none yet."""
        return None

    @property
    def is_preflight(self) -> bool:
        """Whether a browser only asks for the CORS headers of a response, so that nothing is called."""
        return self.connection.listener.answers_preflights and self.head.is_preflight

    @property
    def room(self) -> memoryview | None:
        """Buffer for the next bytes of a body of known length; None: pass them to `take`."""
        body = self.body
        return body.room if isinstance(body, WholeBody) else None

    @abstractmethod
    def begin(self) -> None:
        """Prepare for the body, after the head has arrived."""

    def filled(self, size: int) -> None:
        """Record that `size` bytes were written to `room`."""
        if isinstance(self.body, WholeBody):
            self.body.filled(size)

    @abstractmethod
    def take(self, piece: bytes) -> None:
        """Process the next bytes of the body."""

    @abstractmethod
    def whole(self) -> None:
        """Process the end of the request."""

    def authorized(self) -> bool:
        """Return whether the client has the required role, or needs none, and is within its limits.

        If not, refuse the request. A browser's preflight is answered here, too, because it can't have a key.
        """
        listener, head = self.connection.listener, self.head
        if head.refusal is not None:
            self.refuse(head.refusal)
            return False
        if self.is_preflight:
            self.answer(204, [], b"")
            return False
        if listener.is_for_this_machine and self._changes_from_outside():
            self.refuse(Forbidden(FOR_THIS_MACHINE))
            return False
        try:
            if listener.keys is not None and head.role is not None:
                identity = listener.keys.authorize(head.role, head.authorization, self.connection.subjects)
                self.caller = identity.name or self.caller
                if head.page_refusal is not None:
                    self.refuse(head.page_refusal)
                    return False
            if listener.client_limits is not None and head.place.row.is_charged:
                self.account = listener.client_limits.charge(self.caller, self.started_s)
        except (Unauthorized, TooManyRequests) as error:
            self.refuse(error)
            return False
        return True

    def _changes_from_outside(self) -> bool:
        """Tell whether another machine, or a proxy on this one, asks to change models."""
        row = self.head.place.row
        if row.needs != "management" or not row.action(self.head.method):
            return False
        names = [name.decode("latin-1") for name, _ in self.head.headers]
        return not is_from_this_machine(self.connection.address, names)

    def refuse(self, error: ServingError) -> None:
        """Answer with an error, before the request is read, and count the refusal."""
        self.connection.listener.metrics.refused(error)
        self.answer_error(error)

    def operation(self) -> Operation:
        """Return the request by OpenTelemetry's conventions for HTTP, for spans."""
        head, connection = self.head, self.connection
        method = head.method if head.method in _METHODS else "_OTHER"
        place = head.place
        route = place.row.route if place.target is None else place.target.route
        attributes: dict[str, str | int] = {
            "http.request.method": method,
            "http.route": route,
            "url.path": place.path,
            "url.scheme": "http" if connection.transport.get_extra_info("sslcontext") is None else "https",
            "network.protocol.name": "http",
            "network.protocol.version": head.version,
            "client.address": connection.address,
        }
        return Operation(f"{'HTTP' if method == '_OTHER' else method} {route}", attributes)

    def answer_error(self, error: ServingError) -> None:
        """Send the JSON response of an error."""
        show_detail, path = self.connection.listener.show_detail, self.head.place.path
        self.answer(*error_answer(error, show_detail=show_detail, path=path))

    def answer(self, status: int, headers: RawHeaders, body: bytes) -> None:
        """Send a complete response, with the headers common to all responses added."""
        self.send_whole(status, self._lines(headers), body)

    def send_whole(self, status: int, lines: bytes, body: bytes) -> None:
        """As `answer`, but with encoded header lines."""
        if self.complete:
            return
        self._begun(status)
        if status in NO_CONTENT or status == RESET_CONTENT:
            body = b""
        if status not in NO_CONTENT:
            lines += b"content-length: %d\r\n" % len(body)
        self.connection.write(self._head(lines), b"" if self.head.is_head else body)
        self.over()

    def _lines(self, headers: RawHeaders) -> bytes:
        """Encode the headers of a response, with those of CORS and `Server-Timing` if they are configured."""
        listener, prediction = self.connection.listener, self.prediction
        if listener.cors:
            headers = headers + missing(listener.cors, headers)
        if listener.server_timing and prediction is not None:
            headers = [*headers, (b"server-timing", server_timing(prediction, time.monotonic()).encode())]
        return joined(headers)

    def _head(self, lines: bytes) -> bytes:
        request_id, last_lines = self.request_id.encode(), LAST_LINES[self.keep_alive]
        return b"%b%bx-request-id: %b\r\n%b" % (STATUS_LINES[self.status], lines, request_id, last_lines)

    def over(self) -> None:
        """Count the response after its last byte was written, and let the connection continue."""
        if self.complete:
            return
        self.complete = True
        self.finished(self.status)
        self.let_go()
        self.connection.answered(self.keep_alive)

    @abstractmethod
    def ended(self, status: int = CLIENT_GONE) -> None:
        """Record that the client disconnected early, or that the connection sent a response with `status`."""

    @abstractmethod
    def let_go(self) -> None:
        """Release the request's memory: the connection keeps this object until its next request."""

    def finished(self, status: int) -> None:
        """Count the response and write its line to the access log."""
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
                trace=self.head.trace,
            )

    def _begun(self, status: int) -> None:
        self.status = status
        if self.prediction is not None:
            self.prediction.sending_s = time.monotonic()
        if status >= 400:
            self.keep_alive = False


def status_of(error: ServingError) -> int:
    """Return the HTTP status of an error."""
    return status_and_type(error)[0]
