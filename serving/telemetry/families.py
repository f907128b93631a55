"""Declaring metric families under TorchServe's names, on a registry of our own."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.registry import Collector

Family = Counter | Gauge | Histogram

# Names of the classic text format; the library lets any UTF-8 through, which scrapers do not read unasked.
_METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
KINDS = ("counter", "gauge", "histogram")
# The Java client's default buckets, in whatever unit the metric has (contract: metrics).
DEFAULT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)


class Families:
    """Makes families and remembers how counters were called; the library renames those.

    Thread-safe as far as the registry is; declare a name once.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.declared: dict[str, str] = {}  # the library's name of a counter -> the name it was declared with

    def declare(self, kind: str, name: str, unit: str, labels: Sequence[str]) -> Family:
        """Declare a family of one of `KINDS`; raises as `counter` and `check_names` do."""
        check_names(kind, name, labels)
        if kind == "counter":
            return self.counter(name, unit, labels)
        if kind == "gauge":
            return self.gauge(name, unit, labels)
        return self.histogram(name, unit, labels)

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


class Reserved(Collector):
    """Reserves names of families that are collected elsewhere."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)

    def describe(self) -> Iterable[Metric]:
        """The families, of a type that reserves what all types do."""
        for name in self._names:
            yield Metric(name, "", "histogram")

    def collect(self) -> Iterable[Metric]:
        """Nothing."""
        return ()


def check_names(kind: str, name: str, labels: Sequence[str]) -> None:
    """Raise ValueError unless a metric may be called so in the text format, and has one of `KINDS`."""
    if kind not in KINDS:
        raise ValueError(f"its type is {kind!r}, expected one of {KINDS}")
    wrong = [label for label in labels if not _LABEL_NAME.fullmatch(label)]
    if wrong or not _METRIC_NAME.fullmatch(name):
        raise ValueError(f"Prometheus allows letters, digits and _ in names only: {wrong or name!r}")


def updater(child: Family) -> Callable[[float], None]:
    """Return a labelled child's `inc`, `set` or `observe`.

    That of a counter refuses (ValueError) what is negative or not finite; such a value would spoil it.
    """
    if isinstance(child, Counter):
        return functools.partial(_add, child)
    return child.set if isinstance(child, Gauge) else child.observe


def _add(counter: Counter, value: float) -> None:
    if not math.isfinite(value):
        raise ValueError(f"a counter can't grow by {value}")
    counter.inc(value)


def help_text(kind: str, unit: str) -> str:
    """The HELP line that TorchServe gives a metric."""
    return f"Torchserve prometheus {kind} metric with unit: {unit}"
