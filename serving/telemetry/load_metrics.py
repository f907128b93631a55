"""The load of each version, sampled at each scrape, for autoscalers and dashboards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import psutil

from torchere.serving.telemetry import catalogue
from torchere.serving.telemetry.exposition import OwnFamily


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
