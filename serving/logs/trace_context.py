"""W3C Trace Context: the trace of a request, parsed from the client's headers. Pure functions.

https://www.w3.org/TR/trace-context/: `version-traceid-parentid-flags`, all in lower-case hexadecimal digits.
Malformed headers are ignored, as the standard requires; they never fail a request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
_NAMES = frozenset({TRACEPARENT, TRACESTATE})
_LENGTHS = frozenset(map(len, _NAMES))
_SAMPLED = 1
MAX_STATE_CHARACTERS = 4096  # the standard requires at least 512 to be forwarded
# Version 00 has exactly four fields; later versions may have more, which are ignored. ff is invalid.
_TRACEPARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)


class TraceContext(NamedTuple):
    """The position of a request in a trace."""

    trace_id: str  # 32 hexadecimal digits
    parent_id: str  # 16 hexadecimal digits: the caller's span
    sampled: bool
    state: str = ""  # `tracestate`, not parsed


def parse_trace_context(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """Parse the two headers; return None unless `traceparent` is well formed."""
    if len(traceparent) > 256:
        return None
    found = _TRACEPARENT.fullmatch(traceparent.strip())
    if found is None or (found[1] == "00" and found[5] is not None):
        return None
    state = tracestate if len(tracestate) <= MAX_STATE_CHARACTERS and tracestate.isascii() else ""
    return TraceContext(found[2], found[3], bool(int(found[4], 16) & _SAMPLED), state)


def trace_of_headers(headers: Iterable[tuple[str | bytes, str | bytes]]) -> TraceContext | None:
    """Return the trace context of header lines; names are case-insensitive, `tracestate` lines are joined.

    The result is None unless there is exactly one `traceparent` line and it is well formed.
    """
    lines = trace_headers(headers)
    if not lines:
        return None
    traceparents = [value for name, value in lines if name == TRACEPARENT]
    if len(traceparents) != 1:  # two lines would contradict each other
        return None
    states = [value for name, value in lines if name == TRACESTATE]
    return parse_trace_context(traceparents[0], ",".join(states))


def trace_headers(headers: Iterable[tuple[str | bytes, str | bytes]]) -> list[tuple[str, str]]:
    """Return the trace-context header lines, with lower-case names, for forwarding."""
    # Compare lengths first: this runs for every request, and few other headers have one of these lengths.
    return [
        (_text(name).lower(), _text(value))
        for name, value in headers
        if len(name) in _LENGTHS and _text(name).lower() in _NAMES
    ]


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
