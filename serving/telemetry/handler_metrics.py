"""Records the metrics that handlers report through `context.metrics`; their number is bounded."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from torchere.handlers.metrics import MetricSample
from torchere.serving.config.server_settings import MetricsMode
from torchere.serving.telemetry.catalogue import Families, Family, check_names, updater
from torchere.serving.telemetry.declared import HOSTNAME, OWN_PREFIX, DeclaredMetric
from torchere.serving.telemetry.torchserve import MODEL_LOGGER, MetricLog, is_logged

logger = logging.getLogger(__name__)

# Names of all handlers together, with auto-detection. A model may add undeclared ones while it has fewer of
# them than are left, so at most half, and a model that comes later finds room.
MAX_FAMILIES = 500
MAX_LABEL_SETS = 1000  # combinations of label values per name
MAX_SERIES = 50_000  # combinations of all names together; each takes a kilobyte, and time of every scrape
MAX_DIMENSIONS = 100  # of a value; they are kept with their names, also those that give no label
MAX_TEXT_CHARACTERS = 1024  # of a name, a unit and the value of a label
_UNDECLARED = "the metrics configuration does not declare it, and model_metrics_auto_detect is false"

Dimensions = tuple[tuple[str, str], ...]


Report: TypeAlias = Callable[[float, Sequence[str]], None]  # (value, request ids for the log line)


class _Child(NamedTuple):
    """One combination of label values of a metric."""

    update: Callable[[MetricSample], None]
    show: Callable[[float], None] | None  # None: values are logged
    values: tuple[str, ...]  # of all labels, in declared order
    model: str | None  # the value of the dimension `ModelName`


class _Known:
    """A recorded metric and its known label values. `family` None: its values are logged."""

    __slots__ = ("children", "declared", "family")

    def __init__(self, declared: DeclaredMetric, family: Family | None) -> None:
        self.declared = declared
        self.family = family
        self.children: dict[Dimensions, _Child] = {}


class HandlerMetrics:
    """Records metrics of handlers: declared ones and, with `auto_detect`, undeclared ones. Thread-safe."""

    def __init__(
        self,
        declared: Mapping[str, DeclaredMetric],
        families: Families,
        hostname: str,
        mode: MetricsMode,
        *,
        auto_detect: bool,
    ) -> None:
        self._families = families
        self._hostname = hostname
        self._mode: MetricsMode = mode
        self._auto_detect = auto_detect
        self._log = MetricLog(MODEL_LOGGER, hostname)
        self._lock = threading.Lock()  # guards the fields below
        self._refused: set[str] = set()
        self._series = 0
        self._detected_by: Counter[str] = Counter()  # undeclared names, by the model that reported them first
        self._known: dict[str, _Known] = {}
        for metric in declared.values():
            self._declare(metric)

    def record(self, samples: Iterable[MetricSample], model: str = "") -> None:
        """Record the samples of one batch of a model; "": of the server.

        Invalid samples are dropped, and the first of each metric name is logged.
        """
        with self._lock:
            for sample in samples:
                try:
                    self._child(sample, model).update(sample)
                except (ValueError, TypeError) as err:
                    self._refuse(sample.name, str(err))

    def needs_each(self, name: str) -> bool:
        """Return whether every value of a metric is needed (for logs and histograms) or only the last one."""
        known = self._known.get(name)
        if known is None:
            return self._auto_detect and is_logged(name, self._mode)
        return known.family is None or known.declared.kind != "gauge"

    def bound(self, name: str, unit: str, dimensions: Dimensions) -> Report:
        """Return a function that reports values measured by the server to a gauge with these label values.

        The function does nothing if the metric is not recorded. Do not call it after `forget` for the model
        in `dimensions`.
        """
        sample = MetricSample(name, 0.0, unit, "gauge", dimensions, ())
        with self._lock:
            try:
                child = self._child(sample)
            except ValueError as err:
                self._refuse(name, str(err))
                return _ignore
        show = child.show
        if show is None:
            return lambda value, ids: child.update(sample._replace(value=value, request_ids=tuple(ids)))
        return lambda value, ids: show(value)

    def forget(self, model: str) -> None:
        """Drop the samples whose dimension `ModelName` is `model`."""
        with self._lock:
            for known in self._known.values():
                gone = [dimensions for dimensions, child in known.children.items() if child.model == model]
                for dimensions in gone:
                    child = known.children.pop(dimensions)
                    self._series -= 1
                    if known.family is not None:
                        known.family.remove(*child.values)

    def _child(self, sample: MetricSample, model: str = "") -> _Child:
        known = self._known.get(sample.name)
        child = known.children.get(sample.dimensions) if known else None
        if child is None:
            if len(sample.dimensions) > MAX_DIMENSIONS:
                raise ValueError(
                    f"it has {len(sample.dimensions)} dimensions, expected at most {MAX_DIMENSIONS}"
                )
            _check_lengths("the value of a label", [value for _, value in sample.dimensions])
            known = known or self._detected(sample, model)
            if len(known.children) >= MAX_LABEL_SETS:
                raise ValueError(f"it has {MAX_LABEL_SETS} combinations of label values already")
            if self._series >= MAX_SERIES:
                raise ValueError(
                    f"metrics of handlers have {MAX_SERIES} combinations of label values already"
                )
            child = known.children[sample.dimensions] = self._new_child(known, sample.dimensions)
            self._series += 1
        return child

    def _new_child(self, known: _Known, dimensions: Dimensions) -> _Child:
        labels = known.declared.labels[:-1]
        values = _label_values(labels, dimensions)
        model = dict(dimensions).get("ModelName")
        if known.family is None:
            named = tuple(zip(labels, values, strict=True))
            return _Child(partial(self._write, known.declared, named), None, values, model)
        shown = (*values, self._hostname)
        update = updater(known.family.labels(*shown))
        return _Child(lambda sample: update(sample.value), update, shown, model)

    def _write(self, metric: DeclaredMetric, labels: Sequence[tuple[str, str]], sample: MetricSample) -> None:
        self._log.write(metric.name, metric.unit, sample.value, labels, sample.request_ids)

    def _detected(self, sample: MetricSample, model: str) -> _Known:
        if not self._auto_detect:
            raise ValueError(_UNDECLARED)
        left, own = MAX_FAMILIES - len(self._known), self._detected_by[model]
        if left <= 0:
            raise ValueError(f"there are {MAX_FAMILIES} metrics of handlers already")
        if own >= left:
            raise ValueError(f"its model has {own} undeclared ones; {left} of {MAX_FAMILIES} are for others")
        names = [name for name, _ in sample.dimensions]
        _check_lengths("its name, its unit or the name of a label", [sample.name, sample.unit, *names])
        labels = (*_label_names(sample.dimensions), HOSTNAME)
        check_names(sample.metric_type, sample.name, labels)
        if sample.name.startswith(OWN_PREFIX):
            raise ValueError(f"names that begin with {OWN_PREFIX} are taken")
        known = self._declare(DeclaredMetric(sample.name, sample.metric_type, sample.unit, labels))
        self._detected_by[model] += 1
        return known

    def _declare(self, metric: DeclaredMetric) -> _Known:
        family = None
        if not is_logged(metric.name, self._mode):
            family = self._families.declare(metric.kind, metric.name, metric.unit, metric.labels)
        self._known[metric.name] = _Known(metric, family)
        return self._known[metric.name]

    def _refuse(self, name: str, cause: str) -> None:
        # Bounded as well: a handler that generates names must not fill the log or this set.
        name = name[:MAX_TEXT_CHARACTERS]
        if name not in self._refused and len(self._refused) < MAX_FAMILIES:
            self._refused.add(name)
            logger.warning("metric %.100r of a handler is dropped: %s", name, cause)


def _ignore(value: float, ids: Sequence[str]) -> None:
    """Ignore the value, because the metric is not recorded."""


def _check_lengths(where: str, texts: Iterable[str]) -> None:
    """Raise `ValueError` for a text that is too long to be kept for as long as the model is served."""
    longest = max(map(len, texts), default=0)
    if longest > MAX_TEXT_CHARACTERS:
        raise ValueError(f"{where} has {longest} characters, expected at most {MAX_TEXT_CHARACTERS}")


def _label_names(dimensions: Dimensions) -> list[str]:
    return [name for name in dict(dimensions) if name != HOSTNAME]


def _label_values(labels: Sequence[str], dimensions: Dimensions) -> tuple[str, ...]:
    """Return the values in label order: matched by name, or by position if the declaration renames them."""
    given = {name: str(value) for name, value in dimensions if name != HOSTNAME}
    if given.keys() == set(labels):
        return tuple(given[label] for label in labels)
    if len(given) != len(labels):
        raise ValueError(
            f"it has the dimensions {list(given)}, expected {list(labels)}; make them the same in the file "
            "that metrics_config names"
        )
    return tuple(given.values())
