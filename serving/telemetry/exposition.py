"""Renders metrics as text, byte for byte as TorchServe's Prometheus endpoint does. Pure functions.

The format is Prometheus's text format 0.0.4 with three peculiarities of the Java client 0.9: a comma after
the last label, values in the format of Java's `Double.toString`, and counters without an added `_total`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.samples import Exemplar, Sample

# Java's Double.toString writes plain decimals from 10^-3 to 10^7, and scientific notation outside this range.
_PLAIN_FROM = 1e-3
_PLAIN_TO = 1e7
_LABELS = "\0"  # placeholder for the labels in the template of a histogram's lines


class HistogramRow(NamedTuple):
    """One histogram with its labels; a renderer writes all its samples at once."""

    labels: Mapping[str, str]
    bounds: tuple[str, ...]  # upper bounds as text; the last is "+Inf"
    counts: Sequence[int]  # by bound, cumulative
    total: float
    exemplars: Sequence[Exemplar | None] = ()  # by bound; empty: none

    def samples(self, name: str) -> Iterable[Sample]:
        """Yield the samples of the histogram; `name` is the name of its family."""
        exemplars = self.exemplars or (None,) * len(self.bounds)
        for bound, count, exemplar in zip(self.bounds, self.counts, exemplars, strict=True):
            yield Sample(f"{name}_bucket", {**self.labels, "le": bound}, count, None, exemplar)
        yield Sample(f"{name}_count", dict(self.labels), self.counts[-1])
        yield Sample(f"{name}_sum", dict(self.labels), self.total)


class OwnFamily(Metric):
    """A metric family of this server; its histograms are rows, which need no object for each bucket."""

    def __init__(self, name: str, documentation: str, kind: str) -> None:
        super().__init__(name, documentation, kind)
        self.rows: list[HistogramRow] = []

    def add(self, value: float, /, **labels: str) -> None:
        """Add a sample with these labels."""
        self.samples.append(Sample(self.name, labels, value))


def render(
    families: Iterable[Metric],
    declared: Mapping[str, str],
    names: Collection[str] = (),
    *,
    openmetrics: bool = False,
) -> str:
    """Render families as text.

    Args:
        families: as the registry collects them.
        declared: maps the library's family name of a counter to its declared name.
        names: names of the samples to render; empty renders all. A family without such a sample is omitted.
        openmetrics: use the format of OpenMetrics, with families that have exemplars after all others.
    """
    text: list[str] = []
    last: list[str] = []
    for family in families:
        name = declared.get(family.name, family.name)
        lines = _lines(family, name, names, openmetrics=openmetrics)
        if lines or not names:
            head = _openmetrics_head(family, name) if openmetrics else _head(family, name)
            (last if openmetrics and _has_exemplar(family) else text).extend((head, *lines))
    return "".join((*text, *last, "# EOF\n" if openmetrics else ""))


def _head(family: Metric, name: str) -> str:
    return f"# HELP {name} {_escaped_help(family.documentation)}\n# TYPE {name} {family.type}\n"


def _rows(family: Metric) -> Sequence[HistogramRow]:
    return family.rows if isinstance(family, OwnFamily) else ()


def samples_of(family: Metric) -> list[Sample]:
    """Return all samples of a family, including those of its histograms."""
    return [*family.samples, *(sample for row in _rows(family) for sample in row.samples(family.name))]


def _lines(family: Metric, name: str, names: Collection[str], *, openmetrics: bool) -> list[str]:
    """Return the lines of the samples of a family with the given (declared) name."""
    lines: list[str] = []
    samples = list(family.samples)
    for row in _rows(family):
        if names or (openmetrics and row.exemplars):
            samples += row.samples(family.name)
        else:
            lines.append(_histogram_lines(row, name, openmetrics))
    is_counter, stem = family.type == "counter", len(family.name)
    labels_of = _sorted_labels if openmetrics else _labels
    number = openmetrics_number if openmetrics else java_double
    for sample in samples:
        suffix = sample.name[stem:]
        full = name if is_counter else f"{name}{suffix}"
        if suffix == "_created" or (names and full not in names):
            continue
        exemplar = _exemplar(sample.exemplar) if openmetrics and sample.exemplar else ""
        lines.append(f"{full}{labels_of(sample.labels)} {number(sample.value)}{exemplar}\n")
    return lines


def _histogram_lines(row: HistogramRow, name: str, openmetrics: bool) -> str:
    number = openmetrics_number if openmetrics else java_double
    is_small = row.counts[-1] < _PLAIN_TO
    form = _histogram_form(name, row.bounds, bool(row.labels), openmetrics, is_small)
    counts = row.counts if is_small else [number(count) for count in row.counts]
    # The labels are inserted last, because they may contain "%".
    return (form % (*counts, counts[-1], number(row.total))).replace(_LABELS, _pairs(row.labels, openmetrics))


@lru_cache(maxsize=256)
def _histogram_form(
    name: str, bounds: tuple[str, ...], labelled: bool, openmetrics: bool, small: bool
) -> str:
    """Return a template of a histogram's lines: `_LABELS` for the labels, "%d" or "%s" for the counts."""
    number = "%d.0" if small else "%s"
    if openmetrics:  # it allows no comma after the last label
        comma = "," if labelled else ""
        lines = [f'{name}_bucket{{le="{bound}"{comma}{_LABELS}}} {number}\n' for bound in bounds]
    else:
        lines = [f'{name}_bucket{{{_LABELS}le="{bound}",}} {number}\n' for bound in bounds]
    braces = f"{{{_LABELS}}}" if labelled else ""
    return "".join((*lines, f"{name}_count{braces} {number}\n", f"{name}_sum{braces} %s\n"))


