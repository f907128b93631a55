"""Metric types, labels and units, and the record of one reported value."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple


class MetricTypes(str, Enum):
    """How the values of a metric are aggregated."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Dimension(NamedTuple):
    """One label of a metric."""

    name: str
    value: str

    def __str__(self) -> str:
        return f"{self.name}:{self.value}"


class Units:
    """Full names of the accepted abbreviations of units; other units stay as they are."""

    units: Mapping[str, str] = {
        "ms": "Milliseconds",
        "s": "Seconds",
        "percent": "Percent",
        "count": "Count",
        "MB": "Megabytes",
        "kB": "Kilobytes",
        "GB": "Gigabytes",
        "B": "Bytes",
        "": "unit",
    }


class MetricDeclaration(NamedTuple):
    """One metric that the server's configuration declares for handlers, as plain values."""

    name: str
    unit: str
    dimension_names: tuple[str, ...]
    metric_type: str  # "counter" | "gauge" | "histogram"


class MetricSample(NamedTuple):
    """One reported value: for a counter the increment, for a gauge the new value."""

    name: str
    value: float
    unit: str
    metric_type: str  # "counter" | "gauge" | "histogram"
    dimensions: tuple[tuple[str, str], ...]
    request_ids: tuple[str, ...]
