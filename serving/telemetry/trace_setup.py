"""Sets up tracing: the only module that imports `tracing`, and only if tracing is enabled."""

from __future__ import annotations

from torchere.serving.errors import ServingError
from torchere.serving.telemetry.predictions import Tracing

SERVICE = "torchere"  # the service name, unless OTEL_SERVICE_NAME is set


def open_tracing(version: str) -> Tracing:
    """Return a span maker that exports spans as OpenTelemetry's environment variables configure.

    Raises:
        ServingError: OpenTelemetry's packages are not installed.
    """
    try:
        from torchere.serving.telemetry.tracing import SpanMaker, exporting_provider  # noqa: PLC0415 - optional
    except ImportError as err:
        raise ServingError(
            "Tracing is on, and OpenTelemetry is not installed.",
            f"{err}. Install torchere[otel], or leave out tracing=true",
        ) from err
    return SpanMaker(exporting_provider(SERVICE, version))
