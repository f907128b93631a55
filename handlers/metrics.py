"""Metrics reported by a handler: collected per batch, drained by the executor after it.

Names, units, defaults and automatic dimensions are those of TorchServe's `context.metrics`. Two records
cross processes as plain values: a declaration of the server's configuration, and one reported value.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from torchere.handlers.errors import MetricsCacheKeyError, MetricsCacheTypeError, MetricsCacheValueError

# Maximum number of values kept between two batches, and in one report: to record as many takes 0.1 s of the
# server's event loop. In a batch of 1,024 requests, each has room for 19 values.
MAX_SAMPLES = 20_000


class MetricTypes(str, Enum):
    """How the values of a metric are aggregated."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(eq=False)
class Dimension:
    """One label of a metric; handlers may keep it and set another value."""

    name: str
    value: str

    def __str__(self) -> str:
        return f"{self.name}:{self.value}"

    def to_dict(self) -> dict[str, str]:
        """Return the dimension as TorchServe's dict."""
        return {"Name": self.name, "Value": self.value}


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


class CachingMetric:
    """A declared metric: a name and type with the names of its dimensions.

    `MetricsCache` makes one for each of its metrics. A metric that a handler constructs itself reports to the
    batch that runs in the calling thread; outside of a batch its values are dropped.
    """

    def __init__(
        self,
        metric_name: str,
        unit: str,
        dimension_names: Sequence[str] | None = None,
        metric_type: MetricTypes = MetricTypes.COUNTER,
        *,
        record: Callable[[MetricSample], None] | None = None,
    ) -> None:
        self.metric_name = str(metric_name)  # handlers also pass names that are not str
        self.unit = str(Units.units.get(unit, unit))
        self.dimension_names = tuple(map(str, dimension_names or ()))
        self.metric_type = metric_type
        self._kind = metric_type.value
        self._record = record or record_in_batch

    def add_or_update(
        self,
        value: float,
        dimension_values: Sequence[str] | None = None,
        request_id: str | Sequence[str] = "",
    ) -> None:
        """Report a value; an invalid one is logged and dropped, because a metric must not fail a prediction.

        Args:
            value: to add (counter), to set (gauge) or to observe (histogram); also of NumPy or torch, or a
                text that reads as a number.
            dimension_values: one per declared dimension name, in their order.
            request_id: the request, or the requests, that the value belongs to.
        """
        values = tuple(str(item) for item in dimension_values or ())
        if len(values) != len(self.dimension_names):
            self._drop(f"expected values for the dimensions {self.dimension_names}, found {values}")
            return
        self.report(value, tuple(zip(self.dimension_names, values, strict=True)), _ids_of(request_id))

    def report(
        self, value: float, dimensions: tuple[tuple[str, str], ...], request_ids: tuple[str, ...]
    ) -> None:
        """Report a value as `add_or_update` does, without checking the dimensions: (name, value) pairs."""
        # Fast path: this runs with every request, and the value is nearly always valid.
        if type(value) is not float or not value >= 0:
            number = _number(value)
            if number is None:
                self._drop(f"expected a number in the range of a float, found a {type(value).__name__}")
                return
            if self.metric_type is MetricTypes.COUNTER and number < 0:
                self._drop(f"a counter can't fall, found {number}")
                return
            value = number
        if not all(request_ids):
            request_ids = tuple(filter(None, request_ids))
        self._record(MetricSample(self.metric_name, value, self.unit, self._kind, dimensions, request_ids))

    def _drop(self, problem: str) -> None:
        logger.error("metric %s: %s; the value is dropped", self.metric_name, problem)

    def update(
        self,
        value: float,
        request_id: str | Sequence[str] = "",
        dimensions: Sequence[Dimension] | None = None,
    ) -> None:
        """Report a value with `Dimension` objects, in place of the declared dimensions; the older form."""
        labels = tuple((str(item.name), str(item.value)) for item in dimensions or ())
        self.report(value, labels, _ids_of(request_id))


