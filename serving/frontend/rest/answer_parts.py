"""Status lines and header lines of responses, as in TorchServe. Pure."""

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

NO_CONTENT = frozenset({204, 304})  # RFC 9110, 6.4.1: a body here would be read as the next response
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_NO_CACHE = (
    b"pragma: no-cache\r\n"
    b"cache-control: no-cache; no-store, must-revalidate, private\r\n"
    b"expires: Thu, 01 Jan 1970 00:00:00 UTC\r\n"
)
# The last lines of every head, with the empty line; the key is whether the connection stays open.
LAST_LINES = {
    True: _NO_CACHE + b"connection: keep-alive\r\n\r\n",
    False: _NO_CACHE + b"connection: close\r\n\r\n",
}
# Python 3.13 adopted the names of RFC 9110; TorchServe's clients get those of RFC 2616 from every Python.
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

_MAX_KEPT = 256  # cached entries of handler headers
_MAX_KEPT_BYTES = 512  # of one entry
_kept: dict[Sequence[tuple[str, str]], bytes] = {}


def error_answer(error: ServingError, *, show_detail: bool) -> tuple[int, RawHeaders, bytes]:
    """Return status, headers and body of an error; with its details if `show_detail`."""
    headers = [_JSON]
    if isinstance(error, QueueFull):
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
    body = pretty(error_body(error, show_detail)).encode() + b"\n"
    return status_and_type(error)[0], headers, body


def cors_headers(cors: CorsHeaders) -> RawHeaders:
    """Return the configured `Access-Control-*` headers, which responses get unless the handler sets them."""
    named = {
        b"access-control-allow-origin": cors.origin,
        b"access-control-allow-methods": cors.methods,
        b"access-control-allow-headers": cors.headers,
    }
    return [(name, value.encode("latin-1")) for name, value in named.items() if value]


def missing(lines: RawHeaders, headers: RawHeaders) -> RawHeaders:
    """Return the headers of `lines` whose names do not occur in `headers`."""
    names = {name for name, _ in headers}
    return [line for line in lines if line[0] not in names]


def joined(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Encode headers as header lines."""
    return b"".join([b"%b: %b\r\n" % line for line in headers])


def checked_status(response: InferResponse) -> int:
    """Return the status that a handler chose.

    Raises:
        HandlerFailed: it is not a final HTTP status (200 to 599).
    """
    if 200 <= response.status <= 599:
        return response.status
    detail = f"the handler set the status {response.status}; a final HTTP status is from 200 to 599"
    raise HandlerFailed("Prediction failed", 500, detail)


def handler_lines(headers: Sequence[tuple[str, str]]) -> bytes:
    """As `handler_headers`, encoded as header lines, with a cache: handlers repeat their headers."""
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
    """Return the headers that a handler set, as bytes, without those that the server sets itself.

    Raises:
        HandlerFailed: a name or value is not valid in a header (a line break would inject other headers).
    """
    raw = {}  # the last header of a name wins, as in TorchServe
    for name, value in headers:
        lowered = name.lower()
        if lowered not in _OURS:
            raw[lowered.encode("latin-1", "replace")] = _header_value(name, value)
    return list(raw.items())


def _header_value(name: str, value: str) -> bytes:
    encoded = value.encode("latin-1", "replace")  # "?" for characters outside latin-1, as in TorchServe
    if _NAME.fullmatch(name) and not _CONTROL.search(encoded):
        return encoded
    raise HandlerFailed(
        "Prediction failed", 500, f"the handler set a header that HTTP can't carry: {name!r}: {value!r}"
    )
