"""Predictions whose times a test chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from torchere.serving.batching.request import Protocol, Request
from torchere.serving.logs.trace_context import TraceContext
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.telemetry.numbers import VersionNumbers

Answer = Callable[..., Request]


@pytest.fixture
def metrics() -> Metrics:
    """Metrics that take whatever handlers report, on a host called `vm`."""
    return Metrics("vm", auto_detect=True)


@pytest.fixture
def shown(metrics: Metrics) -> Callable[..., VersionNumbers]:
    """`shown(model, version)`: the meter of a registered version."""

    def show(model: str = "m", version: str = "1.0") -> VersionNumbers:
        meter = metrics.meter(model, version)
        metrics.show(meter)
        return meter

    return show


@pytest.fixture
def answer() -> Answer:
    """`answer(meter, ...)`: a prediction that was accepted, answered and finished at a time of its own."""

    def finish(
        meter: VersionNumbers,
        total_s: float = 0.5,
        queue_s: float = 0.125,
        *,
        named: bool = False,
        code: str | int = 200,
        protocol: Protocol = "rest",
        trace: TraceContext | None = None,
    ) -> Request:
        meter.accepted(named)
        request = Request("r1", 0.0)
        request.trace, request.meter, request.named = trace, meter, named
        request.dequeued_s, request.answered_s = queue_s, total_s
        meter.finished(request, code, total_s)
        return request

    return finish


@pytest.fixture
def batch() -> Callable[..., None]:
    """`batch(meter, ...)`: a batch that is finished, of one request that succeeded unless said otherwise."""

    def finish(meter: VersionNumbers, **changes: Any) -> None:
        event: dict[str, Any] = {"size": 1, "succeeded": 1, "failed": 0}
        event |= {"succeeded_wait_s": 0.0, "failed_wait_s": 0.0}
        event |= {"executor_s": 0.010, "handler_s": 0.00254} | changes
        meter.batch_finished(**event)

    return finish
