"""Every metric of the server, by the events that change it.

TorchServe's families keep its names, units and labels, so that dashboards and alerts built for it go on
working; what it could not say (distributions, load, readiness, causes) stands under `torchere_`, in
`catalogue.py`.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from torchere.handlers.metric_types import MetricDeclaration
from torchere.serving.errors import ServingError
from torchere.serving.settings import MetricsMode
from torchere.serving.telemetry import catalogue
from torchere.serving.telemetry.exposure import Exposure, States
from torchere.serving.telemetry.families import Families, Reserved
from torchere.serving.telemetry.handler_metrics import HandlerMetrics, HandlerSample
from torchere.serving.telemetry.load_metrics import LoadMetrics, VersionLoad, executors_of
from torchere.serving.telemetry.meters import PLAIN, Meters
from torchere.serving.telemetry.metrics_config import MetricsConfig, built_in_config
from torchere.serving.telemetry.process_metrics import ProcessMetrics
from torchere.serving.telemetry.refusals import TOO_LARGE, refusal_reason
from torchere.serving.telemetry.server_metrics import ServerMetrics
from torchere.serving.telemetry.statistics import StatisticsTable
from torchere.serving.telemetry.system_metrics import SystemMetrics
from torchere.serving.telemetry.timeline import Timeline, Tracing, Transport
from torchere.serving.telemetry.trace_context import TraceContext
from torchere.serving.telemetry.version_meter import VersionMeter


class Metrics:
    """All metrics of one server, on a registry of its own.

    Call it on the event loop, except for `exposition` of an `Exposure`, `handler_metrics` and `system`, which
    may be used from any thread. A model and version become labels by `show`, so show what is registered only:
    names that clients make up must never become labels. `forget` takes them away.

    Args:
        hostname: label of most metrics; None: this machine's.
        mode: what is shown and what is logged (see `server_metrics.is_logged`).
        config: which of TorchServe's metrics there are; None: all.
        auto_detect: whether metrics of handlers that `config` does not declare are recorded.
        tracing: makes spans; None: nobody does.
    """

    def __init__(
        self,
        hostname: str | None = None,
        *,
        mode: MetricsMode = "prometheus",
        config: MetricsConfig | None = None,
        auto_detect: bool = False,
        tracing: Tracing | None = None,
    ) -> None:
        host = hostname or socket.gethostname()
        config = built_in_config() if config is None else config
        # What handlers find by `context.metrics.get_metric`; the host's label is not theirs to give.
        self.declared = tuple(
            MetricDeclaration(metric.name, metric.unit, metric.labels[:-1], metric.kind)
            for metric in config.model.values()
        )
        self.tracing = tracing
        self._families = families = Families()
        self._server = server = ServerMetrics(config.server, families, host, mode, PLAIN)
        self.system = SystemMetrics(server)
        self._meters = Meters(host, server)
        families.registry.register(Reserved((*server.plain, *catalogue.ALL_NAMES)))
        self.process = ProcessMetrics()
        self._of_handlers = HandlerMetrics(config.model, families, host, mode, auto_detect=auto_detect)
        self._load = LoadMetrics()
        self.statistics = StatisticsTable()
        self._states = States()
        self._refused: Counter[str] = Counter()
        self._server_values: dict[str, Callable[[], float]] = dict.fromkeys(
            (catalogue.READY, catalogue.SERVER_IN_FLIGHT, catalogue.LOG_DROPPED), float
        )
        self._executors: dict[tuple[str, str], dict[int, str]] = {}  # by version: id -> label

    def timeline(
        self, transport: Transport, request_id: str, started_s: float, trace: TraceContext | None = None
    ) -> Timeline:
        """The timeline of a prediction that came in at `started_s`; `trace` is what its client said."""
        timeline = Timeline(transport, request_id, started_s, trace, self.tracing)
        if self.tracing is not None:
            self.tracing.begin(timeline)
        return timeline

    def meter(self, model: str, version: str) -> VersionMeter:
        """What counts the events of a version; `show` it when it is registered. Its statistics begin anew."""
        self.statistics.forget(model, version)  # those of one that was unregistered, and has requests still
        return self._meters.new(model, version)

    def show(self, meter: VersionMeter, load: Callable[[], VersionLoad] | None = None) -> None:
        """Show the numbers of a version from now on; `load` is asked at each exposition how loaded it is."""
        self._meters.show(meter)
        if load is not None:
            self._load.watch(meter.model, meter.version, load)

    def request_finished(self, status: int, *, is_probe: bool = False) -> None:
        """A REST answer went out, on any port; what is neither 2xx nor 4xx counts as 5xx (contract).

        A probe that says "not ready" is no error of the server: nobody counts it.
        """
        if not is_probe or status < 400:
            self._meters.request_finished(status)

    def refused(self, error: ServingError) -> None:
        """A request was turned away before it was known which model it is for."""
        self._refused[refusal_reason(error)] += 1

    def refused_body(self) -> None:
        """A request was turned away because its body is too large."""
        self._refused[TOO_LARGE] += 1

    def batch_finished(
        self,
        meter: VersionMeter,
        *,
        size: int,
        executor_s: float,
        handler_s: float,
        succeeded_ids: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        """A batch of `size` requests came back after `executor_s`, of which its handler ran `handler_s`.

        `succeeded_ids` gives the ids of its requests; None when the handler failed.
        """
        self._meters.batch_finished(meter, size, executor_s, handler_s)
        if succeeded_ids is None:
            return
        meter.last_handler_s = handler_s
        report = meter.prediction_time
        if report is not None and report.only_last:
            return  # the next scrape shows it
        if report is None:
            labels = (("ModelName", meter.model), ("Level", "Model"))
            report = self._of_handlers.bound("PredictionTime", "Milliseconds", labels)
            meter.prediction_time = report
        report.record(round(handler_s * 1000, 2), succeeded_ids)

    def handler_metrics(self, samples: Iterable[HandlerSample]) -> None:
        """What a handler reported through `context.metrics`, in one batch."""
        self._of_handlers.record(samples)

    def executor_loaded(self, meter: VersionMeter, executor_id: int, load_s: float) -> None:
        """An executor of a version is up, `load_s` after it was started."""
        name = f"W-{executor_id}-{meter.model}_{meter.version}"
        known = self._load.executors_of(meter.model, meter.version)
        if known is not None:
            self._forget_stopped((meter.model, meter.version), known)
        self._executors.setdefault((meter.model, meter.version), {})[executor_id] = name
        self._server.bind("WorkerLoadTime", name, "Host")(int(load_s * 1000))
        meter.load_s = load_s
        if self.tracing is not None:
            self.tracing.load(meter.model, meter.version, executor_id, load_s)

    def watch_server(
        self, ready: Callable[[], bool], inflight: Callable[[], int], dropped_lines: Callable[[], int]
    ) -> None:
        """Ask at each exposition what no event tells.

        Args:
            ready: whether the server is.
            inflight: how many predictions are in it.
            dropped_lines: how many lines the log lost.
        """
        self._server_values = {
            catalogue.READY: ready,
            catalogue.SERVER_IN_FLIGHT: inflight,
            catalogue.LOG_DROPPED: dropped_lines,
        }

    def know_states(self, states: States) -> None:
        """Which states executors and versions can be in."""
        self._states = states

    def forget(self, meter: VersionMeter, *, was_last: bool) -> None:
        """A version is gone: drop its series, and with the last version those of the whole model.

        Call it after the last answer of the version.
        """
        model, version = meter.model, meter.version
        if not self._meters.forget(meter, was_last=was_last):
            return
        self._load.forget(model, version)
        self.statistics.forget(model, version)
        self._forget_stopped((model, version), ())
        self._executors.pop((model, version), None)
        if was_last:
            self._of_handlers.forget(model)

    def _forget_stopped(self, version: tuple[str, str], running: Collection[int]) -> None:
        """Drop the series of a version's executors but for those that are running."""
        names = self._executors.get(version, {})
        for executor_id in [known for known in names if known not in running]:
            self._server.drop("WorkerLoadTime", names.pop(executor_id), "Host")

    def expose(self) -> Exposure:
        """All metrics as they are now; the result may be made into text in another thread."""
        self._meters.report_last_predictions()
        loads = self._load.ask()
        for version, load in loads.items():
            self._forget_stopped(version, executors_of(load))
        numbers = self._meters.plain_numbers()
        return Exposure(
            self._families,
            plain=lambda: self._meters.plain_families(numbers),
            meters=self._meters.snapshots(),
            loads=loads,
            states=self._states,
            refused=dict(self._refused),
            server={name: float(value()) for name, value in self._server_values.items()},
            process=self.process,
        )

    def exposition(self, names: Collection[str] = ()) -> str:
        """All metrics as text; only the samples called `names` when there are any."""
        return self.expose().text(names)
