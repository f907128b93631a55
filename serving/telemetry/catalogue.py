"""Table of the server's own metric families: name, type, help text, labels and limit.

TorchServe's metric names are listed in `metrics.yaml`. Our own metrics use base units only (seconds, bytes,
ratios); counters end in `_total`. Label values come from registered versions and from the code, never from
client input, so their number is bounded.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.registry import Collector

from torchere.serving.telemetry.exposition import OwnFamily

Kind = Literal["counter", "gauge", "histogram"]


class Described(NamedTuple):
    """A row of the table: one metric family."""

    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    high: float = math.inf  # the maximum of a gauge; the minimum of all gauges is 0


OF_VERSION = ("model", "version")
FAMILIES: dict[str, Described] = {
    "torchere_requests_total": Described(
        "counter", "Finished predictions, by protocol and status code.", (*OF_VERSION, "protocol", "code")
    ),
    "torchere_request_duration_seconds": Described(
        "histogram",
        "Duration of answered predictions, from the first byte of the request to the last of the answer.",
        OF_VERSION,
    ),
    "torchere_first_part_duration_seconds": Described(
        "histogram", "Time from the head of a request to the first part of its streamed answer.", OF_VERSION
    ),
    "torchere_queue_duration_seconds": Described(
        "histogram", "Time that predictions waited for an executor.", OF_VERSION
    ),
    "torchere_stage_duration_seconds": Described(
        "histogram",
        "Duration of the stages of a prediction; their sum is its whole duration.",
        (*OF_VERSION, "stage"),
    ),
    "torchere_requests_in_flight": Described("gauge", "Admitted predictions without an answer.", OF_VERSION),
    "torchere_requests_rejected_total": Described(
        "counter", "Predictions refused before they entered the queue, by reason.", (*OF_VERSION, "reason")
    ),
    "torchere_requests_cancelled_total": Described(
        "counter",
        "Predictions whose client disconnected or read too slowly, by the stage they were in.",
        (*OF_VERSION, "stage"),
    ),
    "torchere_requests_expired_total": Described(
        "counter", "Predictions whose deadline passed, by the stage they were in.", (*OF_VERSION, "stage")
    ),
    "torchere_batch_size": Described("histogram", "Number of requests in each batch.", OF_VERSION),
    "torchere_executor_busy_seconds_total": Described(
        "counter", "Time that executors ran batches, including the current ones.", OF_VERSION
    ),
    "torchere_executor_restarts_total": Described(
        "counter", "Restarts of worker processes, by the cause of their loss.", (*OF_VERSION, "reason")
    ),
    "torchere_executor_last_progress_timestamp_seconds": Described(
        "gauge", "Time of the last finished batch.", OF_VERSION
    ),
    "torchere_model_load_duration_seconds": Described(
        "gauge", "Start-up time of the last executor, including load and warm-up.", OF_VERSION
    ),
    "torchere_queue_depth": Described("gauge", "Requests in the queue.", OF_VERSION),
    "torchere_queue_capacity": Described("gauge", "Limit on the requests in the queue.", OF_VERSION),
    "torchere_queue_oldest_age_seconds": Described(
        "gauge", "Waiting time of the oldest request in the queue; 0 if it is empty.", OF_VERSION
    ),
    "torchere_batch_predicted_duration_seconds": Described(
        "gauge", "Expected duration of a batch in an executor; 0 before the first batch.", OF_VERSION
    ),
    "torchere_saturation": Described(
        "gauge",
        "Busy share of executors plus queue or refusals, over 5 s: 1 all busy, 2 refusing.",
        OF_VERSION,
        2,
    ),
    "torchere_executors": Described("gauge", "Executors by state.", (*OF_VERSION, "state")),
    "torchere_executor_state": Described(
        "gauge",
        "1 for the current state of an executor, 0 for the others.",
        (*OF_VERSION, "executor", "state"),
        1,
    ),
    "torchere_executor_resident_bytes": Described(
        "gauge",
        "Resident memory (RSS) of a worker process, reported for its first executor.",
        (*OF_VERSION, "executor"),
    ),
    "torchere_model_state": Described(
        "gauge", "1 for the current state of a version, 0 for the others.", (*OF_VERSION, "state"), 1
    ),
    "torchere_model_response_timeout_seconds": Described(
        "gauge", "Limit on the time of a batch in an executor (response_timeout).", OF_VERSION
    ),
    "torchere_model_weights_bytes": Described(
        "gauge", "Size of the model file, which the executors of a process share.", OF_VERSION
    ),
    "torchere_model_version_weight": Described(
        "gauge", "Share of a version in the requests that name no version.", OF_VERSION
    ),
    "torchere_inflight": Described("gauge", "Admitted predictions of all models without an answer."),
    "torchere_ready": Described("gauge", "1 if the server is ready, else 0.", (), 1),
    "torchere_build_info": Described(
        "gauge", "Always 1; its labels hold the versions that run.", ("version", "torch", "python", "gil"), 1
    ),
    "torchere_certificate_expiry_timestamp_seconds": Described(
        "gauge", "Expiry of the listeners' certificate."
    ),
    "torchere_event_loop_lag_seconds": Described(
        "histogram", "Delay of the event loop's timers, sampled twice a second."
    ),
    "torchere_gc_pause_seconds_total": Described(
        "counter", "Time in Python's garbage collector; the event loop is blocked meanwhile."
    ),
    "torchere_process_threads": Described("gauge", "Threads of the server process."),
    "torchere_cgroup_cpu_limit_cores": Described("gauge", "CPU limit of the container; absent without one."),
    "torchere_cgroup_cpu_throttled_seconds_total": Described(
        "counter", "Time that the container was throttled by its CPU limit."
    ),
    "torchere_cgroup_memory_limit_bytes": Described(
        "gauge", "Memory limit of the container; absent without one."
    ),
    "torchere_cgroup_memory_bytes": Described(
        "gauge", "Memory use of the container, including the page cache."
    ),
    "torchere_held_bytes": Described("gauge", "Bytes of unfinished requests that the server holds."),
    "torchere_budget_refusals_total": Described(
        "counter", "Requests, calls and connections refused because of a limit, by budget.", ("budget",)
    ),
    "torchere_client_predictions_total": Described(
        "counter", "Predictions within the limits of their client, by identity.", ("client",)
    ),
    "torchere_client_predictions_in_flight": Described(
        "gauge", "Unanswered predictions, by identity of the client.", ("client",)
    ),
    "torchere_client_refusals_total": Described(
        "counter", "Requests refused because of a limit for each client, by identity.", ("client", "budget")
    ),
    "torchere_access_log_dropped_lines_total": Described(
        "counter", "Log lines dropped because the output was too slow or broken."
    ),
}
# prometheus_client's families about the process; its names of counter families lack the suffix `_total`.
LIBRARY_COUNTERS = {"process_cpu_seconds": "process_cpu_seconds_total"}
LIBRARY_GAUGES = (
    *("process_virtual_memory_bytes", "process_resident_memory_bytes"),
    *("process_start_time_seconds", "process_open_fds", "process_max_fds"),
)
ALL_NAMES = (*FAMILIES, *LIBRARY_COUNTERS, *LIBRARY_COUNTERS.values(), *LIBRARY_GAUGES)


def families() -> dict[str, OwnFamily]:
    """Return the metric families of the catalogue by name, without samples."""
    return {name: OwnFamily(name, row.text, row.kind) for name, row in FAMILIES.items()}


def add_values(
    families: Mapping[str, OwnFamily], values: Mapping[str, float | None], labels: Mapping[str, str]
) -> None:
    """Add a sample with these labels to each family that has a value."""
    for name, value in values.items():
        if value is not None:
            families[name].add(value, **labels)


Family = Counter | Gauge | Histogram

# The names that the classic text format allows. The library allows any UTF-8 text, which only some scrapers
# accept.
_METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
KINDS = ("counter", "gauge", "histogram")
# The default buckets of Prometheus's Java client, in the unit of the metric, as in TorchServe.
DEFAULT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)


class Families:
    """Creates metric families and stores the declared names of counters, which the library renames.

    As thread-safe as the library's registry. Each name may be declared once.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.declared: dict[str, str] = {}  # the library's name of a counter -> its declared name

    def declare(self, kind: str, name: str, unit: str, labels: Sequence[str]) -> Family:
        """Declare a family of one of `KINDS`.

        Raises:
            ValueError: the kind, the name or a label is not allowed, or the name is declared already.
        """
        check_names(kind, name, labels)
        text = help_text(kind, unit)
        if kind == "counter":
            counter = Counter(name, text, labels, registry=self.registry)
            self.declared[name.removesuffix("_total")] = name
            return counter
        if kind == "gauge":
            return Gauge(name, text, labels, registry=self.registry)
        return Histogram(name, text, labels, registry=self.registry, buckets=DEFAULT_BUCKETS)

    def remove(self, name: str, family: Family) -> None:
        """Remove a family that was declared by this name; the name may be declared anew."""
        self.registry.unregister(family)
        if isinstance(family, Counter):
            del self.declared[name.removesuffix("_total")]


