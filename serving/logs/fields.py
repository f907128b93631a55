"""The ids of a request, as fields of its log lines."""

from __future__ import annotations

from typing import Protocol

from torchere.serving.logs.trace_context import TraceContext


class ModelVersion(Protocol):
    """The names of a version that log lines contain."""

    @property
    def model(self) -> str:
        """The name of the model."""

    @property
    def version(self) -> str:
        """The name of the version."""


class LoggedPrediction(Protocol):
    """The parts of a prediction that log lines contain; `batching/request.py` implements it."""

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
    """Return `log_fields` of a request; `prediction` is None for requests other than predictions."""
    if prediction is None:
        return log_fields(request_id)
    return log_fields(request_id, prediction.trace, prediction.meter)
