"""Metric declarations: a parser of `metrics.yaml`, in TorchServe's format, that drops unusable declarations.

The section `ts_metrics` declares the metrics of the server, `model_metrics` those of handlers; each has up to
three lists, one per metric type. The built-in file next to this module is the default. It alone defines which
labels the server supplies.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torchere.handlers.errors import (
    MetricsCacheError,
    MetricsCacheIOError,
    MetricsCacheKeyError,
    MetricsCachePyYamlError,
    MetricsCacheTypeError,
    MetricsCacheValueError,
)
from torchere.serving.config.bounded_yaml import read_yaml
from torchere.serving.config.server_settings import MetricsMode
from torchere.serving.telemetry import catalogue
from torchere.serving.telemetry.catalogue import KINDS, Families, Reserved, check_names

BUILT_IN_FILE = Path(__file__).with_name("metrics.yaml")
HOSTNAME = "Hostname"  # additional label of every handler metric
OWN_PREFIX = "torchere_"  # prefix of our own metrics, which need no declaration
_SECTIONS = ("ts_metrics", "model_metrics")
_FIELDS = ("name", "unit", "dimensions")
REQUESTS = "ts_inference_requests_total"
LATENCY = "ts_inference_latency_microseconds"
QUEUE_LATENCY = "ts_queue_latency_microseconds"
# The metrics that `metrics_mode=legacy` exposes; it logs all others. `log` exposes none and logs all.
LEGACY_METRICS = frozenset({REQUESTS, LATENCY, QUEUE_LATENCY})


def is_logged(name: str, mode: MetricsMode) -> bool:
    """Return whether updates of a metric are logged; otherwise the metrics endpoint exposes it."""
    return mode == "log" or (mode == "legacy" and name not in LEGACY_METRICS)


@dataclass(frozen=True, slots=True)
class DeclaredMetric:
    """One metric. `kind` is counter, gauge or histogram; `labels` include the label of the host."""

    name: str
    kind: str
    unit: str
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """The declared metrics by name; empty by default."""

    server: Mapping[str, DeclaredMetric] = field(default_factory=dict)
    model: Mapping[str, DeclaredMetric] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()  # one message for each declaration that can't be used


@functools.cache
def built_in_config() -> MetricsConfig:
    """Return the default declarations."""
    return _config(BUILT_IN_FILE.read_text(encoding="utf-8"), "prometheus", MetricsConfig())


def read_metrics_config(path: Path, mode: MetricsMode = "prometheus") -> MetricsConfig:
    """Read a metrics file, for a server with this `metrics_mode`.

    Raises:
        MetricsCacheError: the message names the place and the expected value.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        cause = (err.strerror if isinstance(err, OSError) else None) or str(err)
        raise MetricsCacheIOError(f"{path}: {cause}") from err
    return parse_metrics_config(text, mode)


def parse_metrics_config(text: str, mode: MetricsMode = "prometheus") -> MetricsConfig:
    """Parse a metrics file's text; raises the errors of `read_metrics_config` but MetricsCacheIOError."""
    return _config(text, mode, built_in_config())


def _config(text: str, mode: MetricsMode, supplied: MetricsConfig) -> MetricsConfig:
    """Return the declarations that can be used; `supplied` has the labels of the server's own metrics."""
    families = Families()  # of the exposed metrics, so that the library reports conflicting names
    families.registry.register(Reserved(catalogue.ALL_NAMES))
    server: dict[str, DeclaredMetric] = {}
    model: dict[str, DeclaredMetric] = {}
    dropped: list[str] = []
    for section, kind, entry in _entries(text):
        found, known = (server, supplied.server) if section == "ts_metrics" else (model, supplied.model)
        try:
            metric = _metric(f"{section}.{kind}", kind, entry)
            if mode == "legacy" and metric.name in LEGACY_METRICS:
                metric = replace(metric, kind="counter")  # as in TorchServe, also if declared otherwise
            if metric.name in found:
                raise MetricsCacheValueError(f"{section}: {metric.name} is declared twice")
            if is_logged(metric.name, mode):
                _check_logged(metric)
            else:
                _check_exposed(metric, known.get(metric.name), families)
        except MetricsCacheError as err:
            dropped.append(str(err))
        else:
            found[metric.name] = metric
    return MetricsConfig(server, model, tuple(dropped))


