"""A snapshot of all metrics, taken on the event loop, which any thread can render as text."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

from prometheus_client import Metric

from torchere.serving.config.server_settings import StageSeries
from torchere.serving.telemetry import catalogue
from torchere.serving.telemetry import catalogue as names
from torchere.serving.telemetry.catalogue import Families
from torchere.serving.telemetry.distributions import add_histogram
from torchere.serving.telemetry.exposition import HistogramRow, OwnFamily, render, render_openmetrics
from torchere.serving.telemetry.load_metrics import VersionLoad, load_families
from torchere.serving.telemetry.numbers import SIZE_BUCKETS, VersionSnapshot
from torchere.serving.telemetry.sampling import ProcessMetrics
from torchere.serving.telemetry.stages import COLUMNS, STAGES


@dataclass(frozen=True, slots=True)
class States:
    """All possible states, for metrics that are 1 for the current state and 0 for the others."""

    executor: tuple[str, ...] = ()
    version: tuple[str, ...] = ()


class Extent(NamedTuple):
    """Limits on the number of series; the defaults expose all of them."""

    stages: StageSeries = "buckets"
    idle_s: float = 0.0  # histograms of versions without a batch for this time are omitted; 0: never


class ClientNumbers(NamedTuple):
    """The counters of one identity."""

    admitted: int  # predictions
    running: int  # of these, without an answer
    refused: Mapping[str, int]  # requests, by limit


@dataclass(frozen=True, slots=True)
class Exposure:
    """A copy of the counters, for any thread; `families` and `process` are the thread-safe originals."""

    families: Families
    plain: Callable[[], Iterable[Metric]]  # TorchServe's metrics that are rendered from counters
    versions: Mapping[tuple[str, str], VersionSnapshot]  # by model and version
    loads: Mapping[tuple[str, str], VersionLoad]  # likewise
    states: States
    refused: Mapping[str, int]  # rejections before the model was known, by reason
    over_budget: Mapping[str, int]  # rejections by budget
    clients: Mapping[str, ClientNumbers]  # by identity; "": all clients without one
    server: Mapping[str, float]  # by the name of a metric family without labels
    process: ProcessMetrics
    extent: Extent

    def text(self, names: Collection[str] = (), *, openmetrics: bool = False) -> str:
        """Return the text of a scrape with the samples in `names`; empty means all samples. Thread-safe."""
        form = render_openmetrics if openmetrics else render
        declared = self.families.declared | catalogue.LIBRARY_COUNTERS
        return form(self._collect(), declared, names)

    def _collect(self) -> Iterable[Metric]:
        yield from self.plain()
        yield from self.families.registry.collect()
        yield from version_families(self.versions, self.refused, self.extent, time.time())
        yield from load_families(self.loads, self.states.executor, self.states.version)
        for name, value in self.server.items():
            family = catalogue.family(name)
            family.add_sample(name, {}, value)
            yield family
        family = catalogue.family(catalogue.BUDGET_REFUSED)
        for budget, count in self.over_budget.items():
            family.add_sample(catalogue.BUDGET_REFUSED, {"budget": budget}, count)
        yield family
        yield from client_families(self.clients)
        yield from self.process.collect()


def client_families(clients: Mapping[str, ClientNumbers]) -> Iterable[Metric]:
    """Return the families of clients, by identity."""
    families = names.families((names.CLIENT_PREDICTIONS, names.CLIENT_IN_FLIGHT, names.CLIENT_REFUSED))
    for client, numbers in clients.items():
        labels = {"client": client}
        families[names.CLIENT_PREDICTIONS].add_sample(names.CLIENT_PREDICTIONS, labels, numbers.admitted)
        families[names.CLIENT_IN_FLIGHT].add_sample(names.CLIENT_IN_FLIGHT, labels, numbers.running)
        for limit, count in numbers.refused.items():
            named = {**labels, "budget": limit}
            families[names.CLIENT_REFUSED].add_sample(names.CLIENT_REFUSED, named, count)
    return families.values()


# Counters of a version by one more label: the label, and the counts by its values.
_COUNTS: Mapping[str, tuple[str, Callable[[VersionSnapshot], Mapping[str, int]]]] = {
    names.REJECTED: ("reason", attrgetter("rejected")),
    names.CANCELLED: ("stage", attrgetter("cancelled")),
    names.EXPIRED: ("stage", attrgetter("expired")),
    names.RESTARTS: ("reason", attrgetter("restarts")),
}
# One number of a version.
_VALUES: Mapping[str, Callable[[VersionSnapshot], float]] = {
    names.IN_FLIGHT: attrgetter("in_flight"),
    names.BUSY_SECONDS: attrgetter("busy_s"),
    names.LAST_PROGRESS: attrgetter("last_batch_s"),
    names.LOAD_DURATION: attrgetter("load_s"),
}
_LATER = (names.LAST_PROGRESS, names.LOAD_DURATION)  # not exposed as long as they are 0
FAMILIES = (
    *(names.REQUESTS, names.REQUEST_DURATION, names.FIRST_PART, names.QUEUE_DURATION, names.STAGE_DURATION),
    *(names.BATCH_SIZE, *_COUNTS, *_VALUES),
)
# Two thirds of all samples are those of stages, so their histograms have only every second bound, or none.
_STAGE_BOUNDS: dict[StageSeries, int] = {"buckets": 2, "means": 0}


def version_families(
    snapshots: Mapping[tuple[str, str], VersionSnapshot],
    refused: Mapping[str, int],
    extent: Extent,
    now_s: float,
) -> Iterable[Metric]:
    """Return the families of `FAMILIES`.

    Args:
        snapshots: by model and version.
        refused: rejections before the model was known, by reason; their labels for model and version are "".
        extent: which series are left out.
        now_s: seconds since the epoch.
    """
    families = names.families(FAMILIES)
    for reason, count in refused.items():
        labels = {"model": "", "version": "", "reason": reason}
        families[names.REJECTED].add_sample(names.REJECTED, labels, count)
    for (model, version), snapshot in snapshots.items():
        labels = {"model": model, "version": version}
        _add_counts(families, labels, snapshot)
        if snapshot.in_flight or not extent.idle_s or now_s - snapshot.used_s < extent.idle_s:
            _add_durations(families, labels, snapshot, extent.stages)
            _add_sizes(families[names.BATCH_SIZE], labels, snapshot)
        _add_values(families, labels, snapshot)
    return families.values()


def _add_durations(
    families: dict[str, OwnFamily], labels: dict[str, str], snapshot: VersionSnapshot, stages: StageSeries
) -> None:
    histograms = dict(zip(COLUMNS, snapshot.histograms, strict=True))
    add_histogram(families[names.REQUEST_DURATION], labels, histograms["total"])
    add_histogram(families[names.QUEUE_DURATION], labels, histograms["wait"])
    if snapshot.first_parts is not None:
        add_histogram(families[names.FIRST_PART], labels, snapshot.first_parts)
    for stage in STAGES if stages in _STAGE_BOUNDS else ():
        if histograms[stage].total:  # a handler reports either its three stages or only its total time
            values = histograms[stage]
            add_histogram(
                families[names.STAGE_DURATION], {**labels, "stage": stage}, values, _STAGE_BOUNDS[stages]
            )


def _add_counts(families: dict[str, OwnFamily], labels: dict[str, str], snapshot: VersionSnapshot) -> None:
    for (transport, code), count in snapshot.codes.items():
        named = {**labels, "protocol": transport, "code": code}
        families[names.REQUESTS].add_sample(names.REQUESTS, named, count)
    for name, (label, counts_of) in _COUNTS.items():
        for value, count in counts_of(snapshot).items():
            families[name].add_sample(name, {**labels, label: value}, count)


_SIZE_BOUNDS = (*(str(float(bound)) for bound in SIZE_BUCKETS), "+Inf")


def _add_sizes(family: OwnFamily, labels: dict[str, str], snapshot: VersionSnapshot) -> None:
    counts = list(accumulate(snapshot.sizes))
    family.rows.append(HistogramRow(labels, _SIZE_BOUNDS, counts, snapshot.requests_run))


def _add_values(families: dict[str, OwnFamily], labels: dict[str, str], snapshot: VersionSnapshot) -> None:
    for name, value_of in _VALUES.items():
        value = value_of(snapshot)
        if value or name not in _LATER:
            families[name].add_sample(name, labels, value)
