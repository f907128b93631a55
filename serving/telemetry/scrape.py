"""A snapshot of all metrics, taken on the event loop, which any thread can render as text."""

from __future__ import annotations

import time
from collections import ChainMap, Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import psutil
from prometheus_client import Metric

from torchere.serving.config.server_settings import StageSeries
from torchere.serving.telemetry import catalogue
from torchere.serving.telemetry.catalogue import Families
from torchere.serving.telemetry.distributions import add_histogram
from torchere.serving.telemetry.exposition import HistogramRow, OwnFamily, render
from torchere.serving.telemetry.numbers import SIZE_BUCKETS, VersionSnapshot
from torchere.serving.telemetry.sampling import ProcessMetrics
from torchere.serving.telemetry.stages import COLUMNS, STAGES
from torchere.serving.types import ClientNumbers


@dataclass(frozen=True, slots=True)
class ExecutorLoad:
    """The state of one executor at one point in time."""

    executor_id: int
    state: str
    pid: int = 0  # of the worker process; 0: another executor of the process reports it


@dataclass(frozen=True, slots=True)
class VersionLoad:
    """The load of one version at one point in time."""

    queued: int = 0  # waiting requests
    queue_room: int = 0  # further requests that may wait
    oldest_age_s: float = 0.0  # waiting time of the oldest waiting request
    predicted_s: float = 0.0  # expected duration of a batch
    executors: tuple[ExecutorLoad, ...] = ()
    state: str = ""  # of the version, or of its executors while none is in service; "": unknown
    response_timeout_s: float = 0.0  # limit on the duration of a batch; 0: unknown
    weights_bytes: int = 0  # 0: unknown
    weight: float = 0.0  # share of the requests without a version that it gets
    saturation: float = 0.0  # see `saturation.py`


class States(NamedTuple):
    """All possible states, for metrics that are 1 for the current state and 0 for the others."""

    executor: tuple[str, ...] = ()
    version: tuple[str, ...] = ()


class Extent(NamedTuple):
    """Limits on the number of series; the defaults expose all of them."""

    stages: StageSeries = "buckets"
    idle_s: float = 0.0  # histograms of versions without a batch for this time are omitted; 0: never


@dataclass(frozen=True, slots=True)
class Exposure:
    """A copy of the counters, for any thread; `families` and `process` are the thread-safe originals."""

    families: Families
    plain: Callable[[], Iterable[Metric]]  # TorchServe's metrics that are rendered from counters
    versions: Mapping[tuple[str, str], tuple[VersionSnapshot, VersionLoad | None]]  # by model and version
    states: States
    refused: Mapping[str, int]  # rejections before the model was known, by reason
    over_budget: Mapping[str, int]  # rejections by budget
    clients: Mapping[str, ClientNumbers]  # by identity; "": all clients without one
    server: Mapping[str, float]  # by the name of a metric family without labels
    process: ProcessMetrics
    extent: Extent

    def text(self, names: Collection[str] = (), *, openmetrics: bool = False) -> str:
        """Return the text of a scrape with the samples in `names`; empty means all samples. Thread-safe."""
        # Models may come and go meanwhile, so look a name up in the current table first, then in a copy.
        declared = ChainMap(self.families.declared, self.families.declared.copy(), catalogue.LIBRARY_COUNTERS)
        return render(self._collect(), declared, names, openmetrics=openmetrics)

    def _collect(self) -> Iterable[Metric]:
        yield from self.plain()
        yield from self.families.registry.collect()
        own = catalogue.families()
        for reason, count in self.refused.items():
            own["torchere_requests_rejected_total"].add(count, model="", version="", reason=reason)
        now_s = time.time()
        for (model, version), (snapshot, load) in self.versions.items():
            labels = {"model": model, "version": version}
            add_version(own, labels, snapshot, self.extent, now_s)
            if load is not None:
                add_load(own, labels, load, self.states)
        for name, value in self.server.items():
            own[name].add(value)
        for budget, count in self.over_budget.items():
            own["torchere_budget_refusals_total"].add(count, budget=budget)
        for client, numbers in self.clients.items():
            own["torchere_client_predictions_total"].add(numbers.admitted, client=client)
            own["torchere_client_predictions_in_flight"].add(numbers.running, client=client)
            for limit, count in numbers.refused.items():
                own["torchere_client_refusals_total"].add(count, client=client, budget=limit)
        self.process.add_to(own)
        yield from own.values()
        yield from self.process.library.collect()


