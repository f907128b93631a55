"""Parts of HTTP responses: status and header lines, content codings, headers of the v2 protocol. Pure."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from torchere.serving.config.server_settings import ServerSettings
from torchere.serving.errors import HandlerFailed, InvalidRequest, ServingError
from torchere.serving.frontend.budgets import WINDOW_BITS, inflated, inflated_if_short
from torchere.serving.frontend.known_heads import Known
from torchere.serving.frontend.rest.errors import (
    InflatesTooFar,
    UnknownCoding,
    error_members,
    status_and_type,
)
from torchere.serving.frontend.wording import pretty
from torchere.serving.types import InferResponse

RawHeaders = list[tuple[bytes, bytes]]

RESET_CONTENT = 205  # RFC 9110, 15.3.6: it has no content, and says so by its length
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
# Python 3.13 adopted the names of RFC 9110; TorchServe's clients get those of RFC 2616 from any version.
_PHRASES = {status.value: status.phrase for status in HTTPStatus} | {
    413: "Request Entity Too Large",
    414: "Request-URI Too Long",
    416: "Requested Range Not Satisfiable",
    422: "Unprocessable Entity",
}
STATUS_LINES = {
    status: f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n".encode("ascii") for status in range(100, 600)
}
JSON = (b"content-type", b"application/json")
_OURS = frozenset(
    {"x-request-id", "pragma", "cache-control", "expires"}
    | {"connection", "content-length", "transfer-encoding"}
)
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, 5.6.2: token
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")

_MAX_KEPT = 256  # number of cached encodings of handler headers
_MAX_KEPT_BYTES = 512  # maximum size of one encoding
_kept: Known[Sequence[tuple[str, str]], bytes] = Known(_MAX_KEPT)


def error_answer(error: ServingError, *, show_detail: bool, path: str = "") -> tuple[int, RawHeaders, bytes]:
    """Return status, headers and body of an error for a request's path; with its details if `show_detail`."""
    status, kind = status_and_type(error)
    members = error_members(status, kind, error.message, path)
    if show_detail and error.detail:
        members["detail"] = error.detail
    headers = [JSON]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
    return status, headers, pretty(members).encode() + b"\n"


