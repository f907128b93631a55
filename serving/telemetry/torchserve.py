"""TorchServe's metrics of requests and batches: the numbers under its names, or each update by itself.

By default they are rendered from the numbers at a scrape (`families`). Where a configuration declares one
with another type, or `metrics_mode` asks for a log line for each update, `Updates` hands them on one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

from prometheus_client import Metric

from torchere.serving.telemetry.families import help_text
from torchere.serving.telemetry.metrics_config import DeclaredMetric
from torchere.serving.telemetry.numbers import Listener, ServerNumbers, Tally, VersionNumbers
from torchere.serving.telemetry.server_metrics import ServerMetrics

DEFAULT_VERSION = "default"  # label of requests that named no version
REQUESTS = "ts_inference_requests_total"
LATENCY = "ts_inference_latency_microseconds"
QUEUE_LATENCY = "ts_queue_latency_microseconds"
QUEUE_TIME = "QueueTime"
THREAD_TIME = "WorkerThreadTime"
ANSWERS = {2: "Requests2XX", 4: "Requests4XX", 5: "Requests5XX"}  # first digit of the status -> metric
# The metrics that can be rendered from numbers, with the type they must be declared with.
PLAIN = {
    **dict.fromkeys(ANSWERS.values(), "counter"),
    **dict.fromkeys((REQUESTS, LATENCY, QUEUE_LATENCY), "counter"),
    **dict.fromkeys((QUEUE_TIME, THREAD_TIME), "gauge"),
}

# Name -> label values without the host's, and number.
Samples: TypeAlias = Mapping[str, list[tuple[tuple[str, ...], float]]]


def samples_of(numbers: ServerNumbers) -> Samples:
    """Return the samples of `PLAIN` as they are now."""
    samples: dict[str, list[tuple[tuple[str, ...], float]]] = {
        name: [(("Host",), numbers.answers[digit])] for digit, name in ANSWERS.items()
    }
    samples[QUEUE_TIME] = [(("Host",), int(numbers.last_wait_s * 1000))]
    samples[THREAD_TIME] = [(("Host",), int(numbers.last_around_s * 1000))]
    for version in numbers.versions.values():
        version.fold()
    tallies: list[tuple[tuple[str, ...], Tally]] = []
    tallies += [((model, DEFAULT_VERSION), tally) for model, tally in numbers.unnamed.items()]
    tallies += [(key, version.named) for key, version in numbers.versions.items()]
    used = [(labels, tally) for labels, tally in tallies if tally.requests]
    samples[REQUESTS] = [(labels, tally.requests) for labels, tally in used]
    samples[LATENCY] = [(labels, tally.total_s * 1e6) for labels, tally in used]
    samples[QUEUE_LATENCY] = [(labels, tally.queue_s * 1e6) for labels, tally in used]
    return samples


def families(declared: Iterable[DeclaredMetric], samples: Samples, hostname: str) -> Iterable[Metric]:
    """Render samples under the labels that their metrics are declared with. Pure."""
    for metric in declared:
        family = Metric(metric.name, help_text(metric.kind, metric.unit), metric.kind)
        for values, number in samples[metric.name]:
            family.add_sample(metric.name, dict(zip(metric.labels, (*values, hostname), strict=True)), number)
        yield family


class Updates(Listener):
    """Hands on each update of the metrics that `server` does not render from the numbers."""

    def __init__(self, numbers: ServerNumbers, server: ServerMetrics) -> None:
        self._numbers = numbers
        self._server = server
        self.names = frozenset(name for name in PLAIN if server.takes(name))

    def rest_answered(self, digit: int) -> None:
        """A REST answer went out; it counts under this digit."""
        if ANSWERS[digit] in self.names:
            self._server.bind(ANSWERS[digit], "Host")(1)

    def accepted(self, version: VersionNumbers, named: bool) -> None:
        """See `Listener`."""
        self._server.bind(REQUESTS, *_labels(version, named))(1)

    def answered(self, version: VersionNumbers, named: bool, total_s: float, wait_s: float) -> None:
        """See `Listener`."""
        if not self._numbers.shows(version):
            return  # it was forgotten meanwhile, and its labels must not come back
        labels = _labels(version, named)
        self._server.bind(LATENCY, *labels)(total_s * 1e6)
        self._server.bind(QUEUE_LATENCY, *labels)(wait_s * 1e6)
        self._server.bind(QUEUE_TIME, "Host")(int(wait_s * 1000))

    def batch_finished(
        self,
        version: VersionNumbers,
        executor_s: float,
        handler_s: float,
        request_ids: Sequence[str],
        succeeded: bool,
    ) -> None:
        """See `Listener`."""
        self._server.bind(THREAD_TIME, "Host")(max(0, int((executor_s - handler_s) * 1000)))

    def forget(self, model: str, versions: Collection[str]) -> None:
        """Drop the series of these version labels of a model."""
        for name in self.names & {REQUESTS, LATENCY, QUEUE_LATENCY}:
            for version in versions:
                self._server.drop(name, model, version)


def _labels(version: VersionNumbers, named: bool) -> tuple[str, str]:
    return version.model, version.version if named else DEFAULT_VERSION
