"""The parts of a prediction that metrics and tracing read."""

from __future__ import annotations

from collections.abc import Mapping
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

    @property
    def open(self) -> bool:
        """Whether its answer is incomplete; it may be in further batches then."""

    def operation(self) -> Operation:
        """Return the request as its protocol names it."""
