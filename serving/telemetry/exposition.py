"""Renders metrics as text, byte for byte as TorchServe's Prometheus endpoint does. Pure functions.

The format is Prometheus's text format 0.0.4 with three peculiarities of the Java client 0.9: a comma after
the last label, values in the format of Java's `Double.toString`, and counters without an added `_total`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from decimal import Decimal

from prometheus_client import Metric
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

# Java's Double.toString writes decimals from 10^-3 to 10^7, and powers of ten outside this range.
_PLAIN_FROM = 1e-3
_PLAIN_TO = 1e7


def render(families: Iterable[Metric], declared: Mapping[str, str], names: Collection[str] = ()) -> str:
    """Render families as text.

    Args:
        families: as the registry collects them.
        declared: for counters, the declared name by the library's family name.
        names: names of the samples to render; empty renders all. A family without such a sample is omitted.
    """
    lines: list[str] = []
    for family in families:
        name = declared.get(family.name, family.name)
        samples = [(_sample_name(name, family, sample), sample) for sample in family.samples]
        samples = [pair for pair in samples if pair[0] is not None and (not names or pair[0] in names)]
        if names and not samples:
            continue
        lines.append(f"# HELP {name} {_escaped_help(family.documentation)}")
        lines.append(f"# TYPE {name} {family.type}")
        lines += [f"{full}{_labels(sample.labels)} {java_double(sample.value)}" for full, sample in samples]
    return "".join(f"{line}\n" for line in lines)


def java_double(value: float) -> str:
    """Format a number as Java's `Double.toString` does; NaN and infinity as Prometheus does."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    value = float(value)
    if value == 0 or _PLAIN_FROM <= abs(value) < _PLAIN_TO:
        return repr(value)  # Python uses powers of ten only outside this range
    digits = Decimal(repr(value)).normalize().as_tuple()
    mantissa = "".join(map(str, digits.digits))
    exponent = int(digits.exponent) + len(mantissa) - 1
    return f"{'-' if digits.sign else ''}{mantissa[0]}.{mantissa[1:] or '0'}E{exponent}"


def _sample_name(name: str, family: Metric, sample: Sample) -> str | None:
    suffix = sample.name[len(family.name) :]
    if suffix == "_created":
        return None
    return name if family.type == "counter" else f"{name}{suffix}"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    pairs = "".join(f'{name}="{_escaped_label(value)}",' for name, value in labels.items())
    return f"{{{pairs}}}"


def _escaped_label(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _escaped_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


# Metrics as OpenMetrics text 1.0, which can contain exemplars, for scrapers that request it. Pure functions.
# OpenMetrics requires counter names to end in `_total`. TorchServe's do not, and Prometheus, which requests
# this format by default, must find them under their names. So such a counter is rendered as a gauge.
# KServe's queue proxy forwards the `Accept` header of Prometheus, but parses the response as the classic text
# format, up to the first line that is invalid in it. The type `unknown` and exemplars make such lines, so
# families with exemplars are rendered last.

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_MEDIA_TYPE = "application/openmetrics-text"
_VERSIONS = ("1.0.0", "0.0.1", "")  # versions that a client may request; the output is valid in all of them


def wants_openmetrics(accept: str) -> bool:
    """Return whether an `Accept` header prefers OpenMetrics to the classic text format, the default."""
    openmetrics, plain = 0.0, 0.0
    for choice in accept.split(","):
        kind, *parameters = (part.strip() for part in choice.split(";"))
        given = dict(parameter.partition("=")[::2] for parameter in parameters)
        weight = _weight(given.get("q", "1"))
        if kind.lower() == _MEDIA_TYPE and given.get("version", "").strip('"') in _VERSIONS:
            openmetrics = max(openmetrics, weight)
        elif kind.lower() in ("text/plain", "text/*", "*/*"):
            plain = max(plain, weight)
    return openmetrics > 0 and openmetrics >= plain


def _weight(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def render_openmetrics(
    families: Iterable[Metric], declared: Mapping[str, str], names: Collection[str] = ()
) -> str:
    """Render families as OpenMetrics text; the arguments are those of `render`."""
    wanted = [_renamed(family, declared.get(family.name, family.name)) for family in families]
    for family in wanted:
        family.samples = [sample for sample in family.samples if not names or sample.name in names]
    kept = [family for family in wanted if family.samples or not names]
    kept.sort(key=_has_exemplar)
    text: bytes = generate_latest(_Families(kept))  # type: ignore[no-untyped-call]
    return text.decode()


class _Families(Collector):
    """A collector that returns the given families to the library's renderer."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _has_exemplar(family: Metric) -> bool:
    return any(sample.exemplar is not None for sample in family.samples)


def _renamed(family: Metric, name: str) -> Metric:
    """Return the family in OpenMetrics form; `name` is the declared name of a counter."""
    if family.type != "counter":
        renamed = Metric(family.name, family.documentation, family.type)
        renamed.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
        return renamed
    kind = "counter" if name.endswith("_total") else "gauge"
    renamed = Metric(name.removesuffix("_total"), family.documentation, kind)
    for sample in family.samples:
        if not sample.name.endswith("_created"):
            renamed.add_sample(name, sample.labels, sample.value, exemplar=sample.exemplar)
    return renamed
