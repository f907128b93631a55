"""The parts of a prediction that telemetry reads: time marks, trace, log fields, and why one was refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torchere.serving.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    OverBudget,
    Quarantined,
    QueueFull,
    ServingError,
    Unauthorized,
    Unavailable,
)

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


TOO_LARGE = "too_large"  # the body; no `ServingError` class stands for it
# The first class that fits counts, so subclasses come before their bases.
_REASONS: tuple[tuple[type[ServingError], str], ...] = (
    (QueueFull, "queue_full"),
    (OverBudget, "budget"),
    (Unavailable, "not_ready"),
    (DeadlineExceeded, "deadline"),
    (Unauthorized, "auth"),
    (NotFound, "not_found"),
    (Quarantined, "quarantined"),
    (InvalidRequest, "invalid"),
)
# Reasons that every version has a counter for from the beginning.
USUAL = ("queue_full", "not_ready", "deadline")


def refusal_reason(error: ServingError) -> str:
    """Return the value of the label `reason`; for an error that is no refusal, its code."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), error.code)
