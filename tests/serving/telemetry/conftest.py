"""Predictions whose times a test chooses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.telemetry.timeline import Timeline, Transport
from torchere.serving.telemetry.trace_context import TraceContext
from torchere.serving.telemetry.version_meter import VersionMeter


@dataclass
class Request:
    """What a timeline reads from a request that waited."""

    enqueued_s: float = 0.0
    dequeued_s: float = 0.0
    company_s: float = 0.0
    stages_s: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)


Answer = Callable[..., Timeline]


@pytest.fixture
def metrics() -> Metrics:
    """Metrics that take whatever handlers report, on a host called `vm`."""
    return Metrics("vm", auto_detect=True)


@pytest.fixture
def shown(metrics: Metrics) -> Callable[..., VersionMeter]:
    """`shown(model, version)`: the meter of a registered version."""

    def show(model: str = "m", version: str = "1.0") -> VersionMeter:
        meter = metrics.meter(model, version)
        metrics.show(meter)
        return meter

    return show


@pytest.fixture
def answer() -> Answer:
    """`answer(meter, ...)`: a prediction that was accepted, answered and finished at a time of its own."""

    def finish(
        meter: VersionMeter,
        total_s: float = 0.5,
        queue_s: float = 0.125,
        *,
        named: bool = False,
        code: str | int = 200,
        transport: Transport = "rest",
        trace: TraceContext | None = None,
    ) -> Timeline:
        meter.accepted(named)
        timeline = Timeline(transport, "r1", 0.0, trace)
        timeline.meter, timeline.named = meter, named
        timeline.answered(Request(dequeued_s=queue_s), total_s)
        meter.finished(timeline, code, total_s)
        return timeline

    return finish
