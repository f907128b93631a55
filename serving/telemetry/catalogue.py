"""Table of the server's own metric families: name, type and help text.

TorchServe's are in `metrics.yaml`. Base units only (seconds, bytes, ratios); counters end in `_total`. Label
values come from registered versions and from the code, never from client input, so their number is bounded.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.registry import Collector

Kind = Literal["counter", "gauge", "histogram"]

REQUESTS = "torchere_requests_total"
REQUEST_DURATION = "torchere_request_duration_seconds"
QUEUE_DURATION = "torchere_queue_duration_seconds"
STAGE_DURATION = "torchere_stage_duration_seconds"
IN_FLIGHT = "torchere_requests_in_flight"
REJECTED = "torchere_requests_rejected_total"
CANCELLED = "torchere_requests_cancelled_total"
EXPIRED = "torchere_requests_expired_total"
BATCH_SIZE = "torchere_batch_size"
BUSY_SECONDS = "torchere_executor_busy_seconds_total"
RESTARTS = "torchere_executor_restarts_total"
LAST_PROGRESS = "torchere_executor_last_progress_timestamp_seconds"
LOAD_DURATION = "torchere_model_load_duration_seconds"
QUEUE_DEPTH = "torchere_queue_depth"
QUEUE_CAPACITY = "torchere_queue_capacity"
OLDEST_AGE = "torchere_queue_oldest_age_seconds"
PREDICTED = "torchere_batch_predicted_duration_seconds"
SATURATION = "torchere_saturation"
EXECUTORS = "torchere_executors"
EXECUTOR_STATE = "torchere_executor_state"
EXECUTOR_MEMORY = "torchere_executor_resident_bytes"
MODEL_STATE = "torchere_model_state"
MODEL_TIMEOUT = "torchere_model_response_timeout_seconds"
MODEL_WEIGHTS = "torchere_model_weights_bytes"
VERSION_WEIGHT = "torchere_model_version_weight"
SERVER_IN_FLIGHT = "torchere_inflight"
READY = "torchere_ready"
BUILD_INFO = "torchere_build_info"
CERTIFICATE_EXPIRY = "torchere_certificate_expiry_timestamp_seconds"
LOOP_LAG = "torchere_event_loop_lag_seconds"
GC_PAUSE = "torchere_gc_pause_seconds_total"
THREADS = "torchere_process_threads"
CGROUP_CPU_LIMIT = "torchere_cgroup_cpu_limit_cores"
CGROUP_THROTTLED = "torchere_cgroup_cpu_throttled_seconds_total"
CGROUP_MEMORY_LIMIT = "torchere_cgroup_memory_limit_bytes"
CGROUP_MEMORY = "torchere_cgroup_memory_bytes"
HELD = "torchere_held_bytes"
BUDGET_REFUSED = "torchere_budget_refusals_total"
LOG_DROPPED = "torchere_access_log_dropped_lines_total"

FAMILIES: dict[str, tuple[Kind, str]] = {
    REQUESTS: ("counter", "Predictions that are over, by protocol and the code they ended with."),
    REQUEST_DURATION: ("histogram", "A prediction with a handler's answer, from its head to the last byte."),
    QUEUE_DURATION: ("histogram", "The part of a prediction before an executor took it."),
    STAGE_DURATION: ("histogram", "The parts of a prediction; together they are the request's duration."),
    IN_FLIGHT: ("gauge", "Predictions that were admitted and have no answer yet."),
    REJECTED: ("counter", "Predictions that were turned away before they waited, by reason."),
    CANCELLED: ("counter", "Predictions whose client went away or read too slowly, by where they were then."),
    EXPIRED: ("counter", "Predictions whose deadline passed, by where they were then."),
    BATCH_SIZE: ("histogram", "Requests of each batch."),
    BUSY_SECONDS: ("counter", "Time that executors had a batch, those that run now included."),
    RESTARTS: ("counter", "Executors that were lost and come back, by what ended them."),
    LAST_PROGRESS: ("gauge", "When a batch came back last."),
    LOAD_DURATION: ("gauge", "How long the last executor took from its start until it was loaded and warm."),
    QUEUE_DEPTH: ("gauge", "Requests that wait."),
    QUEUE_CAPACITY: ("gauge", "Requests that may wait, those that do included."),
    OLDEST_AGE: ("gauge", "How long the oldest waiting request has waited; 0 when none does."),
    PREDICTED: ("gauge", "How long the batcher expects a batch to be in an executor; 0 before the first."),
    SATURATION: (
        "gauge",
        "Busy share of executors plus queue or refusals, over 5 s: 1 all busy, 2 refusing.",
    ),
    EXECUTORS: ("gauge", "Executors by state."),
    EXECUTOR_STATE: ("gauge", "1 for the state an executor is in, 0 for the others."),
    EXECUTOR_MEMORY: ("gauge", "Memory of a worker process (RSS), at the first of its executors."),
    MODEL_STATE: ("gauge", "1 for the state a version is in, 0 for the others."),
    MODEL_TIMEOUT: ("gauge", "How long a batch may be in an executor: response_timeout."),
    MODEL_WEIGHTS: ("gauge", "Size of the model file, which the executors of a process share."),
    VERSION_WEIGHT: ("gauge", "Share of the requests without a version that a version gets."),
    SERVER_IN_FLIGHT: ("gauge", "Predictions of all models that were admitted and have no answer yet."),
    READY: ("gauge", "1 when the server is ready, 0 when not."),
    BUILD_INFO: ("gauge", "Always 1; its labels say what runs."),
    CERTIFICATE_EXPIRY: ("gauge", "When the certificate of the listeners expires."),
    LOOP_LAG: ("histogram", "How late the event loop was for a timer, sampled twice a second."),
    GC_PAUSE: ("counter", "Time in Python's garbage collector, during which nothing else runs."),
    THREADS: ("gauge", "Threads of the server process."),
    CGROUP_CPU_LIMIT: ("gauge", "CPU limit of the container; absent without one."),
    CGROUP_THROTTLED: ("counter", "Time the container was kept from running by its CPU limit."),
    CGROUP_MEMORY_LIMIT: ("gauge", "Memory limit of the container; absent without one."),
    CGROUP_MEMORY: ("gauge", "Memory of the container, page cache included."),
    HELD: ("gauge", "Bytes of unfinished requests that the server holds."),
    BUDGET_REFUSED: ("counter", "Requests that were refused because too many bytes are held, by budget."),
    LOG_DROPPED: ("counter", "Lines of the log that were lost because its output did not keep up."),
}
# prometheus_client's families about the process; it names the counters' families without the suffix.
LIBRARY_COUNTERS = {"process_cpu_seconds": "process_cpu_seconds_total"}
LIBRARY_GAUGES = (
    *("process_virtual_memory_bytes", "process_resident_memory_bytes"),
    *("process_start_time_seconds", "process_open_fds", "process_max_fds"),
)
ALL_NAMES = (*FAMILIES, *LIBRARY_COUNTERS.values(), *LIBRARY_GAUGES)


def family(name: str) -> Metric:
    """Return a family of the table, without samples."""
    kind, text = FAMILIES[name]
    return Metric(name, text, kind)


def families(names: Iterable[str]) -> dict[str, Metric]:
    """Return several families of the table by name, without samples."""
    return {name: family(name) for name in names}


Family = Counter | Gauge | Histogram

# Names of the classic text format; the library allows any UTF-8, which scrapers read only on request.
_METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
KINDS = ("counter", "gauge", "histogram")
# The Java client's default buckets, in the unit of the metric (contract: metrics).
DEFAULT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)


class Families:
    """Makes families and remembers the declared names of counters, which the library renames.

    Thread-safe as far as the registry is; declare a name once.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.declared: dict[str, str] = {}  # the library's name of a counter -> the name it was declared with

    def declare(self, kind: str, name: str, unit: str, labels: Sequence[str]) -> Family:
        """Declare a family of one of `KINDS`; raises as `counter` and `check_names` do."""
        check_names(kind, name, labels)
        if kind == "counter":
            return self.counter(name, unit, labels)
        if kind == "gauge":
            return self.gauge(name, unit, labels)
        return self.histogram(name, unit, labels)

    def counter(self, name: str, unit: str, labels: Sequence[str]) -> Counter:
        """Declare a counter.

        Raises:
            ValueError: the name or a label is not allowed, or the name is taken.
        """
        counter = Counter(name, help_text("counter", unit), labels, registry=self.registry)
        self.declared[name.removesuffix("_total")] = name
        return counter

    def gauge(self, name: str, unit: str, labels: Sequence[str]) -> Gauge:
        """Declare a gauge; raises as `counter` does."""
        return Gauge(name, help_text("gauge", unit), labels, registry=self.registry)

    def histogram(
        self, name: str, unit: str, labels: Sequence[str], buckets: Sequence[float] = DEFAULT_BUCKETS
    ) -> Histogram:
        """Declare a histogram; raises as `counter` does."""
        return Histogram(name, help_text("histogram", unit), labels, registry=self.registry, buckets=buckets)


