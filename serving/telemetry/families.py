"""Declaring metric families under TorchServe's names, on a registry of our own."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

Family = Counter | Gauge | Histogram

# The Java client's default buckets, in whatever unit the metric has (contract: metrics).
DEFAULT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)


class Families:
    """Makes families and remembers how counters were called; the library renames those.

    Thread-safe as far as the registry is; declare a name once.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.declared: dict[str, str] = {}  # the library's name of a counter -> the name it was declared with

    def counter(self, name: str, unit: str, labels: Sequence[str]) -> Counter:
        """Declare a counter.

        Raises:
            ValueError: the name or a label is not allowed, or the name is taken.
        """
        counter = Counter(name, help_text("counter", unit), labels, registry=self.registry)
        self.declared[name.removesuffix("_total")] = name
        return counter

    def gauge(self, name: str, unit: str, labels: Sequence[str]) -> Gauge:
        """Declare a gauge; raises as `counter` does."""
        return Gauge(name, help_text("gauge", unit), labels, registry=self.registry)

    def histogram(
        self, name: str, unit: str, labels: Sequence[str], buckets: Sequence[float] = DEFAULT_BUCKETS
    ) -> Histogram:
        """Declare a histogram; raises as `counter` does."""
        return Histogram(name, help_text("histogram", unit), labels, registry=self.registry, buckets=buckets)


def help_text(kind: str, unit: str) -> str:
    """The HELP line that TorchServe gives a metric."""
    return f"Torchserve prometheus {kind} metric with unit: {unit}"
