"""What telemetry knows of a prediction: its marks, its trace, and its fields in log lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torchere.serving.telemetry.numbers import VersionNumbers
    from torchere.serving.telemetry.trace_context import TraceContext


class Dequeued(Protocol):
    """What tells whether a request was given to an executor."""

    dequeued_s: float  # 0: it never left the queue


class Marks(Protocol):
    """The marks of one prediction: monotonic seconds, 0.0 for a point that it did not reach."""

    started_s: float  # the head arrived
    read_s: float  # the body was complete
    enqueued_s: float
    dequeued_s: float
    company_s: float  # the part of its wait in which an executor was free and the batch not full
    stages_s: tuple[
        float, float, float, float
    ]  # preprocess, inference, postprocess, the handler's other time
    answered_s: float  # the handler answered, or sent the first part
    sending_s: float  # the first byte of the answer was written
    named: bool  # the client named a version
    trace: TraceContext | None


class Predicted(Marks, Protocol):
    """A prediction, as telemetry reads it (`batching/request.py` has the object)."""

    request_id: str
    meter: VersionNumbers | None  # None: no version was found
    counted: bool  # its end was counted

    @property
    def protocol(self) -> str:
        """`rest` or `grpc`."""


class Tracing(Protocol):
    """Makes spans (`tracing.py`)."""

    def begin(self, prediction: Predicted) -> None:
        """A prediction came in."""

    def end(self, prediction: Predicted, code: str | int, now_s: float) -> None:
        """It is over."""

    def batch(
        self, model: str, version: str, request_ids: Sequence[str], queue_depth: int, executor_s: float
    ) -> None:
        """A batch came back."""

    def load(self, model: str, version: str, executor_id: int, load_s: float) -> None:
        """An executor is up."""

    def close(self) -> None:
        """Send what has not been sent. Blocks."""


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


def fields_of(request_id: str, prediction: Predicted | None) -> dict[str, str]:
    """Return the same for a request that may be a prediction."""
    if prediction is None:
        return log_fields(request_id)
    return log_fields(request_id, prediction.trace, prediction.meter)
