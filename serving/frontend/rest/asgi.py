"""ASGI server for all requests but predictions: runs the app in one task per request."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Iterable
from functools import partial

from starlette.types import Message, Scope

from torchere.serving.batching.request import Request
from torchere.serving.errors import CutOff, NotFound, ServingError
from torchere.serving.frontend import wording
from torchere.serving.frontend.authorisation import API_KEY, named_model
from torchere.serving.frontend.call_scope import CLIENT_GONE, CallScope
from torchere.serving.frontend.request_id import new_request_id
from torchere.serving.frontend.rest.codec import REQUEST_ID, SPELLED_HEADERS
from torchere.serving.frontend.rest.exchange import SLOTS, ClientConnection, Exchange, status_of
from torchere.serving.frontend.rest.heads import Head
from torchere.serving.frontend.rest.wire import CONTINUE, RawHeaders
from torchere.serving.logs.access_lines import fields_of
from torchere.serving.logs.audit import AuditedCall, Outcome, audit_log

HELD_BYTES = 65_536  # buffered body bytes that the app has not received; beyond it reading pauses
_REFUSALS = frozenset({403, 405})  # the model API is off, or the default version would be removed
_OURS = frozenset({b"connection", b"content-length", b"transfer-encoding"})  # headers not set by the app
_LINE_BREAK = re.compile(rb"[\r\n\x00]")  # in a header these allow header injection

logger = logging.getLogger(__name__)


class AppExchange(Exchange):
    """One request that the app answers. When the client disconnects, the app runs on and is notified."""

    __slots__ = (
        *(*SLOTS, "account", "caller", "request_id", "started_s"),
        *("_body", "_body_of_app", "_call", "_came", "_expects", "_gone_status", "_head_of_app"),
        *("_is_told", "_is_whole"),
    )

    def __init__(self, connection: ClientConnection, head: Head) -> None:
        super().__init__(connection, head)
        self.request_id = new_request_id()
        self.started_s = time.monotonic()
        self._body = bytearray()  # body bytes that the app has not received yet
        self._is_whole = False  # the body has arrived completely
        self._is_told = False  # the app has received the end of the body
        self._came = asyncio.Event()  # set on more body bytes, the end of the body or of the connection
        self._expects = head.expects
        self._gone_status = 0  # CLIENT_GONE, or the status of the connection's own response; 0: neither
        self._head_of_app: tuple[int, RawHeaders] | None = None  # status and headers of its response
        self._body_of_app = b""
        self._call: CallScope | None = None

    def begin(self) -> None:
        """Start the app in a task. The app reads the body with `receive`."""
        self.task = asyncio.get_running_loop().create_task(self._run())
        self.connection.listener.keep(self.task)

    def finished(self, status: int) -> None:
        """Count the response, and write its line to the access log, and one to the audit log if it is due."""
        super().finished(status)
        action = self.head.place.row.action(self.head.method)
        if action and not self.is_preflight:
            self._audit(action, status)

    def _audit(self, action: str, status: int) -> None:
        place, address = self.head.place, self.connection.address
        model, version = ("", "") if self._call is None else self._call.managed
        if not model:
            model, version = named_model(place.row.route, place.path)
        is_of_key = place.row.needs == API_KEY and status < 500  # 500: the file of keys can't be written
        is_refused = self.task is None or status in _REFUSALS or is_of_key
        outcome: Outcome = "refused" if is_refused else "failed"
        if status < 400 or (self._call is not None and self._call.has_changed):
            outcome = "done"
        identity = "" if self.caller == address else self.caller
        change = "" if self._call is None else self._call.change
        named = (action, model, version)
        audit_log.add(
            AuditedCall(identity, address, "rest", *named, outcome=outcome, status=status, change=change)
        )

    def take(self, piece: bytes) -> None:
        """Buffer the next bytes of the body."""
        if not self.complete:
            self._body += piece
            if len(self._body) > HELD_BYTES:
                self.connection.hold()
            self._came.set()

    def whole(self) -> None:
        """Record that the request has arrived completely."""
        self._is_whole = True
        self._came.set()

    async def _run(self) -> None:
        headers = partial(tuple, self.head.headers)
        self._call = call = CallScope("rest", self.started_s, headers, status_of, caller=self.caller)
        if self.connection.listener.metrics.tracing is not None:
            call.operation = self.operation()
        try:
            if self.head.place.path.endswith("\n"):
                # The framework would route it as the path without "\n", which may need another key.
                raise NotFound(wording.NO_SUCH_RESOURCE)
            await self.connection.listener.routes(self._scope(), self.receive, self.send)
            if not self.complete:
                raise RuntimeError("the app returned before its answer was complete")
        except asyncio.CancelledError:  # at shutdown; the change of the request may be in effect
            if not self.complete:
                self._fail(CutOff("The server is stopping."))
            raise
        except ServingError as error:
            self._fail(error)
        except Exception as error:  # the top of a request: a bug is logged, and the client gets a 500
            fields = fields_of(self.request_id, call.request)
            logger.exception("request %s failed unexpectedly", self.request_id, extra=fields)
            self._fail(ServingError("Internal server error", repr(error)))

    def _fail(self, error: ServingError) -> None:
        if self._gone_status:
            self._count(status_of(error))
        else:
            self.answer_error(error)

    def _scope(self) -> Scope:
        head, transport = self.head, self.connection.transport
        server = transport.get_extra_info("sockname")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": head.version,
            "server": server[:2] if isinstance(server, tuple) else None,
            "client": self.connection.client,
            "scheme": "http" if transport.get_extra_info("sslcontext") is None else "https",
            "root_path": "",
            "method": head.method,
            "path": head.place.path,
            "raw_path": head.place.raw_path,
            "query_string": head.place.query,
            "headers": [(name.lower(), value) for name, value in head.headers],
            SPELLED_HEADERS: head.headers,
            REQUEST_ID: self.request_id,
            "state": {},
        }

    async def receive(self) -> Message:
        """Return the next piece of the body, or the disconnect message; the app calls this."""
        if self._expects:
            self._expects = False
            if self.status == 0 and not self._gone_status:
                self.connection.write(CONTINUE)
        while not (self._gone_status or self.complete):
            if self._body or (self._is_whole and not self._is_told):
                body, self._body = self._body, bytearray()
                self._is_told = self._is_whole
                return {"type": "http.request", "body": bytes(body), "more_body": not self._is_whole}
            if not self._is_whole:
                self.connection.release()
            self._came.clear()
            await self._came.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Collect a part of the response, which is sent whole after the last part; the app calls this."""
        kind = message["type"]
        if kind == "http.response.start" and self._head_of_app is None:
            self._head_of_app = message["status"], _checked(message["headers"])
        elif kind == "http.response.body" and self._head_of_app is not None and not self.complete:
            self._body_of_app += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_whole(*self._head_of_app)
        else:
            raise RuntimeError(f"unexpected ASGI message {kind!r}")

    async def _send_whole(self, status: int, headers: RawHeaders) -> None:
        if not self._gone_status:
            await self.connection.drain()
        if self._gone_status:
            self._count(status)
        else:
            self.answer(status, headers, self._body_of_app)

    def ended(self, status: int = CLIENT_GONE) -> None:
        """Record the end of the connection before the response ended, and notify the app.

        The request is counted when the app finishes: with `status` if the connection answered itself, else
        with the status of the app's response.
        """
        if not (self.complete or self._gone_status):
            self._gone_status = status
            self._came.set()

    def _count(self, status: int) -> None:
        self.complete = True
        self.finished(status if self._gone_status == CLIENT_GONE else self._gone_status)

    @property
    def prediction(self) -> Request | None:
        """The prediction that the app made; None if it made none."""
        return None if self._call is None else self._call.request

    def let_go(self) -> None:
        """Drop the rest of the body after the response, and wake an app that is still in `receive`."""
        self._body, self._body_of_app, self._call = bytearray(), b"", None
        if not self._is_whole:
            self.connection.release()
        self._came.set()


def _checked(headers: Iterable[tuple[bytes, bytes]]) -> RawHeaders:
    """Return the headers of the app's response, with names in lower case."""
    for name, value in headers:
        if _LINE_BREAK.search(name) or _LINE_BREAK.search(value):
            raise RuntimeError(f"HTTP can't carry the header {name!r}: {value!r}")
    lowered = [(name.lower(), value) for name, value in headers]
    return [line for line in lowered if line[0] not in _OURS]
