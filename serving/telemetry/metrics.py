"""Every metric of the server, by the events that change it.

TorchServe's families keep its names, units and labels, so that dashboards and alerts built for it go on
working; what it could not say (distributions, load, readiness) stands under `torchere_`.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from torchere.handlers.metric_types import MetricDeclaration
from torchere.serving.settings import MetricsMode
from torchere.serving.telemetry.batch_metrics import BatchMetrics
from torchere.serving.telemetry.exposition import render
from torchere.serving.telemetry.families import Families
from torchere.serving.telemetry.handler_metrics import Dimensions, HandlerMetrics, HandlerSample
from torchere.serving.telemetry.load_metrics import LoadMetrics, VersionLoad
from torchere.serving.telemetry.metrics_config import MetricsConfig, built_in_config
from torchere.serving.telemetry.prediction_metrics import PLAIN, PredictionMetrics
from torchere.serving.telemetry.server_metrics import ServerMetrics
from torchere.serving.telemetry.system_metrics import SystemMetrics

_REQUESTS = {2: "Requests2XX", 4: "Requests4XX", 5: "Requests5XX"}  # first digit of the status -> family


class _Sample(NamedTuple):
    """A value that the server reports on behalf of a handler."""

    name: str
    value: float
    unit: str
    metric_type: str
    dimensions: Dimensions
    request_ids: Sequence[str]


class Metrics:
    """All metrics of one server, on a registry of its own. Every method may be called from any thread.

    A model and version get labels when a prediction is accepted for them, so call `prediction_accepted` only
    for what is registered: names that clients make up must never become labels. `forget` takes them away.

    Args:
        hostname: label of most metrics; None: this machine's.
        mode: what is shown and what is logged (see `server_metrics.is_logged`).
        config: which of TorchServe's metrics there are; None: all.
        auto_detect: whether metrics of handlers that `config` does not declare are recorded.
    """

    def __init__(
        self,
        hostname: str | None = None,
        *,
        mode: MetricsMode = "prometheus",
        config: MetricsConfig | None = None,
        auto_detect: bool = False,
    ) -> None:
        host = hostname or socket.gethostname()
        config = built_in_config() if config is None else config
        # What handlers find by `context.metrics.get_metric`; the host's label is not theirs to give.
        self.declared = tuple(
            MetricDeclaration(metric.name, metric.unit, metric.labels[:-1], metric.kind)
            for metric in config.model.values()
        )
        self._families = families = Families()
        self._server = server = ServerMetrics(config.server, families, host, mode, PLAIN)
        self._finished = {digit: server.bind(name, "Host") for digit, name in _REQUESTS.items()}
        self._thread_time_ms = server.bind("WorkerThreadTime", "Host")
        self.system = SystemMetrics(server)
        self._predictions = PredictionMetrics(host, server)
        self._of_handlers = HandlerMetrics(config.model, families, host, mode, auto_detect=auto_detect)
        self._batches = BatchMetrics()
        self._load = LoadMetrics()
        families.registry.register(self._predictions)
        families.registry.register(self._batches)
        families.registry.register(self._load)
        self._inflight = families.gauge("torchere_inflight", "Count", ())
        self._ready = families.gauge("torchere_ready", "Boolean", ())
        self._lock = threading.Lock()  # guards _executors
        self._executors: dict[tuple[str, str], set[str]] = {}

    def request_finished(self, status: int) -> None:
        """A REST answer went out, on any port; what is neither 2xx nor 4xx counts as 5xx (contract)."""
        self._finished.get(status // 100, self._finished[5])(1)

    def prediction_accepted(self, model: str, version: str | None) -> None:
        """A prediction for a registered model came in; None when the request named no version."""
        self._predictions.accepted(model, version)

    def prediction_answered(self, model: str, version: str | None, total_s: float, queue_s: float) -> None:
        """A prediction was answered, `total_s` after it came in, of which it waited `queue_s`.

        `version` is what `prediction_accepted` got. The average of a model is the cumulative latency counter
        over the requests counter; the distribution stands in the `torchere_` histograms.
        """
        self._predictions.answered(model, version, total_s, queue_s)

    def batch_finished(
        self,
        model: str,
        version: str,
        *,
        size: int,
        queue_s: float,
        executor_s: float,
        handler_s: float,
        succeeded_ids: Sequence[str] = (),
    ) -> None:
        """A batch of `size` requests came back after `executor_s`, of which its handler ran `handler_s`.

        Args:
            model: its model.
            version: its version.
            size: how many requests it had.
            queue_s: how long they had waited, added up.
            executor_s: from handing the batch over until it was back.
            handler_s: the part of it that the handler ran.
            succeeded_ids: the requests; none when the handler failed.
        """
        transfer_s = max(0.0, executor_s - handler_s)
        self._batches.finished(
            model,
            version,
            size=size,
            queue_s=max(0.0, queue_s),
            transfer_s=size * transfer_s,
            handler_s=size * handler_s,
        )
        self._thread_time_ms(int(transfer_s * 1000))
        if succeeded_ids:
            labels = (("ModelName", model), ("Level", "Model"))
            handler_ms = round(handler_s * 1000, 2)
            self._of_handlers.record(
                [_Sample("PredictionTime", handler_ms, "Milliseconds", "gauge", labels, succeeded_ids)]
            )

    def handler_metrics(self, samples: Iterable[HandlerSample]) -> None:
        """What a handler reported through `context.metrics`, in one batch."""
        self._of_handlers.record(samples)

    def executor_loaded(self, model: str, version: str, executor_id: int, load_s: float) -> None:
        """An executor of a version is up, `load_s` after it was started."""
        name = f"W-{executor_id}-{model}_{version}"
        with self._lock:
            self._executors.setdefault((model, version), set()).add(name)
        self._server.bind("WorkerLoadTime", name, "Host")(int(load_s * 1000))

    def watch_load(self, model: str, version: str, load: Callable[[], VersionLoad]) -> None:
        """Ask `load` how loaded a version is, at each exposition."""
        self._load.watch(model, version, load)

    def watch_server(self, ready: Callable[[], bool], inflight: Callable[[], int]) -> None:
        """Ask at each exposition whether the server is ready, and how many predictions are in it."""
        self._ready.set_function(lambda: float(ready()))
        self._inflight.set_function(lambda: float(inflight()))

    def forget(self, model: str, version: str, *, was_last: bool) -> None:
        """A version is gone: drop its series, and with the last version those of the whole model.

        Call it after the last answer of the version.
        """
        self._predictions.forget(model, version)
        self._batches.forget(model, version)
        self._load.forget(model, version)
        with self._lock:
            executors = self._executors.pop((model, version), set())
        for name in executors:
            self._server.drop("WorkerLoadTime", name, "Host")
        if was_last:
            self._predictions.forget(model, None)
            self._of_handlers.forget(model)

    def exposition(self, names: Collection[str] = ()) -> str:
        """All metrics as text; only the samples called `names` when there are any."""
        return render(self._families.registry.collect(), self._families.declared, names)
