"""Request and batch counters: each event is counted once, and all metrics formats read them.

Three events change the counters of a version: a request is accepted, a request has ended, a batch has
finished. The reason of a refusal is a pure function of its error. Three modules render the same counters: as
our own metric families (`scrape.py`), as TorchServe's (`torchserve.py`), and as the statistics of the Open
Inference Protocol (`frontend/open_inference/metadata.py`).

All code here runs on the event loop, so there is no lock.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple, Protocol

import numpy as np

from torchere.serving.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    OverBudget,
    Quarantined,
    QueueFull,
    Restarting,
    ServingError,
    TooManyRequests,
    Unauthorized,
    Unavailable,
)
from torchere.serving.telemetry.distributions import Distributions, Histogram
from torchere.serving.telemetry.saturation import BusyTime, LoadSample
from torchere.serving.telemetry.stages import COLUMNS, MARKS, Marks, row_of, rows_of

WAITING_STAGES = ("queue", "executor")  # the stage of a prediction that ended without a response
UNREAD = "unread"  # a streamed response that was cancelled because its client read too slowly
SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
QUEUE_FULL = "queue_full"  # the rejection reason that more executors would have avoided
TOO_LARGE = "too_large"  # the rejection reason of a body that is too large
_TOO_LARGE_CODES = ("body_too_long", "inflates_too_far")  # of error classes that belong to the frontend
# The first matching class counts, so subclasses come before their base classes.
_REASONS: tuple[tuple[type[ServingError], str], ...] = (
    (QueueFull, "queue_full"),
    (TooManyRequests, "client_limit"),
    (OverBudget, "budget"),
    (Restarting, "restarting"),
    (Unavailable, "not_ready"),
    (DeadlineExceeded, "deadline"),
    (Unauthorized, "auth"),
    (NotFound, "not_found"),
    (Quarantined, "quarantined"),
    (InvalidRequest, "invalid"),
)
# Every version starts with a counter for each of these reasons.
USUAL_REASONS = ("queue_full", "not_ready", "deadline")
# The number of answered requests whose times are buffered and counted together. A lower number makes each
# request more expensive; a higher one needs more than 26 KB per version and blocks the event loop for longer.
FOLD_ROWS = 256
# HTTP statuses with their own label value. A handler may return any status; others are counted by class.
_OWN_LABEL = frozenset({200, 201, 202, 204, 206, 304, *range(400, 430), 431, 451, 499, *range(500, 512)})

_write_marks = Struct(f"{len(MARKS)}d").pack_into
_ROW_BYTES = 8 * len(MARKS)
_FULL_BYTES = FOLD_ROWS * _ROW_BYTES
_NAMED = MARKS.index("named")


def refusal_reason(error: ServingError) -> str:
    """Return the value of the label `reason`; for an error that is not a rejection, its code."""
    if error.code in _TOO_LARGE_CODES:
        return TOO_LARGE
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), error.code)


class Operation(NamedTuple):
    """The name and the attributes of a request's span, by OpenTelemetry's conventions for HTTP or RPC."""

    name: str
    attributes: Mapping[str, str | int]


class Predicted(Marks, Protocol):
    """The parts of a prediction that telemetry reads; `batching/request.py` implements it."""

    request_id: str
    meter: VersionNumbers | None  # None: no version was found
    counted: bool  # whether its end has been counted
    error: ServingError | None  # that was sent to its client

    @property
    def open(self) -> bool:
        """Whether its answer is incomplete, so that further batches may contain it."""

    def operation(self) -> Operation:
        """Return the name and the attributes of its span."""


@dataclass(slots=True)
class Tally:
    """Sums over the requests with the same version label in TorchServe's metrics: a version, or `default`."""

    requests: int = 0
    total_s: float = 0.0
    queue_s: float = 0.0


@dataclass(slots=True)
class BatchSize:
    """Sums over all batches of the same size."""

    runs: int = 0  # batches with this many requests
    batches: int = 0  # batches in which this many requests ended
    handler_s: float = 0.0  # handler time of `batches`
    around_s: float = 0.0  # executor time of `batches` outside the handler


