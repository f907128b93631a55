"""Metrics as text, byte for byte in the form that TorchServe's Prometheus endpoint has. Pure.

It is the text format 0.0.4 with three habits of the Java client 0.9: a comma after the last label, values as
Java prints a double, and counters under the very name they were declared with.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from decimal import Decimal

from prometheus_client import Metric
from prometheus_client.samples import Sample

# Java's Double.toString writes plain decimals from 10^-3 up to 10^7, and powers of ten outside.
_PLAIN_FROM = 1e-3
_PLAIN_TO = 1e7


def render(families: Iterable[Metric], declared: Mapping[str, str], names: Collection[str] = ()) -> str:
    """Write families as text.

    Args:
        families: what the registry collected.
        declared: for counters, the library's family name to the name it was declared with.
        names: sample names to keep; none of them keeps everything, and a family with nothing kept vanishes.
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
    """A number as Java's `Double.toString` writes it, and as Prometheus wants what is not finite."""
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
