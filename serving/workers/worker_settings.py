"""The settings that the workers of one pool share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchere.handlers.metrics import MetricSample
from torchere.serving.workers.executor import LoadSpec
from torchere.serving.workers.heartbeat import HeartbeatSettings
from torchere.serving.workers.launch import Launcher
from torchere.serving.workers.oom import OomWatch


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The settings that the workers of one pool share: load parameters, time-outs and callbacks."""

    spec: LoadSpec
    response_timeout_s: float
    startup_timeout_s: float
    max_retry_timeout_s: float
    launcher: Launcher
    on_free: Callable[[], None]  # an executor became free, or all have failed for good
    on_loaded: Callable[[int, float], None]  # executor id, seconds from its start to ready
    on_lost: Callable[[str], None] = lambda reason: None  # gets the cause: a value of `LossKind`
    # Gets values that handlers reported outside of a batch, or printed as TorchServe's do.
    on_metrics: Callable[[Sequence[MetricSample]], None] = lambda samples: None
    now: Callable[[], float] = time.monotonic
    oom: OomWatch = field(default_factory=OomWatch)
    heartbeat: HeartbeatSettings = field(default_factory=HeartbeatSettings)
    threads: Callable[[], int] = int  # intra-op threads of each lane now; 0: those of the load
    hangs_as_deaths: bool = False  # a run whose lane hangs is answered as TorchServe does: the worker died
    sends_ahead: bool = True  # False: all waiting requests must be counted, so none waits inside a worker
