"""One HTTP request from its head to its last byte: what every answer has in common."""

from __future__ import annotations

import math
import re
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from starlette.types import Message, Scope, Send

from torchere.serving.errors import HandlerFailed, QueueFull, ServingError
from torchere.serving.frontend.access_log import access_log
from torchere.serving.frontend.call_scope import CLIENT_GONE, CallScope
from torchere.serving.frontend.description import pretty
from torchere.serving.frontend.request_id import new_request_id
from torchere.serving.frontend.rest.authorisation import is_probe
from torchere.serving.frontend.rest.body import discard_rest
from torchere.serving.frontend.rest.errors import error_body, status_and_type
from torchere.serving.frontend.services import CorsHeaders
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.types import InferResponse

RawHeaders = list[tuple[bytes, bytes]]

# Where our HTTP protocol puts a weak reference to what knows whether the connection stays open, and the
# status of the answer that it gave in place of the app.
CYCLE = "torchere.cycle"
ANSWERED = "torchere.answered"

_NO_CACHE = [
    (b"pragma", b"no-cache"),
    (b"cache-control", b"no-cache; no-store, must-revalidate, private"),
    (b"expires", b"Thu, 01 Jan 1970 00:00:00 UTC"),
]
KEEP = [*_NO_CACHE, (b"connection", b"keep-alive")]
CLOSE = [*_NO_CACHE, (b"connection", b"close")]
_JSON = (b"content-type", b"application/json")
NO_CONTENT = frozenset({204, 304})  # RFC 9110, 6.4.1: a body behind these would be read as another answer
_OURS = frozenset(
    {"x-request-id", "pragma", "cache-control", "expires"}
    | {"connection", "content-length", "transfer-encoding"}
)
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, 5.6.2: token
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class Call:
    """One request being answered. Lives in one task; answer it exactly once.

    `show_detail` is true on listeners that operators use. `status` is 0 until the answer has started.
    """

    __slots__ = (
        *("_cors", "_ended_with", "_is_over", "_metrics", "_send", "_until_close"),
        *("request_id", "scope", "show_detail", "started_s", "status", "telemetry"),
    )

    def __init__(
        self, scope: Scope, send: Send, metrics: Metrics, cors: RawHeaders, *, show_detail: bool = False
    ) -> None:
        self.scope = scope
        self.request_id = new_request_id()
        self.started_s = time.monotonic()
        self.status = 0
        self.show_detail = show_detail
        self._send = send
        self._metrics = metrics
        self._cors = cors
        self._ended_with = 0  # what an answer counts as that ended otherwise than it began
        self._is_over = False
        self._until_close = False  # the body ends with the connection
        self.telemetry = CallScope("rest", self.started_s, lambda: scope["headers"], _status_of)

    async def answer(self, status: int, headers: RawHeaders, body: bytes) -> None:
        """Send a complete answer; the headers that every answer has are added."""
        body = measured(status, headers, body)
        await self.start(status, headers)
        await self.body_part(body, last=True)

    async def answer_error(self, error: ServingError) -> None:
        """Send the JSON body of an error."""
        await self.answer(*error_answer(error, show_detail=self.show_detail))

    async def start(self, status: int, headers: RawHeaders) -> None:
        """Send the head of an answer whose body follows through `body_part`."""
        self.status = status
        self.telemetry.sending()
        headers.append((b"x-request-id", self.request_id.encode()))
        cycle = self._cycle()
        if cycle is not None and self.scope["http_version"] == "1.0" and not _has_length(headers):
            self._until_close = True  # RFC 9112, 6.1: the client knows no chunks, which uvicorn sends it
            cycle.keep_alive = cycle.chunked_encoding = False
            _end_by_reset(cycle.transport, True)
        headers += KEEP if status < 400 and (cycle is None or cycle.keep_alive) else CLOSE
        if self._cors:
            headers += missing(self._cors, headers)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def body_part(self, part: bytes, *, last: bool = False) -> None:
        """Send one part of the body: one chunk on the wire, and none where there is no content."""
        if self.status in NO_CONTENT:
            part = b""
        cycle = self._cycle() if self._until_close else None
        if cycle is not None:
            cycle.expected_content_length = len(part)  # or uvicorn finds it too long
            if last:
                _end_by_reset(cycle.transport, False)
        await self._send({"type": "http.response.body", "body": part, "more_body": not last})
        if last:
            self.finished()

    async def framed_send(self, message: Message) -> None:
        """An ASGI `send` for the routes of the framework: adds what every answer has."""
        if message["type"] == "http.response.start":
            await self.start(message["status"], list(message.get("headers", ())))
            return
        part, last = message.get("body", b""), not message.get("more_body", False)
        cycle = self._cycle()
        if last and cycle is not None and cycle.more_body and not cycle.keep_alive:
            await self.body_part(part)
            part = b""
            await discard_rest(cycle.receive)  # of a body that nobody asked for
        await self.body_part(part, last=last)

    def ends_with(self, error: ServingError) -> None:
        """An answer that has begun goes wrong, and counts as what went wrong."""
        self._ended_with = _status_of(error)

    def break_off(self, error: ServingError) -> None:
        """Leave the body without its end, which is what tells the client, and close."""
        self.ends_with(error)
        self.finished()
        cycle = self._cycle()
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # or uvicorn would call it a mistake
            if self._until_close:
                cycle.transport.abort()  # TLS would say farewell
            else:
                cycle.transport.close()

    def client_gone(self) -> None:
        """Nobody waits for the answer, or for more of it."""
        self._ended_with = CLIENT_GONE
        self.finished()

    def _cycle(self) -> Any:
        cycle_of = self.scope.get(CYCLE)
        return cycle_of() if cycle_of is not None else None

    def finished(self) -> None:
        """Count the answer and write its line in the access log, once."""
        if self._is_over:
            return
        self._is_over = True
        status = self.scope.get(ANSWERED) or self._ended_with or self.status
        self._metrics.request_finished(status, is_probe=is_probe(self.scope["path"]))
        self.telemetry.finish(status)
        if access_log.enabled:
            self._log_access(status)

    def _log_access(self, status: int) -> None:
        scope = self.scope
        target = scope.get("raw_path") or scope["path"].encode()
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        line = f"{scope['method']} {target.decode('latin-1')} HTTP/{scope['http_version']}"
        timeline = self.telemetry.timeline
        access_log.add(
            scope.get("client"),
            line,
            status,
            self.started_s,
            timeline=timeline,
            request_id=self.request_id,
        )