def _number(value: Any) -> float | None:
    """Return a value of Python, NumPy or torch, or a text that reads as a number, as a float; else None."""
    if isinstance(value, (bool, bytes, bytearray)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several elements
        return None


def _ids_of(request_id: object) -> tuple[str, ...]:
    """Return ids as texts: handlers also pass None, numbers, and `context.request_ids`."""
    if request_id is None:
        return ()
    if isinstance(request_id, str):
        return (str(request_id),)
    if isinstance(request_id, Mapping):
        return tuple(map(str, request_id.values()))
    return tuple(map(str, request_id)) if isinstance(request_id, Iterable) else (str(request_id),)


logger = logging.getLogger(__name__)


_current: contextvars.ContextVar[MetricsCache | None] = contextvars.ContextVar("metrics", default=None)


def record_in_batch(sample: MetricSample) -> None:
    """Record a value in the collector of the batch that runs in this thread; drop it outside of a batch."""
    collector = _current.get()
    if collector is not None:
        collector.record(sample)


class _Plain(NamedTuple):
    """A metric with the automatic dimensions only, and their values."""

    metric: CachingMetric
    model_name: str
    dimensions: tuple[tuple[str, str], ...]


class MetricsCache:
    """The collector of a handler's metrics, `context.metrics`.

    One per handler instance; threads of a handler may report at the same time. `declared` holds the metrics
    that the server's metrics configuration declares for handlers.

    Example:
        >>> metrics = MetricsCache("resnet")
        >>> metrics.add_counter("Cats", 2)
        >>> [(sample.name, sample.value) for sample in metrics.drain()]
        [('Cats', 2.0)]
    """

    def __init__(self, model_name: str, declared: Iterable[MetricDeclaration] = ()) -> None:
        self.model_name = model_name
        self.request_ids: Mapping[int, str] = {}
        self.store: list[Any] = []  # always empty, as in TorchServe: handlers print it; see `MetricsStore`
        self.cache: dict[MetricTypes, dict[str, CachingMetric]] = {}
        # Metrics that `_report` found before, by the metric's name and whether it counts errors.
        self._plain: dict[tuple[str, bool], _Plain] = {}
        self._samples: list[MetricSample] = []
        self._lock = threading.Lock()  # guards _samples
        self._was_full = threading.Event()  # shared with the copies that `beside` makes
        for metric in declared:  # `get_metric` finds them without `add_metric_to_cache`
            self.add_metric_to_cache(
                metric.name, metric.unit, metric.dimension_names, MetricTypes(metric.metric_type)
            )

    def begin_batch(self, request_ids: Mapping[int, str]) -> None:
        """Attach all values reported from now on to these requests."""
        self.request_ids = request_ids
        _current.set(self)

    def set_request_ids(self, request_ids: Mapping[int, str] | str) -> None:
        """Attach the values reported from now on to these requests: by index, or separated by commas."""
        if isinstance(request_ids, str):
            request_ids = dict(enumerate(request_ids.split(",")))
        self.request_ids = request_ids

    def cache_keys(self) -> list[str]:
        """Return the declared metrics, and those reported so far, as `type:name`."""
        return [f"{metric_type.value}:{name}" for metric_type, named in self.cache.items() for name in named]

    def record(self, sample: MetricSample) -> None:
        """Keep one value for the next `drain`; drop it if there are `MAX_SAMPLES`."""
        with self._lock:
            if len(self._samples) < MAX_SAMPLES:
                self._samples.append(sample)
                return
        if not self._was_full.is_set():
            self._was_full.set()
            logger.warning(
                "more than %d values of metrics were reported before a batch ended; further ones are dropped",
                MAX_SAMPLES,
            )

    def drain(self) -> list[MetricSample]:
        """Return all values reported since the last call, in order."""
        with self._lock:
            samples = list(self._samples)
            self._samples.clear()  # not replaced: the copies that `beside` makes share it
        return samples

    def beside(self) -> MetricsCache:
        """Return a collector for a batch that runs alongside others; this one drains the values of all."""
        return copy.copy(self)

    def add_metric_to_cache(
        self,
        metric_name: str,
        unit: str,
        dimension_names: Sequence[str] | None = None,
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> CachingMetric:
        """Declare a metric; declaring it again replaces it.

        Raises:
            MetricsCacheTypeError: an argument has the wrong type.
        """
        names = list(dimension_names or ())
        if not isinstance(metric_name, str) or not isinstance(unit, str):
            raise MetricsCacheTypeError(f"metric_name and unit must be str, found {metric_name!r}, {unit!r}")
        if isinstance(dimension_names, str) or not all(isinstance(name, str) for name in names):
            raise MetricsCacheTypeError(f"dimension_names of {metric_name} must be str, found {names!r}")
        if not isinstance(metric_type, MetricTypes):
            raise MetricsCacheTypeError(
                f"metric_type of {metric_name} must be a MetricTypes: {metric_type!r}"
            )
        if metric_name in self.cache.get(metric_type, {}):
            logger.warning("metric %s (%s) is declared again and replaced", metric_name, metric_type.value)
        return self._keep(metric_name, unit, names, metric_type)

    def get_metric(self, metric_name: str, metric_type: MetricTypes = MetricTypes.COUNTER) -> CachingMetric:
        """Return the metric declared under that name and type.

        Raises:
            MetricsCacheKeyError: none was declared.
            MetricsCacheTypeError: an argument has the wrong type.
        """
        if not isinstance(metric_name, str) or not isinstance(metric_type, MetricTypes):
            raise MetricsCacheTypeError(
                f"expected a str and a MetricTypes, found {metric_name!r}, {metric_type!r}"
            )
        metric = self.cache.get(metric_type, {}).get(metric_name)
        if metric is None:
            raise MetricsCacheKeyError(
                f"no metric {metric_name!r} of type {metric_type.value}; declare it with add_metric_to_cache"
            )
        return metric

    def add_metric(  # noqa: PLR0917  # TorchServe's signature
        self,
        name: str,
        value: float,
        unit: str,
        idx: int | None = None,
        dimensions: Sequence[Dimension] | None = None,
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> None:
        """Report a value of any metric type.

        Args:
            name: metric name.
            value: see `CachingMetric.add_or_update`.
            unit: free text; the short spellings of `Units` are written out.
            idx: index of the request in the batch; None, or an index outside the batch, means all requests.
            dimensions: labels besides `ModelName` and `Level`; these two are added if they are missing.
            metric_type: how values are aggregated.
        """
        one = None if idx is None else self.request_ids.get(idx)
        ids = tuple(self.request_ids.values()) if one is None else (one,)
        self._report(name, value, unit, dimensions or (), ids, metric_type)

    def add_counter(
        self, name: str, value: float, idx: int | None = None, dimensions: Sequence[Dimension] | None = None
    ) -> None:
        """Add `value` to a counter."""
        self.add_metric(name, value, "count", idx, dimensions, MetricTypes.COUNTER)

    def add_time(  # noqa: PLR0917  # TorchServe's signature
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "ms",
        dimensions: Sequence[Dimension] | None = None,
        metric_type: MetricTypes = MetricTypes.GAUGE,
    ) -> None:
        """Report a time in `ms` or `s`.

        Raises:
            MetricsCacheValueError: the unit is none of these.
        """
        if unit not in ("ms", "s"):
            raise MetricsCacheValueError(f"the unit of the time {name!r} must be 'ms' or 's', found {unit!r}")
        self.add_metric(name, value, unit, idx, dimensions, metric_type)

    def add_size(  # noqa: PLR0917  # TorchServe's signature
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "MB",
        dimensions: Sequence[Dimension] | None = None,
        metric_type: MetricTypes = MetricTypes.GAUGE,
    ) -> None:
        """Report a size in `MB`, `kB`, `GB` or `B`.

        Raises:
            MetricsCacheValueError: the unit is none of these.
        """
        if unit not in ("MB", "kB", "GB", "B"):
            raise MetricsCacheValueError(
                f"the unit of the size {name!r} must be 'MB', 'kB', 'GB' or 'B', found {unit!r}"
            )
        self.add_metric(name, value, unit, idx, dimensions, metric_type)

    def add_percent(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        dimensions: Sequence[Dimension] | None = None,
        metric_type: MetricTypes = MetricTypes.GAUGE,
    ) -> None:
        """Report a percentage."""
        self.add_metric(name, value, "percent", idx, dimensions, metric_type)

    def add_error(self, name: str, value: float, dimensions: Sequence[Dimension] | None = None) -> None:
        """Count an error; it belongs to no request, and has a `ModelName` only if one is given."""
        self._report(name, value, "", dimensions or (), None, MetricTypes.COUNTER)

    def _labels(self, dimensions: Sequence[Dimension], *, is_error: bool) -> tuple[Dimension, ...]:
        automatic = [Dimension("Level", "Error" if is_error else "Model")]
        if not is_error:
            automatic.insert(0, Dimension("ModelName", self.model_name))
        given = [item.name for item in dimensions]
        return (*dimensions, *(item for item in automatic if item.name not in given))

    def _report(  # noqa: PLR0917
        self,
        name: str,
        value: float,
        unit: str,
        dimensions: Sequence[Dimension],
        ids: tuple[str, ...] | None,  # None for an error
        metric_type: MetricTypes,
    ) -> None:
        plain = None if dimensions else self._plain.get((name, ids is None))
        if plain and plain.metric.metric_type is metric_type and plain.model_name == self.model_name:
            plain.metric.report(value, plain.dimensions, ids or ())
            return
        labels = self._labels(dimensions, is_error=ids is None)
        names = tuple(item.name for item in labels)
        metric = self.cache.get(metric_type, {}).get(name)
        if metric is None or metric.dimension_names != names:
            metric = self._keep(name, unit, names, metric_type)
        if not dimensions:
            named = tuple((item.name, item.value) for item in labels)
            self._plain[name, ids is None] = _Plain(metric, self.model_name, named)
        metric.add_or_update(value, [item.value for item in labels], ids or ())

    def _keep(
        self, name: str, unit: str, dimension_names: Sequence[str], metric_type: MetricTypes
    ) -> CachingMetric:
        metric = CachingMetric(name, unit, dimension_names, metric_type, record=self.record)
        self.cache.setdefault(metric_type, {})[name] = metric
        self._plain.clear()
        return metric


F = TypeVar("F", bound=Callable[..., Any])


def add_handler_time(context: Any, started_s: float) -> None:
    """Report the time since `started_s` (of `time.perf_counter`) as the gauge `HandlerTime`."""
    if context.metrics is not None:
        # Two decimals. round() formats and parses the number, which takes 5 us.
        elapsed_ms = int((time.perf_counter() - started_s) * 100_000 + 0.5) / 100
        context.metrics.add_time("HandlerTime", elapsed_ms, None, "ms")


TIMED = "ts_handler_"  # the name of a metric of `timed` begins so


def timed(stage: F) -> F:
    """Decorate a handler's method so that its wall time is reported as a gauge.

    The metric is `ts_handler_<method>` in milliseconds, when the handler has a context with metrics and the
    archive's `model-config.yaml` sets `handler: {profile: true}`; otherwise the method just runs.
    """

    @functools.wraps(stage)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        metrics = _metrics_of(self)
        if metrics is None:
            return stage(self, *args, **kwargs)
        started = time.perf_counter()
        result = stage(self, *args, **kwargs)
        metrics.add_time(f"{TIMED}{stage.__name__}", (time.perf_counter() - started) * 1000)
        return result

    return wrapper  # type: ignore[return-value]  # wraps() keeps the signature, the checker can't see it


def _metrics_of(handler: Any) -> Any:
    context: Any = getattr(handler, "context", None)
    config = getattr(context, "model_yaml_config", None)
    if not isinstance(config, dict) or "handler" not in config:  # nearly always
        return None
    handler_config = config["handler"]
    is_wanted = isinstance(handler_config, dict) and handler_config.get("profile")
    return context.metrics if is_wanted else None
