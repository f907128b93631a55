"""W3C Trace Context: the trace that a request belongs to, from its client's headers. Pure.

https://www.w3.org/TR/trace-context/: `version-traceid-parentid-flags`, all in lower-case hexadecimal digits.
Malformed headers are ignored, as the standard asks; they never fail a request.
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
MAX_STATE_CHARACTERS = 4096  # the standard wants 512 at least to be passed on
# Version 00 has exactly four fields; of later ones only the first four are known. ff is no version.
_TRACEPARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)


class TraceContext(NamedTuple):
    """The place of a request in a trace."""

    trace_id: str  # 32 hexadecimal digits
    parent_id: str  # 16: the caller's span
    sampled: bool
    state: str = ""  # `tracestate`, not parsed


def parse_trace_context(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """Parse the two headers; return None unless the first is well formed."""
    if len(traceparent) > 256:
        return None
    found = _TRACEPARENT.fullmatch(traceparent.strip())
    if found is None or (found[1] == "00" and found[5] is not None):
        return None
    state = tracestate if len(tracestate) <= MAX_STATE_CHARACTERS and tracestate.isascii() else ""
    return TraceContext(found[2], found[3], bool(int(found[4], 16) & _SAMPLED), state)


def trace_of_headers(headers: Iterable[tuple[str | bytes, str | bytes]]) -> TraceContext | None:
    """Return the trace context in header lines with names in any case; `tracestate` lines are joined.

    None unless there is exactly one `traceparent` line, and it is well formed.
    """
    lines = trace_headers(headers)
    if not lines:
        return None
    traceparents = [value for name, value in lines if name == TRACEPARENT]
    if len(traceparents) != 1:  # two of them contradict each other
        return None
    states = [value for name, value in lines if name == TRACESTATE]
    return parse_trace_context(traceparents[0], ",".join(states))


def trace_headers(headers: Iterable[tuple[str | bytes, str | bytes]]) -> list[tuple[str, str]]:
    """Return the header lines of a trace context, with names in lower case, to pass them on."""
    # Lengths first: this runs for every request, and hardly any other header has one of these lengths.
    return [
        (_text(name).lower(), _text(value))
        for name, value in headers
        if len(name) in _LENGTHS and _text(name).lower() in _NAMES
    ]


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