def java_double(value: float) -> str:
    """Format a number as Java's `Double.toString` does; NaN and infinity as Prometheus does."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    value = float(value)
    if value == 0 or _PLAIN_FROM <= abs(value) < _PLAIN_TO:
        return repr(value)  # Python uses scientific notation only outside this range
    digits = Decimal(repr(value)).normalize().as_tuple()
    mantissa = "".join(map(str, digits.digits))
    exponent = int(digits.exponent) + len(mantissa) - 1
    return f"{'-' if digits.sign else ''}{mantissa[0]}.{mantissa[1:] or '0'}E{exponent}"


def _labels(labels: Mapping[str, str]) -> str:
    return f"{{{_pairs(labels, False)}}}" if labels else ""


def _sorted_labels(labels: Mapping[str, str]) -> str:
    return f"{{{_pairs(dict(sorted(labels.items())), True)}}}" if labels else ""


def _pairs(labels: Mapping[str, str], openmetrics: bool) -> str:
    pairs = [f'{name}="{_escaped_label(value)}"' for name, value in labels.items()]
    return ",".join(pairs) if openmetrics else "".join([f"{pair}," for pair in pairs])


@lru_cache(maxsize=4096)  # the same values occur in every family
def _escaped_label(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _escaped_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


# Metrics as OpenMetrics text 1.0, which can contain exemplars, for scrapers that request it. Pure functions.
# OpenMetrics requires counter names to end in `_total`. TorchServe's names do not, and Prometheus, which
# requests this format by default, must find its counters by these names. So they are rendered as gauges. To
# Datadog's agent and Google's collector a gauge is another metric, so this format must be worth it.
# KServe's queue proxy forwards the `Accept` header of Prometheus, but parses the response as the classic text
# format, up to the first line that is invalid in it. The type `unknown` and exemplars make such lines, so
# families with exemplars are rendered last.

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_MEDIA_TYPE = "application/openmetrics-text"
_VERSIONS = ("1.0.0", "0.0.1", "")  # versions that a client may request; the output is valid in all of them


def wants_openmetrics(accept: str, *, has_exemplars: bool) -> bool:
    """Return whether to answer an `Accept` header in OpenMetrics, not in the classic text format.

    The header must prefer it. If it names plain text as well, `has_exemplars` must say that OpenMetrics has
    more to offer: otherwise scrapers that read both would take TorchServe's counters for gauges in vain.
    """
    openmetrics, plain, others = 0.0, 0.0, 0.0
    for choice in accept.split(","):
        kind, *parameters = (part.strip() for part in choice.split(";"))
        given = dict(parameter.partition("=")[::2] for parameter in parameters)
        weight = _weight(given.get("q", "1"))
        if kind.lower() == _MEDIA_TYPE and given.get("version", "").strip('"') in _VERSIONS:
            openmetrics = max(openmetrics, weight)
        elif kind.lower() in ("text/plain", "text/*"):
            plain = max(plain, weight)
        elif kind == "*/*":
            others = max(others, weight)
    return openmetrics > 0 and openmetrics >= max(plain, others) and (has_exemplars or not plain)


def _weight(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _openmetrics_head(family: Metric, name: str) -> str:
    kind = "gauge" if family.type == "counter" and not name.endswith("_total") else family.type
    stem = name.removesuffix("_total") if kind == "counter" else name
    return f"# HELP {stem} {_escaped_label(family.documentation)}\n# TYPE {stem} {kind}\n"


def openmetrics_number(value: float) -> str:
    """Format a number for OpenMetrics.

    >>> openmetrics_number(3), openmetrics_number(1e16), openmetrics_number(math.inf)
    ('3.0', '1e+16', '+Inf')
    """
    return repr(float(value)) if math.isfinite(value) else java_double(value)


def _exemplar(exemplar: Exemplar) -> str:
    labels = _sorted_labels(exemplar.labels) or "{}"
    time_s = "" if exemplar.timestamp is None else f" {exemplar.timestamp}"
    return f" # {labels} {openmetrics_number(exemplar.value)}{time_s}"


def _has_exemplar(family: Metric) -> bool:
    return any(row.exemplars for row in _rows(family)) or any(sample.exemplar for sample in family.samples)
