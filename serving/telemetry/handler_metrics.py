"""Records the metrics that handlers report through `context.metrics`; their number is bounded."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from torchere.handlers.metrics import TIMED, MetricSample
from torchere.serving.config.server_settings import MetricsMode
from torchere.serving.telemetry.catalogue import Families, Family, check_names, updater
from torchere.serving.telemetry.declared import HOSTNAME, OWN_PREFIX, DeclaredMetric, is_logged
from torchere.serving.telemetry.torchserve import MODEL_LOGGER, log_value

logger = logging.getLogger(__name__)

MAX_FAMILIES = 500  # undeclared metric names of all handlers together, with auto-detection
MAX_SERIES = 50_000  # label combinations of all names together; each takes 1 KB, and time in every scrape
MAX_LABEL_SETS = 1000  # combinations of label values per name
MAX_DIMENSIONS = 100  # of one sample; all of them are stored, even those that become no label
MAX_TEXT_CHARACTERS = 1024  # of a name, a unit and the value of a label
_UNDECLARED = "the metrics configuration does not declare it, and model_metrics_auto_detect is false"

Dimensions = tuple[tuple[str, str], ...]


Report: TypeAlias = Callable[[float, Sequence[str]], None]  # (value, request ids for the log line)


class _Child(NamedTuple):
    """One combination of label values of a metric."""

    report: Report
    values: tuple[str, ...]  # of all labels, in declared order
    model: str | None  # the value of the dimension `ModelName`
    reporter: str  # the model that reported it first; "": the server


@dataclass(slots=True)
class _Known:
    """A recorded metric and its known label values."""

    declared: DeclaredMetric
    family: Family | None  # None: its values are logged
    detected_by: str | None  # the model that reported it first; None: the configuration declares it
    children: dict[Dimensions, _Child] = field(default_factory=dict)
    shares: _Shares = field(
        default_factory=lambda: _Shares(MAX_LABEL_SETS, "combinations of label values for this name")
    )


class _Shares:
    """Shares a limited number of series or names among the models that reported them first.

    A model may add one while it has fewer than are still free. So no model gets more than half, and models
    that come later find some free. The server ("") may always add one: it reports one series of each model.
    """

    __slots__ = ("_by_model", "_most", "_name")

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._by_model: Counter[str] = Counter()

    def check(self, model: str) -> None:
        """Raise `ValueError` if the model may not add another one."""
        if not model:
            return
        own = self._by_model[model]
        left = max(0, self._most - self._by_model.total())
        if left <= own:
            text = f"its model has {own} {self._name}; {left} of {self._most} are for others"
            raise ValueError(text if own else f"there are {self._most} {self._name} already")

    def take(self, model: str) -> None:
        """Count one more."""
        self._by_model[model] += 1

    def give_back(self, model: str) -> None:
        """Count one less."""
        self._by_model[model] -= 1
        if not self._by_model[model]:
            del self._by_model[model]


class HandlerMetrics:
    """Records metrics of handlers: declared ones, times of stages and, with `auto_detect`, all others.

    Thread-safe.
    """

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
        self._lock = threading.Lock()  # guards the fields below
        self._refused: set[str] = set()
        self._series = _Shares(MAX_SERIES, "combinations of label values")
        self._detected = _Shares(MAX_FAMILIES, "undeclared metrics")
        self._known: dict[str, _Known] = {}
        for metric in declared.values():
            self._declare(metric, None)

    def record(self, samples: Iterable[MetricSample], model: str = "") -> None:
        """Record the samples of one batch of a model; "": of the server.

        Invalid samples are dropped, and the first invalid one of each metric name is logged.
        """
        with self._lock:
            for sample in samples:
                try:
                    self._child(sample, model).report(sample.value, sample.request_ids)
                except (ValueError, TypeError) as err:
                    self._refuse(sample.name, str(err))

    def takes(self, name: str) -> bool:
        """Return whether a metric with this name can be recorded."""
        return self._auto_detect or name in self._known

    def needs_each(self, name: str) -> bool:
        """Return whether every value of a metric is needed, not only the last one (as for a gauge)."""
        known = self._known.get(name)
        if known is None:
            return self._auto_detect and is_logged(name, self._mode)
        return known.family is None or known.declared.kind != "gauge"

    def forget(self, model: str) -> None:
        """Drop the series that `model` reported first, or that have it as `ModelName`.

        Undeclared metrics without series go, too. A later report of another model starts a new series.
        """
        with self._lock:
            for name, known in list(self._known.items()):
                # The same dimensions in another order are another child, but the same series of the family.
                gone = {
                    child.values
                    for child in known.children.values()
                    if model in (child.model, child.reporter)
                }
                for dimensions, child in list(known.children.items()):
                    if child.values in gone:
                        del known.children[dimensions]
                        for shares in (known.shares, self._series):
                            shares.give_back(child.reporter)
                if known.family is not None:
                    for values in gone:
                        known.family.remove(*values)
                if known.detected_by is not None and not known.children:
                    del self._known[name]
                    self._detected.give_back(known.detected_by)
                    if known.family is not None:
                        self._families.remove(name, known.family)

    def _child(self, sample: MetricSample, model: str = "") -> _Child:
        known = self._known.get(sample.name)
        child = known.children.get(sample.dimensions) if known else None
        if known and child and child.reporter and not model:
            # From now on the series is the server's: it outlives the model that reported it first.
            for shares in (known.shares, self._series):
                shares.give_back(child.reporter)
                shares.take(model)
            child = known.children[sample.dimensions] = child._replace(reporter=model)
        if child is None:
            if len(sample.dimensions) > MAX_DIMENSIONS:
                raise ValueError(
                    f"it has {len(sample.dimensions)} dimensions, expected at most {MAX_DIMENSIONS}"
                )
            _check_texts("the value of a label", [value for _, value in sample.dimensions])
            known = known or self._detect(sample, model)
            for shares in (known.shares, self._series):
                shares.check(model)
            child = known.children[sample.dimensions] = self._new_child(known, sample.dimensions, model)
            for shares in (known.shares, self._series):
                shares.take(model)
        return child

    def _new_child(self, known: _Known, dimensions: Dimensions, reporter: str) -> _Child:
        metric, host = known.declared, self._hostname
        values = (*_label_values(metric.labels[:-1], dimensions), host)
        if known.family is None:
            named = tuple(zip(metric.labels[:-1], values, strict=False))  # the log line ends with the host

            def report(value: float, ids: Sequence[str]) -> None:
                log_value(MODEL_LOGGER, metric, value, named, hostname=host, request_ids=ids)

        else:
            update = updater(known.family.labels(*values))

            def report(value: float, ids: Sequence[str]) -> None:
                update(value)

        return _Child(report, values, dict(dimensions).get("ModelName"), reporter)

    def _detect(self, sample: MetricSample, model: str) -> _Known:
        if not (self._auto_detect or sample.name.startswith(TIMED)):  # `profile: true` asks for these
            raise ValueError(_UNDECLARED)
        self._detected.check(model)
        names = [name for name, _ in sample.dimensions]
        _check_texts("its name, its unit or the name of a label", [sample.name, sample.unit, *names])
        labels = (*(name for name in dict(sample.dimensions) if name != HOSTNAME), HOSTNAME)
        check_names(sample.metric_type, sample.name, labels, logged=is_logged(sample.name, self._mode))
        if sample.name.startswith(OWN_PREFIX):
            raise ValueError(f"names that begin with {OWN_PREFIX} are taken")
        known = self._declare(DeclaredMetric(sample.name, sample.metric_type, sample.unit, labels), model)
        self._detected.take(model)
        return known

    def _declare(self, metric: DeclaredMetric, detected_by: str | None) -> _Known:
        family = None
        if not is_logged(metric.name, self._mode):
            family = self._families.declare(metric.kind, metric.name, metric.unit, metric.labels)
        self._known[metric.name] = _Known(metric, family, detected_by)
        return self._known[metric.name]

    def _refuse(self, name: str, cause: str) -> None:
        # Bounded as well: a handler that generates names must not fill the log or this set.
        name = name[:MAX_TEXT_CHARACTERS]
        if name not in self._refused and len(self._refused) < MAX_FAMILIES:
            self._refused.add(name)
            logger.warning("metric %.100r of a handler is dropped: %s", name, cause)


def _check_texts(where: str, texts: Sequence[str]) -> None:
    """Raise `ValueError` if a text is too long, because it is stored as long as the model is served.

    Also if it has half a surrogate pair: JSON can contain it, but UTF-8 can't, so every scrape would fail.
    """
    longest = max(map(len, texts), default=0)
    if longest > MAX_TEXT_CHARACTERS:
        raise ValueError(f"{where} has {longest} characters, expected at most {MAX_TEXT_CHARACTERS}")
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as err:
        raise ValueError(f"{where} is no text of Unicode: {err.reason}") from None


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
