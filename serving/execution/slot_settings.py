"""What the places for the worker processes of one pool have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torchere.serving.execution.executor import FreeCallback, LoadedCallback, LoadSpec, LostCallback
from torchere.serving.execution.heartbeat import HeartbeatSettings
from torchere.serving.execution.launch import Launcher
from torchere.serving.execution.oom import OomWatch


@dataclass(frozen=True, slots=True)
class SlotSettings:
    """What all slots of a pool have in common."""

    spec: LoadSpec
    response_timeout_s: float
    startup_timeout_s: float
    max_retry_timeout_s: float
    launcher: Launcher
    on_free: FreeCallback
    on_loaded: LoadedCallback
    now: Callable[[], float]
    oom: OomWatch
    heartbeat: HeartbeatSettings = field(default_factory=HeartbeatSettings)
    on_lost: LostCallback = lambda reason: None
    depth: int | None = None  # batches inside a worker at most; None: as `send_ahead.py` says