def _status_of(error: ServingError) -> int:
    return status_and_type(error)[0]


def _end_by_reset(transport: Any, wanted: bool) -> None:
    """How the connection will end: in order, which tells that the body is whole, or broken off."""
    if not transport.is_closing():
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", wanted, 0))


def _has_length(headers: RawHeaders) -> bool:
    return any(name == b"content-length" for name, _ in headers)


def measured(status: int, headers: RawHeaders, body: bytes) -> bytes:
    """The body that goes out under a status; `headers` get its length."""
    if status in NO_CONTENT:
        return b""
    headers.append((b"content-length", b"%d" % len(body)))
    return body


def error_answer(error: ServingError, *, show_detail: bool) -> tuple[int, RawHeaders, bytes]:
    """Status, headers and body of an error; with its details where operators listen."""
    headers = [_JSON]
    if isinstance(error, QueueFull):
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
    body = pretty(error_body(error, show_detail)).encode() + b"\n"
    return status_and_type(error)[0], headers, body


def cors_headers(cors: CorsHeaders) -> RawHeaders:
    """The configured `Access-Control-*` headers, which every answer has unless the handler set them."""
    named = {
        b"access-control-allow-origin": cors.origin,
        b"access-control-allow-methods": cors.methods,
        b"access-control-allow-headers": cors.headers,
    }
    return [(name, value.encode("latin-1")) for name, value in named.items() if value]


def missing(lines: RawHeaders, headers: RawHeaders) -> RawHeaders:
    """Those of `lines` that have no namesake in `headers`."""
    names = {name for name, _ in headers}
    return [line for line in lines if line[0] not in names]


def checked_status(response: InferResponse) -> int:
    """The status a handler chose.

    Raises:
        HandlerFailed: HTTP has no such final status.
    """
    if 200 <= response.status <= 599:
        return response.status
    detail = f"the handler set the status {response.status}; a final HTTP status is from 200 to 599"
    raise HandlerFailed("Prediction failed", 500, detail)


def handler_headers(headers: Sequence[tuple[str, str]]) -> RawHeaders:
    """The headers a handler set, as bytes; those that the server decides itself are left out.

    Raises:
        HandlerFailed: a name or value can't stand in a header (a line break in it would forge others).
    """
    if not headers:
        return []
    raw = {}  # the last one of a name wins, as in TorchServe
    for name, value in headers:
        lowered = name.lower()
        if lowered not in _OURS:
            raw[lowered.encode("latin-1", "replace")] = _header_value(name, value)
    return list(raw.items())


def _header_value(name: str, value: str) -> bytes:
    encoded = value.encode("latin-1", "replace")  # a question mark for what it has not, as TorchServe says
    if _NAME.fullmatch(name) and not _CONTROL.search(encoded):
        return encoded
    raise HandlerFailed(
        "Prediction failed", 500, f"the handler set a header that HTTP can't carry: {name!r}: {value!r}"
    )
