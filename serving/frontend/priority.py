"""The header with the priority of a request in the queue of its model."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from torchere.serving.batching.fair_queue import HIGHEST, LOWEST
from torchere.serving.errors import InvalidRequest
from torchere.serving.types import InferRequest

HEADER = "x-torchere-priority"
_NUMBER = re.compile(r"[+-]?[0-9]{1,3}")


def parse_priority(value: str | bytes) -> int:
    """Parse the value of the header.

    Raises:
        InvalidRequest: the value is not an integer from `LOWEST` to `HIGHEST`.
    """
    text = value if isinstance(value, str) else value.decode("latin-1")
    found = _NUMBER.fullmatch(text.strip())
    if found and LOWEST <= int(found[0]) <= HIGHEST:
        return int(found[0])
    raise InvalidRequest(
        f"Header {HEADER} must be a whole number from {LOWEST} to {HIGHEST}, found: {text[:100]!r}"
    )


def prioritised(
    request: InferRequest, pairs: Iterable[tuple[str, str | bytes]] | None = None
) -> InferRequest:
    """Return the request with the priority from the headers in `pairs` (None: from its own headers).

    Raises:
        InvalidRequest: see `parse_priority`.
    """
    for name, value in request.headers if pairs is None else pairs:
        if name.lower() == HEADER:
            return msgspec.structs.replace(request, priority=parse_priority(value))
    return request
