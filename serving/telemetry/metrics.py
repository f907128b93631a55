"""All metrics of the server, with one method for each event that changes them.

TorchServe's metric families keep their names, units and labels, so that existing dashboards and alerts keep
working. Metrics that TorchServe lacks (distributions, load, readiness, causes) begin with `torchere_`;
`catalogue.py` lists them.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torchere.handlers.metrics import MetricDeclaration, MetricSample
from torchere.serving.config.server_settings import MetricsMode
from torchere.serving.errors import InvalidRequest, OverBudget, ServingError
from torchere.serving.telemetry import catalogue, torchserve
from torchere.serving.telemetry.catalogue import Families, Reserved
from torchere.serving.telemetry.declared import MetricsConfig, built_in_config
from torchere.serving.telemetry.handler_metrics import HandlerMetrics
from torchere.serving.telemetry.numbers import (
    TOO_LARGE,
    Listener,
    Predicted,
    ServerNumbers,
    VersionNumbers,
    VersionSnapshot,
    refusal_reason,
)
from torchere.serving.telemetry.sampling import ProcessMetrics, SystemMetrics
from torchere.serving.telemetry.saturation import TICK_S, SaturationWindow
from torchere.serving.telemetry.scrape import Exposure, Extent, States, VersionLoad
from torchere.serving.telemetry.torchserve import ServerMetrics
from torchere.serving.types import ClientNumbers

if TYPE_CHECKING:  # imports OpenTelemetry, which is optional
    from torchere.serving.telemetry.tracing import SpanMaker

PREDICTION_TIME = "PredictionTime"
VERSIONS_A_TURN = 16  # snapshots of so many, with their loads, block the event loop for 1 ms at most


class Metrics:
    """All metrics of one server, in a separate registry.

    Call it on the event loop, except for `Exposure.text`, `handler_metrics` and `system`, which may be used
    from any thread. `show` turns the names of model and version into label values, so call it for registered
    versions only: invented names from clients must never become labels. `forget` removes them.

    Args:
        hostname: the label value of most metrics; None: the name of this machine.
        mode: decides which metrics are exposed and which are logged (see `declared.is_logged`).
        config: the declared metrics of TorchServe and of handlers; None: the declarations of the built-in
            file.
        auto_detect: whether metrics of handlers that `config` does not declare are recorded.
        extent: limits the number of series.
        now: monotonic seconds.
    """

    def __init__(
        self,
        hostname: str | None = None,
        *,
        mode: MetricsMode = "prometheus",
        config: MetricsConfig | None = None,
        auto_detect: bool = False,
        extent: Extent = Extent(),  # noqa: B008 - immutable
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        # A byte of the name that is not UTF-8 decodes to half a surrogate pair, which can't be exposed.
        self._host = (hostname or socket.gethostname()).encode(errors="replace").decode()
        config = built_in_config() if config is None else config
        # For handlers' `context.metrics.get_metric`; handlers do not set the host label.
        self.declared = tuple(
            MetricDeclaration(metric.name, metric.unit, metric.labels[:-1], metric.kind)
            for metric in config.model.values()
        )
        self.tracing: SpanMaker | None = None  # creates spans; set by the server
        self._extent = extent
        self._now = now
        self._families = families = Families()
        self._numbers = numbers = ServerNumbers()
        self._server = server = ServerMetrics(config.server, families, self._host, mode, numbers=numbers)
        self.system = SystemMetrics(server)
        families.registry.register(Reserved((*server.plain, *catalogue.ALL_NAMES)))
        self.process = ProcessMetrics()
        self._of_handlers = HandlerMetrics(config.model, families, self._host, mode, auto_detect=auto_detect)
        self._predictions = _PredictionTimes(self._of_handlers)
        self._states = States()
        self._server_values: dict[str, Callable[[], float]] = dict.fromkeys(
            (
                "torchere_ready",
                "torchere_inflight",
                "torchere_held_bytes",
                "torchere_access_log_dropped_lines_total",
            ),
            float,
        )
        self._over_budget: Mapping[str, int] = {}
        self._clients: Callable[[], Mapping[str, ClientNumbers]] = dict
        # By version: its load, and the window of its saturation.
        self._loads: dict[tuple[str, str], tuple[Callable[[], VersionLoad], SaturationWindow]] = {}
        self._executors: dict[tuple[str, str], dict[int, str]] = {}  # by version: id -> label

    def prediction_begins(self, prediction: Predicted) -> None:
        """Start tracing a prediction whose head has arrived; replaces its `trace`, which was the client's."""
        if self.tracing is not None:
            self.tracing.begin(prediction)

    def prediction_ends(self, prediction: Predicted, code: str | int) -> None:
        """Count a finished prediction once; `code` is the HTTP status or the name of the gRPC status code."""
        if prediction.counted:
            return
        prediction.counted = True
        now_s = time.monotonic()
        if prediction.meter is not None:
            prediction.meter.finished(prediction, code, now_s)
        elif isinstance(prediction.error, (InvalidRequest, OverBudget)):  # refused before a version was found
            self.refused(prediction.error)
        if self.tracing is not None:
            self.tracing.end(prediction, code, now_s)
        prediction.error = None  # its traceback would keep frames alive

    def meter(self, model: str, version: str) -> VersionNumbers:
        """Return new counters, at 0, for a version; call `show` when the version is registered."""
        listeners = self._listeners()
        return VersionNumbers(model, version, server=self._numbers, listeners=listeners, now=self._now)

    def _listeners(self) -> list[Listener]:
        listeners: list[Listener] = []
        if self._server.needs_events:
            listeners.append(self._server)
        if self._predictions.needs_each:
            listeners.append(self._predictions)
        if self.tracing is not None:
            listeners.append(self.tracing)
        return listeners

    def show(self, meter: VersionNumbers, load: Callable[[], VersionLoad] | None = None) -> None:
        """Expose the counters of a version from now on; `load` is called at each scrape."""
        self._numbers.show(meter)
        if load is not None:
            window = SaturationWindow(meter.busy, meter.load, meter.requests)
            window.tick(self._now())
            self._loads[meter.key] = load, window

    def sample_load(self) -> None:
        """Sample the load of every version; call it every `TICK_S`."""
        now_s = self._now()
        for _, window in self._loads.values():
            window.tick(now_s)

    async def watch_load(self) -> None:
        """Sample the load of every version every `TICK_S`, until cancelled."""
        while True:
            self.sample_load()
            await asyncio.sleep(TICK_S)

    def request_finished(self, status: int, *, is_probe: bool = False) -> None:
        """Count a REST response on any port; a status other than 2xx or 4xx counts as 5xx, as in TorchServe.

        A probe that reports "not ready" is not an error of the server, and is not counted.
        """
        if is_probe and status >= 400:
            return
        digit = self._numbers.rest_answered(status)
        if self._server.needs_events:
            self._server.update(torchserve.ANSWERS[digit], 1, "Host")

    def refused(self, error: ServingError) -> None:
        """Count a request that was rejected before its model was known."""
        self._numbers.refused[refusal_reason(error)] += 1

    def refused_body(self) -> None:
        """Count a request that was rejected because its body is too large."""
        self._numbers.refused[TOO_LARGE] += 1

    def handler_metrics(self, samples: Iterable[MetricSample], model: str = "") -> None:
        """Record the values that a model's handler reported through `context.metrics` in one batch."""
        self._of_handlers.record(samples, model)

    def executor_loaded(self, meter: VersionNumbers, executor_id: int, load_s: float) -> None:
        """Record that an executor of a version is ready, `load_s` after it was started."""
        name = f"W-{executor_id}-{meter.model}_{meter.version}"
        self._load(meter.key)  # drops the series of stopped executors
        self._executors.setdefault(meter.key, {})[executor_id] = name
        self._server.update("WorkerLoadTime", int(load_s * 1000), name, "Host")
        meter.load_s = load_s
        if self.tracing is not None:
            self.tracing.load(meter, executor_id, load_s)

    def watch_server(
        self, ready: Callable[[], bool], inflight: Callable[[], int], dropped_lines: Callable[[], int]
    ) -> None:
        """Call these functions at each scrape; `inflight` counts admitted predictions without an answer."""
        self._server_values |= {
            "torchere_ready": ready,
            "torchere_inflight": inflight,
            "torchere_access_log_dropped_lines_total": dropped_lines,
        }

    def watch_budgets(self, held_bytes: Callable[[], int], refused: Mapping[str, int]) -> None:
        """Expose the bytes held by unfinished requests, and the number of rejections by each budget."""
        self._server_values["torchere_held_bytes"] = held_bytes
        self._over_budget = refused

    def watch_clients(self, numbers: Callable[[], Mapping[str, ClientNumbers]]) -> None:
        """Expose the counters of clients, by identities that the operator named; "" for all other clients."""
        self._clients = numbers

    def know_states(self, states: States) -> None:
        """Set all possible states of executors and versions."""
        self._states = states

    def forget(self, meter: VersionNumbers, *, was_last: bool) -> None:
        """Remove the series of a removed version; if it was the last one, also those of the whole model.

        Call it after the last response of the version.
        """
        model, version = meter.model, meter.version
        if was_last:  # even if its counters were replaced by those of a version that was removed before it
            self._of_handlers.forget(model)
        if not self._numbers.forget(meter, was_last=was_last):
            return
        self._loads.pop(meter.key, None)
        self._server.forget(model, (version, torchserve.DEFAULT_VERSION) if was_last else (version,))
        self._forget_stopped(meter.key, VersionLoad())
        self._executors.pop(meter.key, None)

    def _load(self, version: tuple[str, str]) -> VersionLoad | None:
        """Return the current load of a version; None if it is not known."""
        if version not in self._loads:
            return None
        ask, window = self._loads[version]
        load = replace(ask(), saturation=window.value(self._now()))
        self._forget_stopped(version, load)
        return load

    def _forget_stopped(self, version: tuple[str, str], load: VersionLoad) -> None:
        """Remove the series of a version's executors that its load does not list."""
        names = self._executors.get(version, {})
        for executor_id in names.keys() - {executor.executor_id for executor in load.executors}:
            self._server.drop("WorkerLoadTime", names.pop(executor_id), "Host")

    def expose(self) -> Exposure:
        """Return a copy of all current metrics, which another thread may render as text."""
        versions = self._numbers.versions
        return self._exposure({key: (one.snapshot(), self._load(key)) for key, one in versions.items()})

    async def expose_in_turns(self) -> Exposure:
        """As `expose`, but let the event loop serve requests after every few versions."""
        versions = self._numbers.versions
        taken = {}
        for key, version in list(versions.items()):
            taken[key] = version.snapshot(), self._load(key)
            if len(taken) % VERSIONS_A_TURN == 0:
                await asyncio.sleep(0)
        return self._exposure({key: one for key, one in taken.items() if key in versions})

    def _exposure(
        self, versions: Mapping[tuple[str, str], tuple[VersionSnapshot, VersionLoad | None]]
    ) -> Exposure:
        numbers = self._numbers
        self._predictions.report_last(numbers)
        samples = torchserve.samples_of(numbers)
        return Exposure(
            self._families,
            plain=lambda: torchserve.families(self._server.plain.values(), samples, self._host),
            versions=versions,
            states=self._states,
            refused=dict(numbers.refused),
            over_budget=dict(self._over_budget),
            clients=self._clients(),
            server={name: float(value()) for name, value in self._server_values.items()},
            process=self.process,
            extent=self._extent,
        )

    def exposition(self, names: Collection[str] = ()) -> str:
        """Return all metrics as text; if `names` is not empty, only the samples with these names."""
        return self.expose().text(names)