def cors_headers(settings: ServerSettings) -> RawHeaders:
    """Return the configured `Access-Control-*` headers, which responses get unless the handler sets them."""
    named = {
        b"access-control-allow-origin": settings.cors_allowed_origin,
        b"access-control-allow-methods": settings.cors_allowed_methods,
        b"access-control-allow-headers": settings.cors_allowed_headers,
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
        # The limit is on the key, which also holds the headers that are left out of the lines.
        if sum(len(name) + len(value) for name, value in headers) <= _MAX_KEPT_BYTES:
            _kept.keep(headers, lines)
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


Coding: TypeAlias = Literal["gzip", "deflate"]

KNOWN = "gzip, deflate"
_CODINGS: dict[str, Coding] = {"gzip": "gzip", "x-gzip": "gzip", "deflate": "deflate"}
_BARE = -15  # raw deflate without zlib's frame, as some clients send it (RFC 9110, 8.4.1.2)
_LEVEL = 1  # higher levels hardly shrink tensors more, and take several times as long
# zlib releases the GIL. Above this size the loop would be blocked for longer than a thread costs.
DEFLATED_IN_THREAD_BYTES = 16_384


def request_coding(value: bytes) -> Coding | None:
    """Return the coding that a `Content-Encoding` names; None: the body is not compressed.

    Raises:
        UnknownCoding: the coding is not supported, or there are several.
    """
    name = value.decode("latin-1").strip().lower()
    if name in ("", "identity"):
        return None
    coding = _CODINGS.get(name)
    if coding is None:
        raise UnknownCoding(f"Content-Encoding: found {name[:80]!a}, expected one of {KNOWN}, identity")
    return coding


def answer_coding(accepted: bytes) -> Coding | None:
    """Return the coding to use for an `Accept-Encoding`; None: do not compress.

    Responses are compressed only for clients that name a single coding, as tritonclient does with
    `response_compression_algorithm`. Clients that list all codings they support (requests, httpx, browsers)
    get uncompressed responses: compressing a tensor takes ten times as long as answering with it.
    """
    names = [
        name for name, is_allowed in _accepted(accepted.decode("latin-1")).items() if name and is_allowed
    ]
    return _CODINGS.get(names[0]) if len(names) == 1 else None


def accepts_gzip(accepted: str) -> bool:
    """Return whether an `Accept-Encoding` allows gzip, by its name or by `*`.

    >>> accepts_gzip("br, gzip;q=0.5"), accepts_gzip("gzip;q=0, *"), accepts_gzip("")
    (True, False, False)
    """
    codings = _accepted(accepted)
    return codings.get("gzip", codings.get("*", False))


def _accepted(header: str) -> dict[str, bool]:
    """Return the codings of an `Accept-Encoding`, and whether each of them is allowed."""
    items = [item.partition(";") for item in header.lower().split(",")]
    return {name.strip(): not _is_zero(weight) for name, _, weight in items}


def inflate(body: bytes | memoryview, coding: Coding, max_bytes: int) -> bytes:
    """Decompress a body.

    Raises:
        InflatesTooFar: the result would exceed `max_bytes`; decompression stops there, to bound the memory.
        InvalidRequest: the body is malformed.
    """
    try:
        return _inflate(body, WINDOW_BITS[coding], max_bytes)
    except zlib.error as err:
        if coding == "deflate":
            try:
                return _inflate(body, _BARE, max_bytes)
            except zlib.error:
                pass  # report the error of the standard form, not of the raw one
        raise InvalidRequest(f"Content-Encoding: found a body that is no {coding} ({err})") from err


def inflate_if_short(body: bytes | memoryview, coding: Coding) -> bytes | None:
    """Decompress a body that is short in both forms; None: call `inflate`, in a thread."""
    return inflated_if_short(body, WINDOW_BITS[coding])


def deflate(body: bytes, coding: Coding) -> bytes:
    """Compress a body."""
    packer = zlib.compressobj(_LEVEL, wbits=WINDOW_BITS[coding])
    return packer.compress(body) + packer.flush()


def _inflate(body: bytes | memoryview, window: int, max_bytes: int) -> bytes:
    found = inflated(body, window, max_bytes)
    if len(found) > max_bytes:
        raise InflatesTooFar(f"the body inflates to more than max_request_size={max_bytes} bytes")
    return found


def _is_zero(weight: str) -> bool:
    name, _, value = weight.partition("=")
    return name.strip() == "q" and not value.strip().strip("0.")


LENGTH = b"inference-header-content-length"
EVENTS = b"text/event-stream"
EVENTS_IN_UTF8 = EVENTS + b"; charset=utf-8"  # the default, but `requests` takes text without it for Latin-1


class Wire(NamedTuple):
    """Parsed values of the protocol's headers."""

    json_bytes: int | None = None  # length of the JSON in the decompressed body; None: the whole body
    wants_events: bool = False
    coding: Coding | None = None  # of the request body
    answer_coding: Coding | None = None


def read_wire(headers: Iterable[tuple[bytes, bytes]]) -> Wire:
    """Parse the protocol's headers; header names are case-insensitive.

    Raises:
        InvalidRequest: the length is not a number, or the content coding of the body is unknown.
    """
    wire = Wire()
    for spelled, value in headers:
        name = spelled.lower()
        if name == LENGTH:
            digits = value.strip()
            if not digits.isdigit() or len(digits) > 18:
                shown = ascii(value[:80].decode("latin-1"))
                raise InvalidRequest(f"Inference-Header-Content-Length: found {shown}, expected a number")
            wire = wire._replace(json_bytes=int(digits))
        elif name == b"accept" and EVENTS in value:
            wire = wire._replace(wants_events=True)
        elif name == b"content-encoding":
            wire = wire._replace(coding=request_coding(value))
        elif name == b"accept-encoding":
            wire = wire._replace(answer_coding=answer_coding(value))
    return wire


def protocol_error(error: ServingError) -> tuple[int, RawHeaders, bytes]:
    """Return status, headers and body of an error in this protocol's form.

    The body also has TorchServe's `type`, by which a client distinguishes a full queue from a handler's 503.
    """
    status, headers, _ = error_answer(error, show_detail=False)
    if isinstance(error, UnknownCoding):
        headers.append((b"accept-encoding", KNOWN.encode()))
    return status, headers, msgspec.json.encode({"error": error.message, "type": status_and_type(error)[1]})