class Reserved(Collector):
    """Reserves the names of metric families that other code collects."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)

    def describe(self) -> Iterable[Metric]:
        """Yield each name as a histogram, because this type also reserves the name with its suffixes."""
        for name in self._names:
            yield Metric(name, "", "histogram")

    def collect(self) -> Iterable[Metric]:
        """Return no families."""
        return ()


def check_names(kind: str, name: str, labels: Sequence[str], *, logged: bool = False) -> None:
    """Raise ValueError unless the text format allows the names and `kind` is one of `KINDS`.

    If the values are only `logged`, the names may have blanks and signs, but nothing that breaks a line.
    """
    if kind not in KINDS:
        raise ValueError(f"its type is {kind!r}, expected one of {KINDS}")
    if logged:
        wrong = [text for text in (name, *labels) if not (text and text.isprintable())]
        if wrong:
            raise ValueError(f"names must have printable characters only: {wrong}")
        return
    wrong = [label for label in labels if not _LABEL_NAME.fullmatch(label)]
    if wrong or not _METRIC_NAME.fullmatch(name):
        raise ValueError(f"Prometheus allows letters, digits and _ in names only: {wrong or name!r}")


def updater(child: Family) -> Callable[[float], None]:
    """Return a function that adds a value to a counter or to a histogram, or sets a gauge.

    For a counter it raises ValueError if the value is negative or not finite. Keep the function for further
    values, because finding the class of `child` takes longer than recording a value.
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
