"""Metric declarations: a strict parser of `metrics.yaml`, in TorchServe's format.

The section `ts_metrics` declares the metrics of the server, `model_metrics` those of handlers; each has up to
three lists, one per metric type. The built-in file next to this module is the default. It alone defines which
labels the server supplies.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torchere.handlers.errors import (
    MetricsCacheIOError,
    MetricsCacheKeyError,
    MetricsCachePyYamlError,
    MetricsCacheTypeError,
    MetricsCacheValueError,
)
from torchere.serving.config.bounded_yaml import read_yaml
from torchere.serving.telemetry import catalogue
from torchere.serving.telemetry.catalogue import KINDS, Families, Reserved

BUILT_IN_FILE = Path(__file__).with_name("metrics.yaml")
HOSTNAME = "Hostname"  # additional label of every handler metric
OWN_PREFIX = "torchere_"  # prefix of our own metrics, which need no declaration
_SECTIONS = ("ts_metrics", "model_metrics")
_FIELDS = ("name", "unit", "dimensions")


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


@functools.cache
def built_in_config() -> MetricsConfig:
    """Return the default declarations."""
    return _parse(BUILT_IN_FILE.read_text(encoding="utf-8"))


def read_metrics_config(path: Path) -> MetricsConfig:
    """Read a metrics file.

    Raises:
        MetricsCacheError: the message names the place and the expected value.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        cause = (err.strerror if isinstance(err, OSError) else None) or str(err)
        raise MetricsCacheIOError(f"{path}: {cause}") from err
    return parse_metrics_config(text)


def parse_metrics_config(text: str) -> MetricsConfig:
    """Parse a metrics file's text; raises the errors of `read_metrics_config` but MetricsCacheIOError."""
    config = _parse(text)
    built_in = built_in_config()
    _check_label_counts(config.server, built_in.server)
    _check_label_counts(config.model, built_in.model)
    return config


def _parse(text: str) -> MetricsConfig:
    try:
        document = read_yaml(text)
    except ValueError as err:
        raise MetricsCachePyYamlError(f"not YAML: {err}") from err
    if not isinstance(document, dict):
        raise MetricsCacheTypeError(f"found {_kind(document)}, expected a mapping with {_SECTIONS}")
    unknown = [key for key in document if key not in (*_SECTIONS, "dimensions")]
    if unknown:
        raise MetricsCacheKeyError(f"sections: unknown {unknown}, expected {_SECTIONS}")
    if "model_metrics" not in document:  # TorchServe requires only this section
        raise MetricsCacheKeyError(f"sections: model_metrics is missing, expected {_SECTIONS}")
    server, model = ({m.name: m for m in _section(name, document.get(name))} for name in _SECTIONS)
    if not model:
        raise MetricsCacheValueError("model_metrics is empty; declare at least one metric in it")
    config = MetricsConfig(server, model)
    _check_names(config)
    return config


def _section(section: str, lists: object) -> Iterator[DeclaredMetric]:
    lists = {} if lists is None else lists
    if not isinstance(lists, dict):
        raise MetricsCacheTypeError(f"{section} is {_kind(lists)}, expected a mapping with {KINDS}")
    seen: set[str] = set()
    for kind, entries in lists.items():
        if kind not in KINDS:
            raise MetricsCacheKeyError(f"{section}: unknown type {kind!r}, expected one of {KINDS}")
        if not isinstance(entries, (list, type(None))):
            raise MetricsCacheTypeError(f"{section}.{kind} is {_kind(entries)}, expected a list")
        for entry in entries or ():
            metric = _metric(f"{section}.{kind}", str(kind), entry)
            if metric.name in seen:
                raise MetricsCacheValueError(f"{section}: {metric.name} is declared twice")
            seen.add(metric.name)
            yield metric


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


def _check_names(config: MetricsConfig) -> None:
    """Declare all metrics in a temporary registry, so that the library reports conflicting names."""
    families = Families()
    families.registry.register(Reserved(catalogue.ALL_NAMES))
    for metric in (*config.server.values(), *config.model.values()):
        if metric.name.startswith(OWN_PREFIX):
            raise MetricsCacheValueError(f"{metric.name}: names that begin with {OWN_PREFIX} are taken")
        try:
            families.declare(metric.kind, metric.name, metric.unit, metric.labels)
        except ValueError as err:
            raise MetricsCacheValueError(f"{metric.name}: {err}") from err
        if len(set(metric.labels)) < len(metric.labels):
            raise MetricsCacheValueError(f"{metric.name}: a dimension is there twice: {metric.labels}")


def _check_label_counts(found: Mapping[str, DeclaredMetric], supplied: Mapping[str, DeclaredMetric]) -> None:
    for name in found.keys() & supplied.keys():
        expected = supplied[name].labels
        if len(found[name].labels) != len(expected):
            raise MetricsCacheValueError(
                f"{name} has the labels {found[name].labels}, expected as many as in {expected}"
            )


def _kind(value: object) -> str:
    return type(value).__name__
