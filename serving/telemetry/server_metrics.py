"""The server's own metrics that `metrics.yaml` declares: shown, or logged, or not recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torchere.serving.settings import MetricsMode
from torchere.serving.telemetry.families import Families, Family, updater
from torchere.serving.telemetry.metric_log import SERVER_LOGGER, MetricLog
from torchere.serving.telemetry.metrics_config import DeclaredMetric

# All that `metrics_mode=legacy` shows; it logs the rest. `log` shows nothing and logs everything.
LEGACY_METRICS = frozenset(
    {
        "ts_inference_requests_total",
        "ts_inference_latency_microseconds",
        "ts_queue_latency_microseconds",
    }
)
Update = Callable[[float], None]


def is_logged(name: str, mode: MetricsMode) -> bool:
    """Whether updates of a metric become log lines; otherwise it is shown at the metrics endpoint."""
    return mode == "log" or (mode == "legacy" and name not in LEGACY_METRICS)


class ServerMetrics:
    """Makes updaters of one metric with given label values. Thread-safe.

    Args:
        declared: by name; what is not there is not recorded.
        families: where to declare what is shown.
        hostname: the last label value of every metric.
        mode: which metrics are shown, and which logged.
        plain: metrics that are rendered from numbers, by name, if they are declared with this type.
    """

    def __init__(
        self,
        declared: Mapping[str, DeclaredMetric],
        families: Families,
        hostname: str,
        mode: MetricsMode,
        plain: Mapping[str, str],
    ) -> None:
        self._declared = declared
        self._hostname = hostname
        self._log = MetricLog(SERVER_LOGGER, hostname)
        self._families: dict[str, Family] = {}
        self.plain: dict[str, DeclaredMetric] = {}
        for metric in declared.values():
            if is_logged(metric.name, mode):
                continue
            if plain.get(metric.name) == metric.kind:
                self.plain[metric.name] = metric
            else:
                self._families[metric.name] = families.declare(
                    metric.kind, metric.name, metric.unit, metric.labels
                )

    def takes(self, name: str) -> bool:
        """Whether updates of this metric go through `bind`."""
        return name in self._declared and name not in self.plain

    def bind(self, name: str, *values: str) -> Update:
        """Return a function that takes a value of a metric, or discards it when the metric is not declared.

        Args:
            name: of the metric.
            values: of its labels, in the order of the built-in file, without the host.
        """
        if not self.takes(name):
            return _ignore
        metric, family = self._declared[name], self._families.get(name)
        if family is None:
            labels = tuple(zip(metric.labels, values, strict=False))  # the host's is in the tail of the line
            return partial(self._write, metric, labels)
        return updater(family.labels(*values, self._hostname))

    def drop(self, name: str, *values: str) -> None:
        """Show these label values of a metric no longer; without an error when they were not shown."""
        family = self._families.get(name)
        if family is not None:
            family.remove(*values, self._hostname)

    def _write(self, metric: DeclaredMetric, labels: tuple[tuple[str, str], ...], value: float) -> None:
        self._log.write(metric.name, metric.unit, value, labels)


def _ignore(value: float) -> None:
    """Discard the value: the metric is not declared."""
