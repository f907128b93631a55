"""The load of each version, sampled at each scrape, for autoscalers and dashboards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import psutil
from prometheus_client import Metric

from torchere.serving.telemetry import catalogue as names
from torchere.serving.telemetry.exposition import OwnFamily
from torchere.serving.telemetry.numbers import VersionNumbers
from torchere.serving.telemetry.saturation import SaturationWindow

FAMILIES = (
    *(names.QUEUE_DEPTH, names.QUEUE_CAPACITY, names.OLDEST_AGE, names.PREDICTED, names.SATURATION),
    *(names.EXECUTORS, names.EXECUTOR_STATE, names.EXECUTOR_MEMORY, names.MODEL_STATE),
    names.MODEL_TIMEOUT,
    *(names.MODEL_WEIGHTS, names.VERSION_WEIGHT),
)


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


class LoadMetrics:
    """Samples the load of each version. Call it on the event loop only."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._loads: dict[tuple[str, str], Callable[[], VersionLoad]] = {}
        self._windows: dict[tuple[str, str], SaturationWindow] = {}

    def watch(self, version: VersionNumbers, load: Callable[[], VersionLoad]) -> None:
        """Call `load` at each scrape, and `version.load` at each tick for the saturation."""
        key = version.model, version.version
        window = SaturationWindow(version.busy, version.load, version.requests)
        window.tick(self._now())
        self._loads[key], self._windows[key] = load, window

    def forget(self, model: str, version: str) -> None:
        """Stop watching a version; an unknown version is no error."""
        self._loads.pop((model, version), None)
        self._windows.pop((model, version), None)

    def tick(self) -> None:
        """Sample every version; call it every `TICK_S`."""
        now_s = self._now()
        for window in self._windows.values():
            window.tick(now_s)

    def executors_of(self, model: str, version: str) -> frozenset[int] | None:
        """Return the ids of the executors that a version should have; None if the version is not watched."""
        load = self._loads.get((model, version))
        return None if load is None else executors_of(load())

    def ask(self, model: str, version: str) -> VersionLoad | None:
        """Return the current load of a version; None if it is not watched."""
        load = self._loads.get((model, version))
        if load is None:
            return None
        return replace(load(), saturation=self._windows[model, version].value(self._now()))


def executors_of(load: VersionLoad) -> frozenset[int]:
    """Return the ids of the executors that the version should have."""
    return frozenset(executor.executor_id for executor in load.executors)


def load_families(
    loads: Mapping[tuple[str, str], VersionLoad],
    executor_states: Iterable[str],
    version_states: Iterable[str],
) -> Iterable[Metric]:
    """Return the families of `FAMILIES`. Queries the system only for the memory of worker processes.

    Args:
        loads: by model and version.
        executor_states: all states that an executor can be in.
        version_states: all values of `VersionLoad.state`.
    """
    families = names.families(FAMILIES)
    for (model, version), load in loads.items():
        labels = {"model": model, "version": version}
        _add_queue(families, labels, load)
        _add_executors(families, labels, load, executor_states)
        for state in version_states if load.state else ():
            families[names.MODEL_STATE].add_sample(
                names.MODEL_STATE, {**labels, "state": state}, float(state == load.state)
            )
        for name, value in (
            (names.MODEL_WEIGHTS, load.weights_bytes),
            (names.MODEL_TIMEOUT, load.response_timeout_s),
        ):
            if value:
                families[name].add_sample(name, labels, value)
        families[names.VERSION_WEIGHT].add_sample(names.VERSION_WEIGHT, labels, load.weight)
    return families.values()


def _add_queue(families: dict[str, OwnFamily], labels: dict[str, str], load: VersionLoad) -> None:
    values = {
        names.QUEUE_DEPTH: load.queued,
        names.QUEUE_CAPACITY: load.queued + load.queue_room,
        names.OLDEST_AGE: load.oldest_age_s,
        names.PREDICTED: load.predicted_s,
        names.SATURATION: load.saturation,
    }
    for name, value in values.items():
        families[name].add_sample(name, labels, value)


def _add_executors(
    families: dict[str, OwnFamily], labels: dict[str, str], load: VersionLoad, states: Iterable[str]
) -> None:
    for state, count in Counter(executor.state for executor in load.executors).items():
        families[names.EXECUTORS].add_sample(names.EXECUTORS, {**labels, "state": state}, count)
    for executor in load.executors:
        own = {**labels, "executor": str(executor.executor_id)}
        for state in states:
            families[names.EXECUTOR_STATE].add_sample(
                names.EXECUTOR_STATE, {**own, "state": state}, float(state == executor.state)
            )
        if executor.pid:
            _add_memory(families[names.EXECUTOR_MEMORY], own, executor.pid)


def _add_memory(family: Metric, labels: dict[str, str], pid: int) -> None:
    try:
        family.add_sample(family.name, labels, psutil.Process(pid).memory_info().rss)
    except psutil.Error:  # the process has just ended
        return
