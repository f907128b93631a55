"""The parts of a prediction that metrics and tracing read, and the interface of tracing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torchere.serving.errors import ServingError
from torchere.serving.telemetry.stages import Marks

if TYPE_CHECKING:
    from torchere.serving.telemetry.numbers import VersionNumbers


class Operation(NamedTuple):
    """The name of a request's span, and attributes of it, in OpenTelemetry's words for HTTP or RPC."""

    name: str
    attributes: Mapping[str, str | int]


class Predicted(Marks, Protocol):
    """The parts of a prediction that telemetry reads; `batching/request.py` implements it."""

    request_id: str
    meter: VersionNumbers | None  # None: no version was found
    counted: bool  # whether its end has been counted
    error: ServingError | None  # that its client was told

    @property
    def protocol(self) -> str:
        """`rest` or `grpc`."""

    def operation(self) -> Operation:
        """Return the request as its protocol names it."""


class Tracing(Protocol):
    """Creates spans; `tracing.py` implements it."""

    def begin(self, prediction: Predicted) -> None:
        """Start the span of a prediction that arrived."""

    def end(self, prediction: Predicted, code: str | int, now_s: float) -> None:
        """End the span of a prediction."""

    def batch(
        self,
        model: str,
        version: str,
        request_ids: Sequence[str],
        queue_depth: int,
        executor_s: float,
        *,
        succeeded: bool = True,
    ) -> None:
        """Create the span of a finished batch; `succeeded`: at least one of its requests did not fail."""

    def load(self, model: str, version: str, executor_id: int, load_s: float) -> None:
        """Create the span of the start of an executor."""

    def close(self) -> None:
        """Send the remaining spans. Blocks."""