class Listener:
    """Receives every event immediately: for log lines, spans, and metrics of a type that was reconfigured."""

    def accepted(self, version: VersionNumbers, named: bool) -> None:
        """Handle a prediction that arrived; `named`: the client named the version."""

    def answered(self, version: VersionNumbers, named: bool, total_s: float, wait_s: float) -> None:
        """Record a finished prediction that the handler answered."""

    def batch_finished(
        self,
        version: VersionNumbers,
        executor_s: float,
        handler_s: float,
        requests: Sequence[Predicted],
        succeeded: bool,
    ) -> None:
        """Handle a finished batch; `succeeded`: at least one of its requests did not fail."""


class VersionSnapshot(NamedTuple):
    """A copy of the counters of a version, for renderers in other threads."""

    codes: Mapping[tuple[str, str], int]  # by protocol and status label
    histograms: list[Histogram]  # by `COLUMNS`
    first_parts: Histogram | None  # times to the first part of streamed answers; None: there was none
    rejected: Mapping[str, int]  # by reason
    cancelled: Mapping[str, int]  # by stage
    expired: Mapping[str, int]  # by stage
    restarts: Mapping[str, int]  # by reason
    sizes: list[int]  # batches by `SIZE_BUCKETS`; the last entry counts larger ones
    requests_run: int
    busy_s: float
    in_flight: int
    last_batch_s: float  # seconds since the epoch; 0: never
    used_s: float  # since the epoch: the last batch, or else the start of counting
    load_s: float  # 0: not loaded yet


