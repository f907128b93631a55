"""Headers specific to the Open Inference Protocol, and the encoding of its errors. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from torchere.serving.errors import InvalidRequest, ServingError
from torchere.serving.frontend.rest.answer_parts import RawHeaders, error_answer
from torchere.serving.frontend.rest.content_coding import KNOWN, Coding, answer_coding, request_coding
from torchere.serving.frontend.rest.errors import UnknownCoding

LENGTH = b"inference-header-content-length"
EVENTS = b"text/event-stream"


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
    """Return status, headers and body of an error in this protocol's form."""
    status, headers, _ = error_answer(error, show_detail=False)
    if isinstance(error, UnknownCoding):
        headers.append((b"accept-encoding", KNOWN.encode()))
    return status, headers, msgspec.json.encode({"error": error.message})
