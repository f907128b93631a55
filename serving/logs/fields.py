"""The ids of a request, as fields of its log lines."""

from __future__ import annotations

from typing import Protocol

from torchere.serving.logs.trace_context import TraceContext


class ModelVersion(Protocol):
    """A version, as log lines name it."""

    @property
    def model(self) -> str:
        """Its model's name."""

    @property
    def version(self) -> str:
        """Its version name."""


class LoggedPrediction(Protocol):
    """A prediction, as log lines name it (`batching/request.py` has the object)."""

    request_id: str
    trace: TraceContext | None

    @property
    def meter(self) -> ModelVersion | None:
        """The version that the request is for; None: no version was found."""


def log_fields(
    request_id: str, trace: TraceContext | None = None, version: ModelVersion | None = None
) -> dict[str, str]:
    """Return the known fields of a request, for `extra=`."""
    fields = {"request_id": request_id} if request_id else {}
    if trace is not None:
        fields["trace_id"] = trace.trace_id
    if version is not None:
        fields |= {"model": version.model, "version": version.version}
    return fields


def fields_of(request_id: str, prediction: LoggedPrediction | None) -> dict[str, str]:
    """Return `log_fields` of a request that may be a prediction."""
    if prediction is None:
        return log_fields(request_id)
    return log_fields(request_id, prediction.trace, prediction.meter)
