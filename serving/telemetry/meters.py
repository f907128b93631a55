"""The meters of all versions, and TorchServe's counters that follow from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from prometheus_client import Metric

from torchere.serving.telemetry.families import help_text
from torchere.serving.telemetry.metrics_config import DeclaredMetric
from torchere.serving.telemetry.server_metrics import ServerMetrics
from torchere.serving.telemetry.version_meter import HostNumbers, MeterSnapshot, Tally, VersionMeter

DEFAULT_VERSION = "default"  # label of requests that named no version
REQUESTS = "ts_inference_requests_total"
LATENCY = "ts_inference_latency_microseconds"
QUEUE_LATENCY = "ts_queue_latency_microseconds"
QUEUE_TIME = "QueueTime"
THREAD_TIME = "WorkerThreadTime"
ANSWERS = {2: "Requests2XX", 4: "Requests4XX", 5: "Requests5XX"}  # first digit of the status -> metric
# TorchServe's metrics that are kept as plain numbers, with the type they must be declared with.
PLAIN = {
    **dict.fromkeys(ANSWERS.values(), "counter"),
    **dict.fromkeys((REQUESTS, LATENCY, QUEUE_LATENCY), "counter"),
    **dict.fromkeys((QUEUE_TIME, THREAD_TIME), "gauge"),
}


# What TorchServe's plain metrics show at one moment: name -> label values without the host's, and number.
PlainNumbers: TypeAlias = Mapping[str, list[tuple[tuple[str, ...], float]]]


class Meters:
    """Makes and forgets meters. Call it on the event loop only.

    Of TorchServe's metrics it shows those that `server` calls plain; the others get their updates one by one.
    """

    def __init__(self, hostname: str, server: ServerMetrics) -> None:
        self._hostname = hostname
        self._server = server
        self._one_by_one = frozenset(name for name in PLAIN if server.takes(name))
        self._host = HostNumbers()
        self._by_default: dict[str, Tally] = {}
        self._meters: dict[tuple[str, str], VersionMeter] = {}  # of those that are shown

    def new(self, model: str, version: str) -> VersionMeter:
        """A meter for a version; it is not shown yet."""
        by_default = self._by_default.get(model) or Tally()
        meter = VersionMeter(model, version, by_default, self._host)
        if REQUESTS in self._one_by_one:
            meter.on_accept = self._count_accepted
        if self._one_by_one & {LATENCY, QUEUE_LATENCY, QUEUE_TIME}:
            meter.on_answer = self._count_answered
        return meter

    def show(self, meter: VersionMeter) -> None:
        """Show a meter from now on."""
        meter.by_default = self._by_default.setdefault(meter.model, meter.by_default)
        self._meters[meter.model, meter.version] = meter

    def request_finished(self, status: int) -> None:
        """A REST answer went out; what is neither 2xx nor 4xx counts as 5xx (contract)."""
        digit = status // 100
        if digit not in ANSWERS:
            digit = 5
        self._host.answers[digit] += 1
        if ANSWERS[digit] in self._one_by_one:
            self._server.bind(ANSWERS[digit], "Host")(1)

    def batch_finished(self, meter: VersionMeter, size: int, executor_s: float, handler_s: float) -> None:
        """See `VersionMeter.batch_finished`."""
        meter.batch_finished(size, executor_s, handler_s)
        if THREAD_TIME in self._one_by_one:
            self._server.bind(THREAD_TIME, "Host")(self._host.thread_ms)

    def forget(self, meter: VersionMeter, *, was_last: bool) -> bool:
        """Drop the numbers of a version, with the last one those of the model.

        Returns:
            False when it was never shown, or another one of that name is by now; nothing is dropped then.
        """
        model, labels = meter.model, [meter.version]
        if self._meters.get((model, meter.version)) is not meter:
            return False
        del self._meters[model, meter.version]
        if was_last:
            self._by_default.pop(model, None)
            labels.append(DEFAULT_VERSION)
        for name in self._one_by_one & {REQUESTS, LATENCY, QUEUE_LATENCY}:
            for label in labels:
                self._server.drop(name, model, label)
        return True

    def report_last_predictions(self) -> None:
        """Bring `PredictionTime` up to date where only its last value matters."""
        for meter in self._meters.values():
            if meter.prediction_time is not None and meter.prediction_time.only_last:
                meter.prediction_time.record(round(meter.last_handler_s * 1000, 2), tuple)

    def snapshots(self) -> dict[tuple[str, str], MeterSnapshot]:
        """The numbers of each model and version as they are now."""
        return {key: meter.snapshot() for key, meter in self._meters.items()}

    def plain_numbers(self) -> PlainNumbers:
        """The numbers of TorchServe's plain metrics as they are now."""
        host = self._host
        samples: dict[str, list[tuple[tuple[str, ...], float]]] = {
            name: [(("Host",), host.answers[digit])] for digit, name in ANSWERS.items()
        }
        samples[QUEUE_TIME] = [(("Host",), host.queue_ms)]
        samples[THREAD_TIME] = [(("Host",), host.thread_ms)]
        tallies = [((model, DEFAULT_VERSION), tally) for model, tally in self._by_default.items()]
        tallies += [(key, meter.by_name) for key, meter in self._meters.items()]
        used = [(labels, tally) for labels, tally in tallies if tally.requests]
        samples[REQUESTS] = [(labels, tally.requests) for labels, tally in used]
        samples[LATENCY] = [(labels, tally.total_s * 1e6) for labels, tally in used]
        samples[QUEUE_LATENCY] = [(labels, tally.queue_s * 1e6) for labels, tally in used]
        return samples

    def plain_families(self, numbers: PlainNumbers) -> Iterable[Metric]:
        """The families of the plain metrics, under the labels they are declared with. Thread-safe."""
        for metric in self._server.plain.values():
            family = Metric(metric.name, help_text(metric.kind, metric.unit), metric.kind)
            for values, number in numbers[metric.name]:
                family.add_sample(metric.name, self._labels(metric, values), number)
            yield family

    def _labels(self, metric: DeclaredMetric, values: tuple[str, ...]) -> dict[str, str]:
        return dict(zip(metric.labels, (*values, self._hostname), strict=True))

    def _count_accepted(self, meter: VersionMeter, named: bool) -> None:
        self._server.bind(REQUESTS, meter.model, meter.version if named else DEFAULT_VERSION)(1)

    def _count_answered(self, meter: VersionMeter, named: bool, total_s: float, queue_s: float) -> None:
        if self._meters.get((meter.model, meter.version)) is not meter:
            return  # it was forgotten meanwhile, and its labels must not come back
        labels = (meter.model, meter.version if named else DEFAULT_VERSION)
        self._server.bind(LATENCY, *labels)(total_s * 1e6)
        self._server.bind(QUEUE_LATENCY, *labels)(queue_s * 1e6)
        self._server.bind(QUEUE_TIME, "Host")(int(queue_s * 1000))
