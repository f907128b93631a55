"""What crosses a room, a thread or a process: frozen records and nothing else.

The records are `msgspec` structs, so that the process executor can put them on its socket as they are.
All times are seconds on the monotonic clock of this machine (`time.monotonic()`), which every process on it
shares; a duration becomes one absolute `deadline_s` at the door and is never restarted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple

import msgspec

NO_DEADLINE = float("inf")


class ModelKey(NamedTuple):
    """Identity of one immutable archive of a model."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name}:{self.version}"


class Parameter(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One named value of a request, as it came: the host around the handler decides how to decode it."""

    name: str
    value: bytes  # a memoryview of what was received, where it is a tensor, or large and in a worker
    content_type: str = ""  # without parameters, "" when the client named none


class InferRequest(msgspec.Struct, frozen=True, array_like=True):
    """One client call on its way to a handler."""

    request_id: str  # uuid4 made by the frontend; the handler and the client see the same
    parameters: tuple[Parameter, ...]
    headers: tuple[tuple[str, str], ...] = ()  # in the client's spelling; the last duplicate wins
    deadline_s: float = NO_DEADLINE  # monotonic seconds; an answer after it is worthless
    priority: int = 0  # among those that wait for the same version; see `batching/priority.py`


class InferResponse(msgspec.Struct, frozen=True, array_like=True):
    """One complete answer of a handler; `status` and `reason` are the handler contract's."""

    body: bytes  # in the server a large one is a memoryview of what its worker sent
    headers: tuple[tuple[str, str], ...] = ()
    status: int = 200
    reason: str = ""


class StreamedResponse:
    """An answer in parts. `head` has status and headers; iterate `chunks`, all of the body, once.

    Iterating raises a `ServingError` when the executor fails midway.
    """

    __slots__ = ("chunks", "head")

    def __init__(self, head: InferResponse, chunks: AsyncIterator[bytes]) -> None:
        self.head = head
        self.chunks = chunks
