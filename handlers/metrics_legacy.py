"""Metric objects of TorchServe's older API, for handlers that still build and emit their own lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torchere.handlers.metric_types import Dimension, MetricSample, MetricTypes, Units
from torchere.handlers.metrics import MetricsCache, current_metrics


class Metric:
    """One value with its labels, to be handed to `emit_metrics`.

    Args:
        name: metric name.
        value: number, or text that reads as one.
        unit: see `Units`.
        dimensions: labels.
        request_id: the request it belongs to.
        metric_method: "counter" makes `update` add instead of replace.
    """

    def __init__(  # noqa: PLR0917  # TorchServe's signature
        self,
        name: str,
        value: float | str,
        unit: str,
        dimensions: Sequence[Dimension],
        request_id: str | None = None,
        metric_method: str | None = None,
    ) -> None:
        self.name = name
        self.value = float(value)
        self.unit = Units.units.get(unit, unit)
        self.dimensions = list(dimensions)
        self.request_id = request_id
        self.metric_method = metric_method

    def update(self, value: float | str) -> None:
        """Replace the value, or add to it when the metric is a counter."""
        self.value = self.value + float(value) if self.metric_method == "counter" else float(value)

    def sample(self) -> MetricSample:
        """Return the record of the current value."""
        kind = MetricTypes.COUNTER if self.metric_method == "counter" else MetricTypes.GAUGE
        ids = (self.request_id,) if self.request_id else ()
        labels = tuple((item.name, str(item.value)) for item in self.dimensions)
        return MetricSample(self.name, self.value, self.unit, kind.value, labels, ids)


class MetricsStore(MetricsCache):
    """The collector of the older API: `MetricsCache` with the constructor that handlers called."""

    def __init__(self, request_ids: Mapping[int, str] | object, model_name: str) -> None:
        super().__init__(model_name)
        # Handlers that construct it pass any object, mostly a uuid, which identifies no request.
        self.request_ids = request_ids if isinstance(request_ids, Mapping) else {}

    @property
    def store(self) -> list[MetricSample]:
        """The values reported to this store since it was last read; reading removes them."""
        return self.drain()


def emit_metrics(metrics: Iterable[Metric | MetricSample]) -> None:
    """Report the values with the batch that runs in this thread; outside a batch they are dropped."""
    collector = current_metrics()
    if collector is None:
        return
    for metric in metrics:
        collector.record(metric.sample() if isinstance(metric, Metric) else metric)
