"""The headers that only the Open Inference Protocol minds, and how its errors are written. Pure."""

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
    """What they say."""

    json_bytes: int | None = None  # how much of the body, inflated, is JSON; None: all
    wants_events: bool = False
    coding: Coding | None = None  # of the body
    answer_coding: Coding | None = None


def read_wire(headers: Iterable[tuple[bytes, bytes]]) -> Wire:
    """Pick them out, whatever the spelling of their names.

    Raises:
        InvalidRequest: a length that is none, or a body that is compressed in an unknown way.
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
    """Status, headers and body of an error, as this protocol's clients read it."""
    status, headers, _ = error_answer(error, show_detail=False)
    if isinstance(error, UnknownCoding):
        headers.append((b"accept-encoding", KNOWN.encode()))
    return status, headers, msgspec.json.encode({"error": error.message})
