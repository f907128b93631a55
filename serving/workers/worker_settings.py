"""The settings that the workers of one pool share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torchere.serving.workers.executor import (
    FreeCallback,
    LoadedCallback,
    LoadSpec,
    LostCallback,
    MetricsCallback,
)
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
    on_free: FreeCallback
    on_loaded: LoadedCallback
    on_lost: LostCallback = lambda reason: None
    on_metrics: MetricsCallback = lambda samples: None
    now: Callable[[], float] = time.monotonic
    oom: OomWatch = field(default_factory=OomWatch)
    heartbeat: HeartbeatSettings = field(default_factory=HeartbeatSettings)
    threads: Callable[[], int] = int  # intra-op threads of each lane now; 0: those of the load
    hangs_as_deaths: bool = False  # a run whose lane hangs is answered as TorchServe does: the worker died
    sends_ahead: bool = True  # False: all waiting requests must be counted, so none waits inside a worker
