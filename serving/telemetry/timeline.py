"""The marks of one prediction while it passes the frontend, the data plane and a batcher."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torchere.serving.telemetry.numbers import VersionNumbers
    from torchere.serving.telemetry.trace_context import TraceContext

Transport = Literal["rest", "grpc"]


class Waited(Protocol):
    """What a timeline reads from the request that waited (`batching/pending.py`)."""

    enqueued_s: float
    dequeued_s: float  # 0: it never left the queue
    company_s: float
    stages_s: tuple[float, float, float, float]


class Tracing(Protocol):
    """Makes spans (`tracing.py`)."""

    def begin(self, timeline: Timeline) -> None:
        """A prediction came in."""

    def end(self, timeline: Timeline, code: str | int, now_s: float) -> None:
        """It is over."""

    def batch(
        self, model: str, version: str, request_ids: Sequence[str], queue_depth: int, executor_s: float
    ) -> None:
        """A batch came back."""

    def load(self, model: str, version: str, executor_id: int, load_s: float) -> None:
        """An executor is up."""

    def close(self) -> None:
        """Send what has not been sent. Blocks."""


class Timeline:
    """One prediction, with the marks of `stages.Marks`. Lives on the event loop.

    The frontend makes it, marks `read_s` and `sending_s`, and calls `finish`; the data plane sets `meter`
    when it knows the version, and calls `answered` when the answer is there.
    """

    __slots__ = (
        *("answered_s", "company_s", "dequeued_s", "enqueued_s", "meter", "named", "over", "read_s"),
        *("request_id", "sending_s", "stages_s", "started_s", "trace", "tracing", "transport", "waited"),
    )

    def __init__(
        self,
        transport: Transport,
        request_id: str,
        started_s: float,
        trace: TraceContext | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.transport: Transport = transport
        self.request_id = request_id
        self.started_s = started_s
        self.read_s = 0.0
        self.enqueued_s = 0.0
        self.dequeued_s = 0.0
        self.company_s = 0.0
        self.stages_s = (0.0, 0.0, 0.0, 0.0)
        self.answered_s = 0.0  # 0: no handler answered it
        self.sending_s = 0.0
        self.trace = trace
        self.tracing = tracing
        self.meter: VersionNumbers | None = None
        self.over = False
        self.named = False  # whether the client named a version
        self.waited: Waited | None = None

    def answered(self, waited: Waited, now_s: float) -> None:
        """Note that a handler answered it, or began to."""
        self.waited = waited
        self.answered_s = now_s

    def finish(self, code: str | int) -> None:
        """End it: `code` is the HTTP status, or the name of the gRPC code. Only the first call counts."""
        if self.over:
            return
        self.over = True
        now_s = time.monotonic()
        waited = self.waited
        if waited is not None:  # not before now: a stream is answered before its batch is finished
            self.enqueued_s, self.dequeued_s = waited.enqueued_s, waited.dequeued_s
            self.company_s, self.stages_s = waited.company_s, waited.stages_s
        if self.meter is not None:
            self.meter.finished(self, code, now_s)
        if self.tracing is not None:
            self.tracing.end(self, code, now_s)


def log_fields(
    request_id: str, trace: TraceContext | None = None, meter: VersionNumbers | None = None
) -> dict[str, str]:
    """What log lines say about a request besides, as far as it is known; for `extra=`."""
    fields = {"request_id": request_id} if request_id else {}
    if trace is not None:
        fields["trace_id"] = trace.trace_id
    if meter is not None:
        fields |= {"model": meter.model, "version": meter.version}
    return fields


def fields_of(request_id: str, timeline: Timeline | None) -> dict[str, str]:
    """The same, of a request that may be a prediction."""
    if timeline is None:
        return log_fields(request_id)
    return log_fields(request_id, timeline.trace, timeline.meter)