class VersionNumbers:
    """The counters of one version; `listeners` receive each event, and `now` returns monotonic seconds."""

    __slots__ = (
        *("_codes", "_durations", "_first_parts", "_marks", "_marks_end", "_now", "_server"),
        *("around_s", "began_s", "busy", "by_size", "cancelled", "expired", "failed_s", "handler_s"),
        "in_flight",
        *("last_batch_s", "last_handler_s", "listeners", "load", "load_s", "model", "named", "offered"),
        *("queue_s", "rejected", "requests_failed", "requests_succeeded", "restarts", "succeeded_s"),
        *("unnamed", "version"),
    )

    def __init__(
        self,
        model: str,
        version: str,
        *,
        server: ServerNumbers | None = None,
        listeners: Sequence[Listener] = (),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.version = version
        self.named = Tally()
        self.unnamed = Tally()  # `show` replaces it with the tally that all versions of the model share
        self.listeners = tuple(listeners)
        self._server = server or ServerNumbers()
        self._now = now
        self.began_s = time.time()
        # Counters of requests.
        self.offered = 0
        self.in_flight = 0
        # These start at 0, so that a scraper sees the first event as an increase.
        self.rejected: Counter[str] = Counter(dict.fromkeys(USUAL_REASONS, 0))
        self.cancelled: Counter[str] = Counter(dict.fromkeys((*WAITING_STAGES, UNREAD), 0))
        self.expired: Counter[str] = Counter(dict.fromkeys(WAITING_STAGES, 0))
        self._codes: dict[str | int, int] = {}
        self._durations = Distributions(len(COLUMNS))
        self._first_parts: Distributions | None = None  # made with the first streamed answer
        self._marks = bytearray()  # space for `FOLD_ROWS` requests; allocated by the first
        self._marks_end = 0
        # Counters of batches. A request counts once, regardless of its number of rows.
        self.requests_succeeded = 0
        self.succeeded_s = 0.0  # from admission to answer
        self.requests_failed = 0
        self.failed_s = 0.0
        self.queue_s = 0.0  # waiting times of the requests that were run
        self.handler_s = 0.0  # of successful requests, each with the time of its whole batch
        self.around_s = 0.0  # likewise: executor time outside the handler
        self.by_size: defaultdict[int, BatchSize] = defaultdict(BatchSize)
        self.last_batch_s = 0.0  # since the epoch; 0: no batch has finished yet
        self.last_handler_s: float | None = None  # of the last successful batch; None: none yet
        # Counters of executors.
        self.busy = BusyTime()
        self.restarts: Counter[str] = Counter()
        self.load_s = 0.0
        self.load: Callable[[], LoadSample] = LoadSample

    def accepted(self, named: bool) -> None:
        """Count a prediction that arrived, before it is admitted or rejected."""
        self.offered += 1
        (self.named if named else self.unnamed).requests += 1
        for listener in self.listeners:
            listener.accepted(self, named)

    def refused(self, error: ServingError) -> None:
        """Count a prediction that was not admitted."""
        self.rejected[refusal_reason(error)] += 1

    def failed(self, error: ServingError, request: Marks | None) -> None:
        """Count an error of an admitted prediction; `request` is None if it was not queued yet."""
        stage = WAITING_STAGES[request is not None and bool(request.dequeued_s)]
        if isinstance(error, Cancelled):
            self.cancelled[stage] += 1
        elif isinstance(error, DeadlineExceeded):
            self.expired[stage] += 1
        elif isinstance(error, (QueueFull, Restarting)):
            self.rejected[refusal_reason(error)] += 1

    def finished(self, request: Marks, code: str | int, now_s: float) -> None:
        """Count a finished prediction; `code` is the HTTP status or the name of the gRPC status code."""
        codes = self._codes
        codes[code] = codes.get(code, 0) + 1
        if not request.answered_s:
            return
        at = self._marks_end
        if at == len(self._marks):
            at = self._room()
        wait_s = request.dequeued_s - request.enqueued_s
        _write_marks(
            self._marks,
            at,
            request.started_s,
            request.read_s,
            request.enqueued_s,
            request.dequeued_s,
            request.company_s,
            *request.stages_s,
            request.answered_s,
            request.sending_s,
            now_s,
            request.named,
        )
        self._marks_end = at + _ROW_BYTES
        self._server.last_wait_s = wait_s
        trace = request.trace
        exemplar = {"trace_id": trace.trace_id} if trace is not None and trace.sampled else None
        if request.streamed:
            self._add_first_part((request.sending_s or request.answered_s) - request.started_s, exemplar)
        if exemplar is not None:
            self._durations.note(row_of(request, now_s), exemplar, time.time())
        for listener in self.listeners:
            listener.answered(self, request.named, now_s - request.started_s, wait_s)

    def _add_first_part(self, duration_s: float, exemplar: dict[str, str] | None) -> None:
        if self._first_parts is None:
            self._first_parts = Distributions(1)
        self._first_parts.add((duration_s,))
        if exemplar is not None:
            self._first_parts.note((duration_s,), exemplar, time.time())

    def batches_running(self, batches: int, now_s: float) -> None:
        """Set the number of dispatched batches without an answer; call it whenever the number changes."""
        if not self.busy.executors:
            self.busy.scaled(self.load().executors, now_s)
        self.busy.changed(batches, now_s)

    def batch_finished(
        self,
        *,
        size: int,
        succeeded: int,
        failed: int,
        succeeded_wait_s: float,
        failed_wait_s: float,
        executor_s: float,
        handler_s: float,
        requests: Sequence[Predicted] = (),
    ) -> None:
        """Count a batch of `size` requests; pass `requests` to the listeners.

        A request that continues in the next batch is neither in `succeeded` nor in `failed`. The waiting
        times are sums over the succeeded and the failed requests, from admission to the start of the batch.
        `executor_s` is the duration of the batch, and `handler_s` the part of it in the handler.
        """
        around_s = executor_s - handler_s
        if around_s < 0:
            around_s = 0.0
        ended = succeeded + failed
        self.requests_succeeded += succeeded
        self.succeeded_s += succeeded_wait_s + succeeded * executor_s
        self.handler_s += succeeded * handler_s
        self.around_s += succeeded * around_s
        if failed:
            self.requests_failed += failed
            self.failed_s += failed_wait_s + failed * executor_s
        self.queue_s += succeeded_wait_s + failed_wait_s
        of_size = self.by_size[size]
        of_size.runs += 1
        if ended:
            if ended != size:
                of_size = self.by_size[ended]
            of_size.batches += 1
            of_size.handler_s += handler_s
            of_size.around_s += around_s
        self.last_batch_s = time.time()
        self._server.last_around_s = around_s
        if failed < size:
            self.last_handler_s = handler_s
        for listener in self.listeners:
            listener.batch_finished(self, executor_s, handler_s, requests, failed < size)

    @property
    def key(self) -> tuple[str, str]:
        """The names of the model and of the version."""
        return self.model, self.version

    @property
    def batches(self) -> int:
        """The number of batches that were run."""
        return sum(of_size.runs for of_size in self.by_size.values())

    def requests(self) -> tuple[int, int]:
        """Return the number of predictions rejected as `QUEUE_FULL`, and the number of all that arrived."""
        return self.rejected[QUEUE_FULL], self.offered

    def snapshot(self) -> VersionSnapshot:
        """Return a snapshot of the counters."""
        self.fold()
        return VersionSnapshot(
            codes=_by_label(self._codes),
            histograms=self._durations.histograms(),
            first_parts=None if self._first_parts is None else self._first_parts.histograms()[0],
            rejected=dict(self.rejected),
            cancelled=dict(self.cancelled),
            expired=dict(self.expired),
            restarts=dict(self.restarts),
            sizes=_in_buckets(self.by_size),
            requests_run=sum(size * of_size.runs for size, of_size in self.by_size.items()),
            busy_s=self.busy.total_s(self._now()),
            in_flight=self.in_flight,
            last_batch_s=self.last_batch_s,
            used_s=self.last_batch_s or self.began_s,
            load_s=self.load_s,
        )

    def fold(self) -> None:
        """Add the buffered times of answered requests to the histograms and the tallies."""
        if not self._marks_end:
            return
        marks = np.frombuffer(self._marks, count=self._marks_end // 8).reshape(-1, len(MARKS))
        rows = rows_of(marks)
        self._durations.add_rows(rows)
        named = marks[:, _NAMED]
        for tally, chosen in ((self.named, named), (self.unnamed, 1.0 - named)):
            total_s, wait_s = (chosen @ rows[:, :2]).tolist()
            tally.total_s += total_s
            tally.queue_s += wait_s
        self._marks_end = 0

    def _room(self) -> int:
        """Reserve space for the marks of one request; return its offset in bytes."""
        if self._marks:
            self.fold()
        else:
            self._marks = bytearray(_FULL_BYTES)
        return 0


class ServerNumbers:
    """The counters of the server and of every exposed version."""

    def __init__(self) -> None:
        self.answers = {2: 0, 4: 0, 5: 0}  # REST responses by the first digit of the status
        self.last_wait_s = 0.0  # of the last answered prediction
        self.last_around_s = 0.0  # of the last batch: executor time outside the handler
        self.refused: Counter[str] = Counter()  # rejections before the model was known, by reason
        self.unnamed: dict[str, Tally] = {}  # by model
        self.versions: dict[tuple[str, str], VersionNumbers] = {}  # the exposed versions

    def show(self, version: VersionNumbers) -> None:
        """Expose the counters of a version from now on."""
        version.unnamed = self.unnamed.setdefault(version.model, version.unnamed)
        self.versions[version.key] = version

    def shows(self, version: VersionNumbers) -> bool:
        """Return whether these counters are exposed: after `show`, until they are removed or replaced."""
        return self.versions.get(version.key) is version

    def forget(self, version: VersionNumbers, *, was_last: bool) -> bool:
        """Remove a version's counters (with the last, its model's, too); return whether they were exposed."""
        version.fold()
        if not self.shows(version):
            return False
        del self.versions[version.key]
        if was_last:
            self.unnamed.pop(version.model, None)
        return True

    def rest_answered(self, status: int) -> int:
        """Count a REST response; return its class: 2, 4, or 5 for every other status, as in TorchServe."""
        digit = status // 100
        if digit not in self.answers:
            digit = 5
        self.answers[digit] += 1
        return digit


def _in_buckets(by_size: Mapping[int, BatchSize]) -> list[int]:
    counts = [0] * (len(SIZE_BUCKETS) + 1)
    for size, of_size in by_size.items():
        counts[bisect_left(SIZE_BUCKETS, size)] += of_size.runs
    return counts


def _by_label(codes: Mapping[str | int, int]) -> dict[tuple[str, str], int]:
    """Return the counts by protocol and code label; REST codes are numbers, gRPC codes are names."""
    labelled: Counter[tuple[str, str]] = Counter()
    for protocol, kind in (("rest", int), ("grpc", str)):
        for code, count in codes.items():
            if isinstance(code, kind):
                labelled[protocol, code_label(code)] += count
    return labelled


def code_label(code: str | int) -> str:
    """Return the label of an HTTP status or of a gRPC code's name.

    >>> code_label(503), code_label(777), code_label("OK")
    ('503', '7xx', 'OK')
    """
    return f"{code // 100}xx" if isinstance(code, int) and code not in _OWN_LABEL else str(code)