class Reserved(Collector):
    """Reserves names of families that are collected elsewhere."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)

    def describe(self) -> Iterable[Metric]:
        """Yield each name as a histogram, a type that reserves the names with its suffixes, too."""
        for name in self._names:
            yield Metric(name, "", "histogram")

    def collect(self) -> Iterable[Metric]:
        """Return no families."""
        return ()


def check_names(kind: str, name: str, labels: Sequence[str]) -> None:
    """Raise ValueError unless the text format allows the names and `kind` is one of `KINDS`."""
    if kind not in KINDS:
        raise ValueError(f"its type is {kind!r}, expected one of {KINDS}")
    wrong = [label for label in labels if not _LABEL_NAME.fullmatch(label)]
    if wrong or not _METRIC_NAME.fullmatch(name):
        raise ValueError(f"Prometheus allows letters, digits and _ in names only: {wrong or name!r}")


def updater(child: Family) -> Callable[[float], None]:
    """Return a labelled child's `inc`, `set` or `observe`.

    A counter's function raises ValueError for a negative or non-finite value, which would spoil the counter.
    """
    if isinstance(child, Counter):
        return functools.partial(_add, child)
    return child.set if isinstance(child, Gauge) else child.observe


def _add(counter: Counter, value: float) -> None:
    if not math.isfinite(value):
        raise ValueError(f"a counter can't grow by {value}")
    counter.inc(value)


def help_text(kind: str, unit: str) -> str:
    """Return the HELP text that TorchServe gives a metric."""
    return f"Torchserve prometheus {kind} metric with unit: {unit}"
