"""What handlers report through `context.metrics`: any name, by its declared type, within bounds."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterable
from typing import Protocol

from prometheus_client import Counter, Gauge

from torchere.serving.telemetry.families import Families, Family

logger = logging.getLogger(__name__)

MAX_FAMILIES = 500  # names that all handlers together may invent
MAX_LABEL_SETS = 1000  # combinations of label values of one such name
_METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


class HandlerSample(Protocol):
    """One value that a handler reported."""

    @property
    def name(self) -> str:
        """Name of the metric."""

    @property
    def value(self) -> float:
        """What to add (counter), set (gauge) or observe (histogram)."""

    @property
    def unit(self) -> str:
        """Unit, for the help text."""

    @property
    def metric_type(self) -> str:
        """One of `counter`, `gauge`, `histogram`."""

    @property
    def dimensions(self) -> tuple[tuple[str, str], ...]:
        """Names and values of the labels."""


class HandlerMetrics:
    """Families that came into being with their first sample. Thread-safe; one lock guards both maps."""

    def __init__(self, families: Families, hostname: str) -> None:
        self._families = families
        self._hostname = hostname
        self._lock = threading.Lock()
        self._known: dict[str, tuple[Family, str, tuple[str, ...]]] = {}
        self._label_sets: dict[str, set[tuple[str, ...]]] = {}
        self._refused: set[str] = set()

    def adopt(self, family: Gauge, name: str, labels: tuple[str, ...]) -> None:
        """Let samples called `name` go to a family that was declared beforehand."""
        self._known[name] = (family, "gauge", labels)
        self._label_sets[name] = set()

    def record(self, samples: Iterable[HandlerSample]) -> None:
        """Record what one batch reported. What can't be recorded is dropped, and logged once a name."""
        with self._lock:
            for sample in samples:
                try:
                    self._record(sample)
                except ValueError as err:
                    self._refuse(sample.name, str(err))

    def forget(self, model: str) -> None:
        """Drop the samples whose dimension `ModelName` is `model`."""
        with self._lock:
            for name, (family, _, labels) in self._known.items():
                if "ModelName" not in labels:
                    continue
                place = labels.index("ModelName")
                for values in [v for v in self._label_sets[name] if v[place] == model]:
                    family.remove(*values)
                    self._label_sets[name].discard(values)

    def _record(self, sample: HandlerSample) -> None:
        family, kind, labels = self._family(sample)
        given = {**dict(sample.dimensions), "Hostname": self._hostname}
        if kind != sample.metric_type or given.keys() != set(labels):
            raise ValueError(f"it was a {kind} with labels {labels} before")
        values = tuple(str(given[label]) for label in labels)
        seen = self._label_sets[sample.name]
        if values not in seen and len(seen) >= MAX_LABEL_SETS:
            raise ValueError(f"it has {MAX_LABEL_SETS} combinations of label values already")
        seen.add(values)
        _apply(family.labels(*values), sample.value)

    def _family(self, sample: HandlerSample) -> tuple[Family, str, tuple[str, ...]]:
        known = self._known.get(sample.name)
        if known is not None:
            return known
        if len(self._known) >= MAX_FAMILIES:
            raise ValueError(f"there are {MAX_FAMILIES} metrics of handlers already")
        labels = (*(name for name, _ in sample.dimensions if name != "Hostname"), "Hostname")
        if not _METRIC_NAME.fullmatch(sample.name) or not all(map(_LABEL_NAME.fullmatch, labels)):
            raise ValueError(f"the name or a label is not one that Prometheus allows: {labels}")
        family = self._declare(sample, labels)
        self._known[sample.name] = (family, sample.metric_type, labels)
        self._label_sets[sample.name] = set()
        return self._known[sample.name]

    def _declare(self, sample: HandlerSample, labels: tuple[str, ...]) -> Family:
        if sample.metric_type == "counter":
            return self._families.counter(sample.name, sample.unit, labels)
        if sample.metric_type == "gauge":
            return self._families.gauge(sample.name, sample.unit, labels)
        if sample.metric_type == "histogram":
            return self._families.histogram(sample.name, sample.unit, labels)
        raise ValueError(f"its type is {sample.metric_type!r}, not counter, gauge or histogram")

    def _refuse(self, name: str, cause: str) -> None:
        # Bounded as well: a handler that makes up names must not fill the log or this set.
        if name not in self._refused and len(self._refused) < MAX_FAMILIES:
            self._refused.add(name)
            logger.warning("metric %.100r of a handler is dropped: %s", name, cause)


def _apply(child: Family, value: float) -> None:
    if isinstance(child, Counter):
        child.inc(value)
    elif isinstance(child, Gauge):
        child.set(value)
    else:
        child.observe(value)
