"""Immutable records that are passed between packages, threads and processes.

Records for workers are `msgspec` structs, so that messages hold them as they are (`workers/messages.py`).
All times are seconds on the monotonic clock of this machine (`time.monotonic()`), which every process on it
shares; the frontend converts a timeout to one absolute `deadline_s`, which is never extended.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Annotated, NamedTuple

import msgspec

NO_DEADLINE = float("inf")
MAX_RESPONSE_HEADERS = 1000  # clients accept 100 or so
MAX_RESPONSE_HEADER_BYTES = 2**16  # clients accept 8 to 64 KiB


class ModelKey(NamedTuple):
    """Identity of one immutable archive of a model."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name}:{self.version}"


class ClientNumbers(NamedTuple):
    """The counters of one client, or of all clients without an identity, at one point in time."""

    admitted: int  # predictions
    running: int  # of these, not answered yet
    refused: Mapping[str, int]  # refused requests, by the limit that they reached


class Parameter(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One named value of a request, undecoded: the host around the handler decides how to decode it."""

    name: str
    value: bytes  # a memoryview of the receive buffer for a tensor, or for a large value in a worker
    content_type: str = ""  # without its parameters, such as charset; "" when the client named none


class InferRequest(msgspec.Struct, frozen=True, array_like=True):
    """One client call on its way to a handler."""

    request_id: str  # uuid4 made by the frontend; the handler and the client see the same
    parameters: tuple[Parameter, ...]
    headers: tuple[tuple[str, str], ...] = ()  # in the client's spelling; the last duplicate wins
    deadline_s: float = NO_DEADLINE  # monotonic seconds; a response after it is useless
    priority: int = 0  # among queued requests of the same version; see `batching/fair_queue.py`


class InferResponse(msgspec.Struct, frozen=True, array_like=True, tag=21):  # tags: see `workers/messages.py`
    """One complete response of a handler; `status` and `reason` are those that the handler set."""

    body: bytes  # in the server a large body is a memoryview of the bytes that its worker sent
    headers: Annotated[tuple[tuple[str, str], ...], msgspec.Meta(max_length=MAX_RESPONSE_HEADERS)] = ()
    status: int = 200
    reason: str = ""


class StreamedResponse:
    """A streamed response: `head` has status and headers, `chunks` yields the whole body, once.

    Iterating raises a `ServingError` when the executor fails midway.
    """

    __slots__ = ("chunks", "head")

    def __init__(self, head: InferResponse, chunks: AsyncIterator[bytes]) -> None:
        self.head = head
        self.chunks = chunks
