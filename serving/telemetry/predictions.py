"""The parts of a prediction that telemetry reads: time marks, trace, and log fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torchere.serving.logs.trace_context import TraceContext
    from torchere.serving.telemetry.numbers import VersionNumbers


class Dequeued(Protocol):
    """A request with the time at which it was given to an executor."""

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
        """Start the span of a prediction that came in."""

    def end(self, prediction: Predicted, code: str | int, now_s: float) -> None:
        """End the span of a prediction."""

    def batch(
        self, model: str, version: str, request_ids: Sequence[str], queue_depth: int, executor_s: float
    ) -> None:
        """Make the span of a batch that came back."""

    def load(self, model: str, version: str, executor_id: int, load_s: float) -> None:
        """Make the span of an executor's load."""

    def close(self) -> None:
        """Send the remaining spans. Blocks."""
