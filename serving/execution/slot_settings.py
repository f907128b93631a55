"""What all slots of one pool have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchere.serving.execution.executor import FreeCallback, LoadedCallback, LoadSpec, LostCallback
from torchere.serving.execution.heartbeat import HeartbeatSettings
from torchere.serving.execution.launch import Launcher
from torchere.serving.execution.oom import OomWatch


@dataclass(frozen=True, slots=True)
class SlotSettings:
    """What to load, how long it may take, and whom to tell."""

    spec: LoadSpec
    response_timeout_s: float
    startup_timeout_s: float
    max_retry_timeout_s: float
    launcher: Launcher
    on_free: FreeCallback
    on_loaded: LoadedCallback
    now: Callable[[], float]
    oom: OomWatch
    heartbeat: HeartbeatSettings
    on_lost: LostCallback
    depth: int | None  # batches inside a worker at most; None: as `send_ahead.py` says
