"""When one prediction passed which door, and how its whole time splits into stages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torchere.serving.telemetry.trace_context import TraceContext
    from torchere.serving.telemetry.version_meter import VersionMeter

Transport = Literal["rest", "grpc"]

# In the order they happen. `handler` is the time of handlers that do not tell their three stages apart.
STAGES = (
    *("receive", "decode", "queue", "batch_wait", "transfer"),
    *("preprocess", "inference", "postprocess", "handler", "encode", "send"),
)


class Waited(Protocol):
    """What a timeline reads from the request that waited (`batching/pending.py`)."""

    enqueued_s: float
    dequeued_s: float  # 0: it never left the queue
    company_s: float  # the part of the wait when an executor was free and the batch was not full
    stages_s: tuple[float, float, float, float]  # preprocess, inference, postprocess, and untold handler time


# What `row_of` gives, in seconds: the whole time, the wait for an executor, and the stages, which add up to
# the whole time.
COLUMNS = ("total", "wait", *STAGES)


class Tracing(Protocol):
    """Who makes spans (`tracing.py`)."""

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
    """One prediction. Lives on the event loop; marks are monotonic seconds, 0.0 for a door it did not reach.

    The frontend makes it, marks `read_s` and `sending_s`, and calls `finish`; the data plane sets `meter`
    when it knows the version, and calls `answered` when the answer is there.
    """

    __slots__ = (
        *("answered_s", "meter", "named", "over", "read_s", "request_id", "sending_s"),
        *("started_s", "trace", "tracing", "transport", "waited"),
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
        self.answered_s = 0.0  # 0: no handler answered it
        self.sending_s = 0.0
        self.trace = trace
        self.tracing = tracing
        self.meter: VersionMeter | None = None
        self.over = False
        self.named = False  # whether the client named a version
        self.waited: Waited | None = None

    def answered(self, waited: Waited, now_s: float) -> None:
        """A handler answered it, or began to."""
        self.waited = waited
        self.answered_s = now_s

    def finish(self, code: str | int) -> None:
        """It is over: `code` is the HTTP status, or the name of the gRPC code. Only the first call counts."""
        if self.over:
            return
        self.over = True
        now_s = time.monotonic()
        if self.meter is not None:
            self.meter.finished(self, code, now_s)
        if self.tracing is not None:
            self.tracing.end(self, code, now_s)


def log_fields(
    request_id: str, trace: TraceContext | None = None, meter: VersionMeter | None = None
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


def row_of(timeline: Timeline, waited: Waited, now_s: float) -> tuple[float, ...]:
    """Split the time of an answered prediction that is over at `now_s` into the `COLUMNS`. Pure."""
    started_s, answered_s = timeline.started_s, timeline.answered_s
    enqueued_s, dequeued_s = waited.enqueued_s, waited.dequeued_s
    read_s = timeline.read_s or started_s
    sending_s = timeline.sending_s or now_s
    preprocess, inference, postprocess, handler = waited.stages_s
    transfer = answered_s - dequeued_s - preprocess - inference - postprocess - handler
    if transfer < 0:  # a stream began before its handler ended: what it did until then is not told apart
        transfer, preprocess, inference, postprocess, handler = 0.0, 0.0, 0.0, 0.0, answered_s - dequeued_s
    wait = dequeued_s - enqueued_s
    return (
        now_s - started_s,
        wait,
        read_s - started_s,
        enqueued_s - read_s,
        wait - waited.company_s,
        waited.company_s,
        transfer,
        preprocess,
        inference,
        postprocess,
        handler,
        sending_s - answered_s,
        now_s - sending_s,
    )
