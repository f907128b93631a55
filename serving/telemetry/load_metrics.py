"""How loaded each version is, asked for at each exposition: what autoscalers and dashboards look at."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client import Metric
from prometheus_client.registry import Collector

from torchere.serving.telemetry.families import help_text

QUEUE_DEPTH = "torchere_queue_depth"
SATURATION = "torchere_saturation"
EXECUTORS = "torchere_executors"
# name, unit
_GAUGES = ((QUEUE_DEPTH, "Count"), (SATURATION, "Ratio"), (EXECUTORS, "Count"))


@dataclass(frozen=True, slots=True)
class VersionLoad:
    """One version at one moment."""

    queued: int = 0  # requests that wait
    queue_room: int = 0  # how many more may wait
    in_service: int = 0  # executors that are ready, busy or not
    busy: int = 0  # those of them that have something to do
    executors: Mapping[str, int] = field(default_factory=dict)  # state -> how many executors

    @property
    def saturation(self) -> float:
        """Share of the executors that are busy, plus how full the queue is: 0 idle, 1 all busy, 2 refusing.

        While executors are wanted and none is in service, they count as busy.
        """
        busy_share = self.busy / self.in_service if self.in_service else float(bool(self.executors))
        places = self.queued + self.queue_room
        return busy_share + (self.queued / places if places else 0.0)


class LoadMetrics(Collector):
    """The load families of one server. Thread-safe as far as the callables it is given are."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _loads
        self._loads: dict[tuple[str, str], Callable[[], VersionLoad]] = {}

    def watch(self, model: str, version: str, load: Callable[[], VersionLoad]) -> None:
        """Ask `load` at each exposition."""
        with self._lock:
            self._loads[model, version] = load

    def forget(self, model: str, version: str) -> None:
        """Ask no longer; without an error for an unknown version."""
        with self._lock:
            self._loads.pop((model, version), None)

    def describe(self) -> Iterable[Metric]:
        """The families without samples: how the registry learns that their names are taken."""
        return _families().values()

    def collect(self) -> Iterable[Metric]:
        """Ask, and make the families, for the registry."""
        families = _families()
        with self._lock:
            loads = list(self._loads.items())
        for (model, version), ask in loads:
            load = ask()
            labels = {"model": model, "version": version}
            families[QUEUE_DEPTH].add_sample(QUEUE_DEPTH, labels, load.queued)
            families[SATURATION].add_sample(SATURATION, labels, load.saturation)
            for state, count in load.executors.items():
                families[EXECUTORS].add_sample(EXECUTORS, {**labels, "state": state}, count)
        return families.values()


def _families() -> dict[str, Metric]:
    return {name: Metric(name, help_text("gauge", unit), "gauge") for name, unit in _GAUGES}