def _entries(text: str) -> list[tuple[str, str, object]]:
    """Return each declaration of a file with its section and its type."""
    try:
        document = read_yaml(text)
    except ValueError as err:
        raise MetricsCachePyYamlError(f"not YAML: {err}") from err
    if not isinstance(document, dict):
        raise MetricsCacheTypeError(f"found {_kind(document)}, expected a mapping with {_SECTIONS}")
    unknown = [key for key in document if key not in (*_SECTIONS, "dimensions")]
    if unknown:
        raise MetricsCacheKeyError(f"sections: unknown {unknown}, expected {_SECTIONS}")
    if "model_metrics" not in document:  # the only section that TorchServe requires
        raise MetricsCacheKeyError(f"sections: model_metrics is missing, expected {_SECTIONS}")
    server, model = (list(_section(name, document.get(name))) for name in _SECTIONS)
    if not model:
        raise MetricsCacheValueError("model_metrics is empty; declare at least one metric in it")
    return [*server, *model]


def _section(section: str, lists: object) -> Iterator[tuple[str, str, object]]:
    lists = {} if lists is None else lists
    if not isinstance(lists, dict):
        raise MetricsCacheTypeError(f"{section} is {_kind(lists)}, expected a mapping with {KINDS}")
    for kind, entries in lists.items():
        if kind not in KINDS:
            raise MetricsCacheKeyError(f"{section}: unknown type {kind!r}, expected one of {KINDS}")
        if not isinstance(entries, (list, type(None))):
            raise MetricsCacheTypeError(f"{section}.{kind} is {_kind(entries)}, expected a list")
        for entry in entries or ():
            yield section, kind, entry


def _metric(place: str, kind: str, entry: object) -> DeclaredMetric:
    if not isinstance(entry, dict):
        raise MetricsCacheTypeError(f"{place}: found {_kind(entry)}, expected a mapping with {_FIELDS}")
    missing = [key for key in _FIELDS if key not in entry]
    if missing:
        raise MetricsCacheKeyError(f"{place}: {entry.get('name', 'a metric')} lacks {', '.join(missing)}")
    name, unit, dimensions = (entry[key] for key in _FIELDS)
    if not (_is_text(name) and _is_text(unit)):
        raise MetricsCacheTypeError(f"{place}: name {name!r} and unit {unit!r} must be text")
    if not isinstance(dimensions, list) or not all(isinstance(label, str) for label in dimensions):
        raise MetricsCacheTypeError(f"{place}: dimensions of {name} must be a list of text: {dimensions!r}")
    labels = [*dimensions]
    if place.startswith("model_metrics"):
        labels = [*(label for label in dimensions if label != HOSTNAME), HOSTNAME]
    return DeclaredMetric(name, kind, unit, tuple(labels))


def _is_text(value: object) -> bool:
    """Return whether the value is a str without lone surrogates, which UTF-8 can't encode."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _check_logged(metric: DeclaredMetric) -> None:
    try:
        check_names(metric.kind, metric.name, metric.labels, logged=True)
    except ValueError as err:
        raise MetricsCacheValueError(f"{metric.name!r}: {err}") from err


def _check_exposed(metric: DeclaredMetric, supplied: DeclaredMetric | None, families: Families) -> None:
    """Declare the metric in `families`, which have those before it; `supplied`: its built-in declaration."""
    if metric.name.startswith(OWN_PREFIX):
        raise MetricsCacheValueError(f"{metric.name}: names that begin with {OWN_PREFIX} are taken")
    if supplied is not None and len(metric.labels) != len(supplied.labels):
        raise MetricsCacheValueError(
            f"{metric.name} has the labels {metric.labels}, expected as many as in {supplied.labels}"
        )
    if len(set(metric.labels)) < len(metric.labels):
        raise MetricsCacheValueError(f"{metric.name}: a dimension is there twice: {metric.labels}")
    try:
        families.declare(metric.kind, metric.name, metric.unit, metric.labels)
    except ValueError as err:
        raise MetricsCacheValueError(f"{metric.name}: {err}") from err


def _kind(value: object) -> str:
    return type(value).__name__
