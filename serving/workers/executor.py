"""The interface of executors: a batch in, one outcome per request out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any, TypeAlias, TypeVar

import msgspec

from torchere.handlers.metric_types import MetricDeclaration, MetricSample
from torchere.serving.errors import ServingError
from torchere.serving.types import InferResponse

Executor = TypeVar("Executor")


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The outcome of a request whose handler has more to say: `part` is a part of its answer.

    It is to be run again, on the same executor, with the same id and no parameters (continuous batching).
    """

    part: InferResponse


Outcome: TypeAlias = InferResponse | Unfinished | ServingError


class ExecutorState(Enum):
    """Where one executor is in its life."""

    STARTING = "starting"
    READY = "ready"
    SUSPECT = "suspect"  # loaded, and owes a sign of life: it gets no batch until it gives one
    RESTARTING = "restarting"  # lost, waiting for its back-off
    FAILED = "failed"  # gave up: it kept dying for longer than max_retry_timeout_s
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ExecutorStatus:
    """What the outside may know of one executor; a snapshot."""

    executor_id: int
    state: ExecutorState
    started_at: datetime  # UTC
    pid: int
    memory_bytes: int = 0
    gpu_id: int | None = None
    last_failure: str = ""  # cause of the last loss or failed start, "" when there was none
    last_failure_at: datetime | None = None  # UTC
    losses: int = 0  # how often it was lost, failed restarts included
    started_s: float = field(default_factory=time.monotonic)  # as `started_at`, for what is measured


def age_s(status: ExecutorStatus) -> float:
    """Seconds since an executor was (last) started."""
    return time.monotonic() - status.started_s


def those_that_stay(executors: Sequence[Executor], count: int, in_service: Sequence[bool]) -> list[Executor]:
    """The `count` of them that are kept, in their order: first go those not in service, then the youngest."""
    places = sorted(range(len(executors)), key=lambda place: not in_service[place])[:count]
    return [executors[place] for place in sorted(places)]


class BatchReport(msgspec.Struct, frozen=True):
    """What running one batch gave: `outcomes[i]` answers `requests[i]`."""

    outcomes: Sequence[Outcome]
    handler_s: float = 0.0  # wall time in the handler
    metrics: tuple[MetricSample, ...] = ()  # what the handler reported through `context.metrics`
    # Parts of handler_s: preprocess, inference and postprocess, as far as the handler tells.
    stages_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    began_s: float = 0.0  # monotonic, when an executor took it; 0: none did, or it did not say

    @property
    def all_stages_s(self) -> tuple[float, float, float, float]:
        """The three stages, and the rest of the handler's time."""
        preprocess, inference, postprocess = self.stages_s
        rest = self.handler_s - preprocess - inference - postprocess
        return preprocess, inference, postprocess, rest if rest > 0 else 0.0


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """All that is needed to load one instance, here or in another process; plain data only.

    `archive_dir` is the unpacked archive; `serialized` values come from its manifest and model config.
    """

    model_name: str
    model_version: str
    archive_dir: str
    handler: str
    manifest: dict[str, Any] = field(default_factory=dict)
    model_config: dict[str, Any] = field(default_factory=dict)
    envelope: str | None = None
    batch_size: int = 1
    decode_input: bool = True
    limit_max_image_pixels: bool = True
    intra_op_threads: int = 1
    gpu_ids: tuple[int, ...] = ()  # executors take them in turn; empty: CPU
    max_response_bytes: int = 6_553_500
    declared_metrics: tuple[MetricDeclaration, ...] = ()  # what `context.metrics.get_metric` knows at once
    handler_installed: bool = False  # `handler` is the operator's own choice: it may name an installed module
    pinned: bool = False  # batches are sent to an executor by its id (state lives in the handler)
    shares_weights: bool = False  # executors are lanes of one process, over one copy of the weights


FreeCallback: TypeAlias = Callable[[], None]  # an executor came free, or there will never be one again
LoadedCallback: TypeAlias = Callable[[int, float], None]  # executor id, seconds from its start to ready
LostCallback: TypeAlias = Callable[[str], None]  # what ended an executor: a value of `LossKind`
