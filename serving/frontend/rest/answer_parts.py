"""Status lines and header lines of answers, by TorchServe's contract. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from http import HTTPStatus

from torchere.serving.errors import HandlerFailed, QueueFull, ServingError
from torchere.serving.frontend.description import pretty
from torchere.serving.frontend.rest.errors import error_body, status_and_type
from torchere.serving.frontend.services import CorsHeaders
from torchere.serving.types import InferResponse

RawHeaders = list[tuple[bytes, bytes]]

NO_CONTENT = frozenset({204, 304})  # RFC 9110, 6.4.1: a body behind these would be read as another answer
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_NO_CACHE = (
    b"pragma: no-cache\r\n"
    b"cache-control: no-cache; no-store, must-revalidate, private\r\n"
    b"expires: Thu, 01 Jan 1970 00:00:00 UTC\r\n"
)
# What every head ends with, the empty line included; by whether the connection stays open.
LAST_LINES = {
    True: _NO_CACHE + b"connection: keep-alive\r\n\r\n",
    False: _NO_CACHE + b"connection: close\r\n\r\n",
}
# Python 3.13 renamed these with RFC 9110; TorchServe's clients see the names of RFC 2616 under every Python.
_PHRASES = {status.value: status.phrase for status in HTTPStatus} | {
    413: "Request Entity Too Large",
    414: "Request-URI Too Long",
    416: "Requested Range Not Satisfiable",
    422: "Unprocessable Entity",
}
STATUS_LINES = {
    status: f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n".encode("ascii") for status in range(100, 600)
}
_JSON = (b"content-type", b"application/json")
_OURS = frozenset(
    {"x-request-id", "pragma", "cache-control", "expires"}
    | {"connection", "content-length", "transfer-encoding"}
)
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, 5.6.2: token
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")

_MAX_KEPT = 256  # header lines of handlers
_MAX_KEPT_BYTES = 512  # of one handler's
_kept: dict[Sequence[tuple[str, str]], bytes] = {}


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


def joined(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Header lines as they are sent."""
    return b"".join([b"%b: %b\r\n" % line for line in headers])


def checked_status(response: InferResponse) -> int:
    """The status a handler chose.

    Raises:
        HandlerFailed: HTTP has no such final status.
    """
    if 200 <= response.status <= 599:
        return response.status
    detail = f"the handler set the status {response.status}; a final HTTP status is from 200 to 599"
    raise HandlerFailed("Prediction failed", 500, detail)


def handler_lines(headers: Sequence[tuple[str, str]]) -> bytes:
    """As `handler_headers`, ready to be sent. Models set the same few in each answer, so they are kept."""
    if not headers:
        return b""
    lines = _kept.get(headers)
    if lines is None:
        lines = joined(handler_headers(headers))
        if len(lines) <= _MAX_KEPT_BYTES:
            if len(_kept) >= _MAX_KEPT:
                _kept.clear()
            _kept[headers] = lines
    return lines


def handler_headers(headers: Sequence[tuple[str, str]]) -> RawHeaders:
    """The headers a handler set, as bytes; those that the server decides itself are left out.

    Raises:
        HandlerFailed: a name or value can't stand in a header (a line break in it would forge others).
    """
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