class _PredictionTimes(Listener):
    """TorchServe's `PredictionTime`: the handler's time for each model's last batch that did not fail.

    It is a listener only if the configuration needs every value.
    """

    def __init__(self, handlers: HandlerMetrics) -> None:
        self._handlers = handlers
        self.needs_each = handlers.needs_each(PREDICTION_TIME)

    def report_last(self, numbers: ServerNumbers) -> None:
        """Report the last value of each model, unless each value is reported already or none is recorded."""
        if self.needs_each or not self._handlers.takes(PREDICTION_TIME):
            return
        for version in sorted(numbers.versions.values(), key=lambda version: version.last_batch_s):
            if version.last_handler_s is not None:
                self._report(version.model, version.last_handler_s, ())

    def batch_finished(
        self,
        version: VersionNumbers,
        executor_s: float,
        handler_s: float,
        requests: Sequence[Predicted],
        succeeded: bool,
    ) -> None:
        """See `Listener`."""
        if succeeded:
            self._report(version.model, handler_s, tuple(request.request_id for request in requests))

    def _report(self, model: str, handler_s: float, request_ids: tuple[str, ...]) -> None:
        labels = (("ModelName", model), ("Level", "Model"))
        value_ms = round(handler_s * 1000, 2)
        sample = MetricSample(PREDICTION_TIME, value_ms, "Milliseconds", "gauge", labels, request_ids)
        self._handlers.record([sample])
