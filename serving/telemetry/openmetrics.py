"""Metrics as OpenMetrics text 1.0, which can carry exemplars, for scrapers that ask for it. Pure.

The format wants counters to end in `_total`. TorchServe's do not, and a Prometheus, which asks for this
format unless told otherwise, must find them under their names: such a counter is shown as a gauge.

KServe's queue proxy hands on what Prometheus asks for, and reads the answer as plain text whatever it is, up
to the first line that is none. A type `unknown` is such a line, and so is an exemplar: families that have one
come last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from prometheus_client import Metric
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.registry import Collector

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_MEDIA_TYPE = "application/openmetrics-text"
_VERSIONS = ("1.0.0", "0.0.1", "")  # that a client may ask for: what it gets suits all of them


def wants_openmetrics(accept: str) -> bool:
    """Whether an `Accept` header prefers OpenMetrics to the plain text format, which is the default."""
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
    """Write families as text; the arguments are those of `exposition.render`."""
    wanted = [_renamed(family, declared.get(family.name, family.name)) for family in families]
    for family in wanted:
        family.samples = [sample for sample in family.samples if not names or sample.name in names]
    kept = [family for family in wanted if family.samples or not names]
    kept.sort(key=_has_exemplar)
    text: bytes = generate_latest(_Families(kept))  # type: ignore[no-untyped-call]
    return text.decode()


class _Families(Collector):
    """What the library's exposition asks for its families."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _has_exemplar(family: Metric) -> bool:
    return any(sample.exemplar is not None for sample in family.samples)


def _renamed(family: Metric, name: str) -> Metric:
    """The family as this format wants it, from one whose counter is called `name`."""
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
