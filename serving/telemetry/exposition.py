"""Metrics as text, byte for byte in the form that TorchServe's Prometheus endpoint has. Pure.

It is the text format 0.0.4 with three habits of the Java client 0.9: a comma after the last label, values as
Java prints a double, and counters under the very name they were declared with.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from decimal import Decimal

from prometheus_client import Metric
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

# Java's Double.toString writes plain decimals from 10^-3 up to 10^7, and powers of ten outside.
_PLAIN_FROM = 1e-3
_PLAIN_TO = 1e7


def render(families: Iterable[Metric], declared: Mapping[str, str], names: Collection[str] = ()) -> str:
    """Render families as text.

    Args:
        families: as the registry collects them.
        declared: for counters, the library's family name to the name it was declared with.
        names: sample names to keep; empty keeps all. A family without a kept sample is left out.
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
    """Return a number as Java's `Double.toString` writes it; NaN and infinity as Prometheus does."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    value = float(value)
    if value == 0 or _PLAIN_FROM <= abs(value) < _PLAIN_TO:
        return repr(value)  # Python's own switch to powers of ten lies outside of these
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


# Metrics as OpenMetrics text 1.0, which can carry exemplars, for scrapers that ask for it. Pure.
#
# The format wants counters to end in `_total`. TorchServe's do not, and a Prometheus, which asks for this
# format unless told otherwise, must find them under their names: such a counter is shown as a gauge.
#
# KServe's queue proxy hands on what Prometheus asks for, and reads the answer as plain text in any case,
# up to the first line that is not plain text. A type `unknown` is such a line, and so is an exemplar:
# families that have one come last.

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_MEDIA_TYPE = "application/openmetrics-text"
_VERSIONS = ("1.0.0", "0.0.1", "")  # that a client may ask for; the output is valid in all of them


def wants_openmetrics(accept: str) -> bool:
    """Return whether an `Accept` header prefers OpenMetrics to plain text, which is the default."""
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
    """Collector of given families, the input of the library's exposition."""

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