# Two thirds of all samples are those of stages, so their histograms have only every second bound, or none.
_STAGE_BOUNDS: dict[StageSeries, int] = {"buckets": 2, "means": 0}
_SIZE_BOUNDS = (*(str(float(bound)) for bound in SIZE_BUCKETS), "+Inf")


def add_version(
    families: Mapping[str, OwnFamily],
    labels: dict[str, str],
    snapshot: VersionSnapshot,
    extent: Extent,
    now_s: float,
) -> None:
    """Add the counters of one version; `now_s` is in seconds since the epoch."""
    _add_counts(families, labels, snapshot)
    values = {  # None: shown from its first value on
        "torchere_requests_in_flight": snapshot.in_flight,
        "torchere_executor_busy_seconds_total": snapshot.busy_s,
        "torchere_executor_last_progress_timestamp_seconds": snapshot.last_batch_s or None,
        "torchere_model_load_duration_seconds": snapshot.load_s or None,
    }
    catalogue.add_values(families, values, labels)
    if snapshot.in_flight or not extent.idle_s or now_s - snapshot.used_s < extent.idle_s:
        _add_histograms(families, labels, snapshot, extent.stages)


def _add_counts(
    families: Mapping[str, OwnFamily], labels: Mapping[str, str], snapshot: VersionSnapshot
) -> None:
    for (protocol, code), count in snapshot.codes.items():
        families["torchere_requests_total"].add(count, **labels, protocol=protocol, code=code)
    for name, label, counts in (
        ("torchere_requests_rejected_total", "reason", snapshot.rejected),
        ("torchere_requests_cancelled_total", "stage", snapshot.cancelled),
        ("torchere_requests_expired_total", "stage", snapshot.expired),
        ("torchere_executor_restarts_total", "reason", snapshot.restarts),
    ):
        for kind, count in counts.items():
            families[name].add(count, **labels, **{label: kind})


def _add_histograms(
    families: Mapping[str, OwnFamily], labels: dict[str, str], snapshot: VersionSnapshot, stages: StageSeries
) -> None:
    histograms = dict(zip(COLUMNS, snapshot.histograms, strict=True))
    add_histogram(families["torchere_request_duration_seconds"], labels, histograms["total"])
    add_histogram(families["torchere_queue_duration_seconds"], labels, histograms["wait"])
    if snapshot.first_parts is not None:
        add_histogram(families["torchere_first_part_duration_seconds"], labels, snapshot.first_parts)
    by_stage = families["torchere_stage_duration_seconds"]
    for stage in STAGES if stages in _STAGE_BOUNDS else ():
        if histograms[stage].total:  # a handler reports either its three stages or only its total time
            add_histogram(by_stage, {**labels, "stage": stage}, histograms[stage], _STAGE_BOUNDS[stages])
    sizes = HistogramRow(labels, _SIZE_BOUNDS, list(accumulate(snapshot.sizes)), snapshot.requests_run)
    families["torchere_batch_size"].rows.append(sizes)


def add_load(
    families: Mapping[str, OwnFamily], labels: Mapping[str, str], load: VersionLoad, states: States
) -> None:
    """Add the load of one version. Queries the system only for the memory of worker processes."""
    values = {
        "torchere_queue_depth": load.queued,
        "torchere_queue_capacity": load.queued + load.queue_room,
        "torchere_queue_oldest_age_seconds": load.oldest_age_s,
        "torchere_batch_predicted_duration_seconds": load.predicted_s,
        "torchere_saturation": load.saturation,
        "torchere_model_weights_bytes": load.weights_bytes or None,
        "torchere_model_response_timeout_seconds": load.response_timeout_s or None,
        "torchere_model_version_weight": load.weight,
    }
    catalogue.add_values(families, values, labels)
    for state in states.version if load.state else ():
        families["torchere_model_state"].add(float(state == load.state), **labels, state=state)
    _add_executors(families, labels, load.executors, states.executor)


def _add_executors(
    families: Mapping[str, OwnFamily],
    labels: Mapping[str, str],
    executors: Sequence[ExecutorLoad],
    states: Iterable[str],
) -> None:
    for state, count in Counter(executor.state for executor in executors).items():
        families["torchere_executors"].add(count, **labels, state=state)
    for executor in executors:
        own = {**labels, "executor": str(executor.executor_id)}
        for state in states:
            families["torchere_executor_state"].add(float(state == executor.state), **own, state=state)
        if executor.pid:
            with suppress(psutil.Error):  # the process has just ended
                families["torchere_executor_resident_bytes"].add(
                    psutil.Process(executor.pid).memory_info().rss, **own
                )
