"""One declared metric of a handler: checks reported values and passes them to the collector."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchere.handlers.metric_types import Dimension, MetricSample, MetricTypes, Units

if TYPE_CHECKING:
    from torchere.handlers.metrics import MetricsCache

logger = logging.getLogger(__name__)


class CachingMetric:
    """A declared metric: a name and type with the names of its dimensions.

    Constructed by `MetricsCache` only.
    """

    def __init__(
        self,
        cache: MetricsCache,
        metric_name: str,
        unit: str,
        dimension_names: Sequence[str],
        metric_type: MetricTypes,
    ) -> None:
        self.metric_name = str(metric_name)  # handlers also pass names that are not str
        self.unit = str(Units.units.get(unit, unit))
        self.dimension_names = tuple(map(str, dimension_names))
        self.metric_type = metric_type
        self._kind = metric_type.value
        self._cache = cache

    def add_or_update(
        self,
        value: float,
        dimension_values: Sequence[str] | None = None,
        request_id: str | Sequence[str] = "",
    ) -> None:
        """Report a value; a wrong one is logged and dropped, because a metric must not fail a prediction.

        Args:
            value: to add (counter), to set (gauge) or to observe (histogram).
            dimension_values: one per declared dimension name, in their order.
            request_id: the request, or the requests, that the value belongs to.
        """
        values = tuple(str(item) for item in dimension_values or ())
        problem = self._problem(value, values)
        if problem:
            self._drop(problem)
            return
        ids = (request_id,) if isinstance(request_id, str) else tuple(request_id)
        self.report(value, tuple(zip(self.dimension_names, values, strict=True)), ids)

    def report(
        self, value: float, dimensions: tuple[tuple[str, str], ...], request_ids: tuple[str, ...]
    ) -> None:
        """Report a value like `add_or_update`, with dimensions that are known to fit: names with values."""
        # Fast path: this runs with every request, and the value is nearly always valid.
        if type(value) is not float or not value >= 0:
            if problem := self._wrong_value(value):
                self._drop(problem)
                return
            value = float(value)
        if not all(request_ids):
            request_ids = _filled(request_ids)
        self._cache.record(
            MetricSample(self.metric_name, value, self.unit, self._kind, dimensions, request_ids)
        )

    def _drop(self, problem: str) -> None:
        logger.error("metric %s: %s; the value is dropped", self.metric_name, problem)

    def update(
        self,
        value: float,
        request_id: str | Sequence[str] = "",
        dimensions: Sequence[Dimension] | None = None,
    ) -> None:
        """Report a value with `Dimension` objects; the older form of `add_or_update`."""
        self.add_or_update(value, [item.value for item in dimensions or ()], request_id)

    def _wrong_value(self, value: object) -> str:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return f"expected a number, found {value!r}"
        if self.metric_type is MetricTypes.COUNTER and value < 0:
            return f"a counter can't fall, found {value!r}"
        return ""

    def _problem(self, value: object, dimension_values: tuple[str, ...]) -> str:
        if problem := self._wrong_value(value):
            return problem
        if len(dimension_values) != len(self.dimension_names):
            return f"expected values for the dimensions {self.dimension_names}, found {dimension_values}"
        return ""


def _filled(request_ids: Sequence[str]) -> tuple[str, ...]:
    return tuple(item for item in request_ids if item)
