"""The interface of executors: a batch in, one outcome per request out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import msgspec

from torchere.handlers.metrics import MetricDeclaration, MetricSample
from torchere.serving.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    LoadFailed,
    NoRoom,
    ServingError,
)
from torchere.serving.types import InferResponse
from torchere.serving.workers.sandbox import Sandbox

_MOST_S = 1e9  # 30 years: above this a reported time is implausible


class Unfinished(msgspec.Struct, frozen=True, array_like=True, tag=22):  # tags: see `messages.py`
    """The outcome of a request whose answer is not complete: `part` is its next part.

    The request must run again on the same executor, with the same id and no parameters (continuous batching).
    """

    part: InferResponse


Outcome: TypeAlias = InferResponse | Unfinished | ServingError
# Outcomes of requests that an executor skipped or gave up.
NOT_RUN = (Cancelled, DeadlineExceeded, InvalidRequest, NoRoom)


class ExecutorState(Enum):
    """The lifecycle state of an executor."""

    STARTING = "starting"
    READY = "ready"
    SUSPECT = "suspect"  # loaded, but missed a heartbeat: gets no batch until it answers
    RESTARTING = "restarting"  # lost; waits for its back-off, or loads again
    FAILED = "failed"  # not restarted any more: it kept failing for longer than max_retry_timeout_s
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ExecutorStatus:
    """A snapshot of the public status of one executor."""

    executor_id: int
    state: ExecutorState
    started_at: datetime  # UTC
    pid: int
    memory_bytes: int = 0
    gpu_id: int | None = None
    last_failure: str = ""  # cause of the last loss or failed start, "" if there was none
    last_failure_at: datetime | None = None  # UTC
    losses: int = 0  # how often it was lost, failed restarts included
    started_s: float = field(default_factory=time.monotonic)  # as `started_at`, monotonic, for durations


class Outage(NamedTuple):
    """A time in which no executor is in service, because each was lost; both times are monotonic seconds."""

    since_s: float  # when the last executor left service
    restart_s: float  # when the next process starts, or started


class BatchReport(msgspec.Struct, frozen=True):
    """The report of one batch: `outcomes[i]` answers `requests[i]`."""

    outcomes: Sequence[Outcome]
    handler_s: float = 0.0  # wall time in the handler
    metrics: tuple[MetricSample, ...] = ()  # samples that the handler reported through `context.metrics`
    # Parts of handler_s: preprocess, inference and postprocess, as far as the handler reports them.
    stages_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    began_s: float = 0.0  # monotonic, when an executor began the batch; 0: none did, or unknown

    @property
    def all_stages_s(self) -> tuple[float, float, float, float]:
        """Seconds of preprocess, inference and postprocess, and the rest of `handler_s`."""
        preprocess, inference, postprocess = self.stages_s
        rest = self.handler_s - preprocess - inference - postprocess
        return preprocess, inference, postprocess, rest if rest > 0 else 0.0

    def plausible(self) -> BatchReport:
        """Return the report; without its times if any of them is impossible.

        The worker may be hostile: a NaN would break the function that counts the batch.
        """
        times = (self.handler_s, *self.stages_s, self.began_s)
        if all(0 <= each_s < _MOST_S for each_s in times) and self.began_s <= time.monotonic():
            return self
        return BatchReport(self.outcomes, metrics=self.metrics)


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the machines of a rank group meet, and how many there are (`machines.py`); plain data only."""

    host: str  # where the leader listens
    port: int
    least: int  # machines, the leader included
    most: int
    join_s: float  # how long the leader waits for the least number
    last_call_s: float  # how long it then waits for further machines
    run_id: str = ""  # `TORCHELASTIC_RUN_ID`; "": made from the model's name
    secret: bytes = field(default=b"", repr=False)
    archive: str = ""  # the archive's file name in the model store of each machine
    url: str = ""  # the URL or name that the model was registered with
    fingerprint: str = ""  # `StoredArchive.fingerprint`
    is_patient: bool = False  # a first load is tried again until the machines have come


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """The parameters for loading one handler instance, here or in another process; plain data only.

    `archive_dir` is the folder of the unpacked archive.
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
    declared_metrics: tuple[MetricDeclaration, ...] = ()  # initially known to `context.metrics.get_metric`
    runtime: str = "python"
    handler_installed: bool = False  # the operator chose `handler`: it may be an installed module
    pinned: bool = False  # batches are sent to an executor by its id (state lives in the handler)
    shares_weights: bool = False  # executors are lanes of one process, over one copy of the weights
    at_once: int = 1  # runs inside an executor at the same time, each of one request (`asyncCommunication`)
    sandbox: Sandbox | None = None  # to be entered before the load; None: none, or it is entered already
    ranks: int = 1  # processes of a worker on each of its machines (`ranks.py`)
    devices: int = 1  # GPUs of a worker
    parallel_type: str = ""  # with "pp" only rank 0 gets the requests
    rendezvous: Rendezvous | None = None  # None: the ranks are on this machine only
    max_restarts: int | None = None  # in a row, after losses that were the worker's fault; None: no limit

    @property
    def is_group(self) -> bool:
        """Whether a worker is several processes, which run one batch at a time."""
        return self.ranks > 1 or self.rendezvous is not None

    @property
    def most_requests(self) -> int:
        """The largest number of requests in a run: sequences and continuous batching may double the batch."""
        return 2 * self.batch_size

    def failed(self, detail: str, out_of_memory: bool = False) -> LoadFailed:
        """Return the error for a load that failed; `detail` has the cause."""
        return LoadFailed.of(self.model_name, self.model_version, detail, out_of_memory)
