"""The numbers of one version that requests and batches change: plain ones, made families when asked for."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from torchere.serving.errors import Cancelled, DeadlineExceeded, ServingError
from torchere.serving.telemetry.distributions import Distributions, Histogram
from torchere.serving.telemetry.refusals import USUAL, refusal_reason
from torchere.serving.telemetry.timeline import COLUMNS, row_of

if TYPE_CHECKING:
    from torchere.serving.telemetry.handler_metrics import BoundReport
    from torchere.serving.telemetry.timeline import Timeline, Waited

STAGES = ("queue", "executor")  # where a prediction was when it ended ill
UNREAD = "unread"  # it was a streamed answer, and given up because it was read too slowly
SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# HTTP codes with a label of their own. A handler may choose any number; others are counted by their class.
_OWN_LABEL = frozenset({200, 201, 202, 204, 206, 304, *range(400, 430), 431, 451, 499, *range(500, 512)})


class Tally:
    """TorchServe's counters for one label of a version: its name, or `default` when the client gave none."""

    __slots__ = ("queue_s", "requests", "total_s")

    def __init__(self) -> None:
        self.requests = 0
        self.total_s = 0.0
        self.queue_s = 0.0


class HostNumbers:
    """What TorchServe's metrics without a model say, over all versions."""

    __slots__ = ("answers", "queue_ms", "thread_ms")

    def __init__(self) -> None:
        self.answers = {2: 0, 4: 0, 5: 0}  # REST answers by the first digit of their status
        self.queue_ms = 0  # of the last answered prediction
        self.thread_ms = 0  # of the last batch


class MeterSnapshot(NamedTuple):
    """The numbers of a version at one moment."""

    codes: Mapping[tuple[str, str], int]  # by transport and code
    histograms: list[Histogram]  # by `COLUMNS`
    rejected: Mapping[str, int]  # by reason
    cancelled: Mapping[str, int]  # by stage
    expired: Mapping[str, int]  # by stage
    restarts: Mapping[str, int]  # by reason
    sizes: list[int]  # batches by `SIZE_BUCKETS`, the last for what is larger than all
    requests_run: int
    busy_s: float
    in_flight: int
    last_progress_s: float  # seconds since the epoch; 0: never
    load_s: float  # 0: not loaded yet


class VersionMeter:
    """Counts what happens to one version. Call it on the event loop only: there is no lock.

    Args:
        model: its model.
        version: its version.
        by_default: shared by all versions of the model, for requests that name no version.
        host: shared by all.
    """

    __slots__ = (
        *("_busy_s", "_codes", "_durations", "_host", "_last_progress_s", "_requests_run", "_sizes"),
        *("by_default", "by_name", "cancelled", "expired", "in_flight", "last_handler_s", "load_s", "model"),
        *("on_accept", "on_answer", "prediction_time", "rejected", "restarts", "version"),
    )

    def __init__(self, model: str, version: str, by_default: Tally, host: HostNumbers) -> None:
        self.model = model
        self.version = version
        self.by_default = by_default
        self.by_name = Tally()
        self.in_flight = 0
        self.load_s = 0.0
        # From 0 on, so that the first one is an increase.
        self.rejected: Counter[str] = Counter(dict.fromkeys(USUAL, 0))
        self.cancelled: Counter[str] = Counter(dict.fromkeys((*STAGES, UNREAD), 0))
        self.expired: Counter[str] = Counter(dict.fromkeys(STAGES, 0))
        self.restarts: Counter[str] = Counter()
        # For metrics that a configuration wants to see updated one by one; None: it wants none.
        self.on_accept: Callable[[VersionMeter, bool], None] | None = None
        self.on_answer: Callable[[VersionMeter, bool, float, float], None] | None = None
        self.prediction_time: BoundReport | None = None  # None: no handler has succeeded yet
        self.last_handler_s = 0.0
        self._host = host
        self._codes: dict[str, dict[str | int, int]] = {"rest": {}, "grpc": {}}
        self._durations = Distributions(len(COLUMNS))
        self._sizes = [0] * (len(SIZE_BUCKETS) + 1)
        self._requests_run = 0
        self._busy_s = 0.0
        self._last_progress_s = 0.0  # since the epoch; 0: no batch has come back yet

    def accepted(self, named: bool) -> None:
        """A prediction for it came in; whether it will be admitted is not said yet."""
        (self.by_name if named else self.by_default).requests += 1
        if self.on_accept is not None:
            self.on_accept(self, named)

    def finished(self, timeline: Timeline, code: str | int, now_s: float) -> None:
        """A prediction is over, well or ill; `code` is what its client was told."""
        codes = self._codes[timeline.transport]
        codes[code] = codes.get(code, 0) + 1
        if timeline.waited is not None:
            self._answered(timeline, timeline.waited, now_s)

    def _answered(self, timeline: Timeline, waited: Waited, now_s: float) -> None:
        row = row_of(timeline, waited, now_s)
        self._durations.add(row)
        total_s, queue_s = row[0], row[1]
        tally = self.by_name if timeline.named else self.by_default
        tally.total_s += total_s
        tally.queue_s += queue_s
        self._host.queue_ms = int(queue_s * 1000)
        if timeline.trace is not None and timeline.trace.sampled:
            self._durations.note(row, {"trace_id": timeline.trace.trace_id}, time.time())
        if self.on_answer is not None:
            self.on_answer(self, timeline.named, total_s, queue_s)

    def refused(self, error: ServingError) -> None:
        """A prediction was turned away at the door."""
        self.rejected[refusal_reason(error)] += 1

    def failed(self, error: ServingError, waited: Waited | None) -> None:
        """A prediction that was admitted got an error for an answer; `waited` None: before it could wait."""
        stage = STAGES[waited is not None and bool(waited.dequeued_s)]
        if isinstance(error, Cancelled):
            self.cancelled[stage] += 1
        elif isinstance(error, DeadlineExceeded):
            self.expired[stage] += 1

    def batch_finished(self, size: int, executor_s: float, handler_s: float) -> None:
        """A batch of `size` requests came back after `executor_s`, of which its handler ran `handler_s`."""
        self._sizes[bisect_left(SIZE_BUCKETS, size)] += 1
        self._requests_run += size
        self._busy_s += executor_s
        self._last_progress_s = time.time()
        self._host.thread_ms = max(0, int((executor_s - handler_s) * 1000))

    def snapshot(self) -> MeterSnapshot:
        """The numbers as they are now."""
        return MeterSnapshot(
            codes=_by_label(self._codes),
            histograms=self._durations.histograms(),
            rejected=dict(self.rejected),
            cancelled=dict(self.cancelled),
            expired=dict(self.expired),
            restarts=dict(self.restarts),
            sizes=list(self._sizes),
            requests_run=self._requests_run,
            busy_s=self._busy_s,
            in_flight=self.in_flight,
            last_progress_s=self._last_progress_s,
            load_s=self.load_s,
        )


def _by_label(codes: Mapping[str, Mapping[str | int, int]]) -> dict[tuple[str, str], int]:
    """Counts by transport and label of the code; codes with the same label are added up."""
    labelled: Counter[tuple[str, str]] = Counter()
    for transport, counts in codes.items():
        for code, count in counts.items():
            labelled[transport, code_label(code)] += count
    return labelled


def code_label(code: str | int) -> str:
    """The label of an HTTP status or of a gRPC code's name.

    >>> code_label(503), code_label(777), code_label("OK")
    ('503', '7xx', 'OK')
    """
    return f"{code // 100}xx" if isinstance(code, int) and code not in _OWN_LABEL else str(code)
