"""Every metric of the server, by the events that change it.

TorchServe's families keep its names, units and labels, so that dashboards and alerts built for it go on
working; what it could not say (distributions, queue length, readiness) stands under `torchere_`.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Collection, Iterable

from torchere.serving.telemetry.exposition import render
from torchere.serving.telemetry.families import Families
from torchere.serving.telemetry.handler_metrics import HandlerMetrics, HandlerSample
from torchere.serving.telemetry.prediction_metrics import PredictionMetrics
from torchere.serving.telemetry.system_metrics import SystemMetrics

SYSTEM_PERIOD_S = 60.0  # TorchServe's metric_time_interval
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_HOST = ("Level", "Hostname")
_MODEL = ("ModelName", "Level", "Hostname")
_OURS = ("model", "version")
_REQUESTS = {2: "Requests2XX", 4: "Requests4XX", 5: "Requests5XX"}  # first digit of the status -> family


class Metrics:
    """All metrics of one server, on a registry of its own. Every method may be called from any thread.

    A model and version get labels when a prediction is accepted for them, so call `prediction_accepted` only
    for what is registered: names that clients make up must never become labels. `forget` takes them away.
    """

    def __init__(self, hostname: str | None = None, system_period_s: float = SYSTEM_PERIOD_S) -> None:
        self._hostname = host = hostname or socket.gethostname()
        self._families = families = Families()
        by_class = {digit: families.counter(name, "Count", _HOST) for digit, name in _REQUESTS.items()}
        self._finished = {digit: counter.labels("Host", host) for digit, counter in by_class.items()}
        self._predictions = PredictionMetrics(host)
        families.registry.register(self._predictions)
        self._thread_time_ms = families.gauge("WorkerThreadTime", "Milliseconds", _HOST).labels("Host", host)
        self._load_time_ms = families.gauge("WorkerLoadTime", "Milliseconds", ("WorkerName", *_HOST))
        self._handler_time_ms = families.gauge("HandlerTime", "ms", _MODEL)
        self._prediction_time_ms = families.gauge("PredictionTime", "ms", _MODEL)
        self._batch_size = families.histogram("torchere_batch_size", "Count", _OURS, BATCH_BUCKETS)
        self._queue_depth = families.gauge("torchere_queue_depth", "Count", _OURS)
        self._ready = families.gauge("torchere_ready", "Boolean", ())
        self._system = SystemMetrics(families, host, system_period_s)
        self._of_handlers = HandlerMetrics(families, host)
        self._of_handlers.adopt(self._handler_time_ms, "HandlerTime", _MODEL)
        self._of_handlers.adopt(self._prediction_time_ms, "PredictionTime", _MODEL)
        self._lock = threading.Lock()  # guards _executors
        self._executors: dict[tuple[str, str], set[str]] = {}

    def request_finished(self, status: int) -> None:
        """A REST answer went out, on any port; what is neither 2xx nor 4xx counts as 5xx (contract)."""
        self._finished.get(status // 100, self._finished[5]).inc()

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
        self, model: str, version: str, *, size: int, executor_s: float, handler_s: float
    ) -> None:
        """A batch of `size` requests came back after `executor_s`, of which its handler ran `handler_s`."""
        self._batch_size.labels(model, version).observe(size)
        self._thread_time_ms.set(int(max(0.0, executor_s - handler_s) * 1000))
        self._prediction_time_ms.labels(model, "Model", self._hostname).set(round(handler_s * 1000, 2))

    def handler_metrics(self, samples: Iterable[HandlerSample]) -> None:
        """What a handler reported through `context.metrics`, in one batch."""
        self._of_handlers.record(samples)

    def executor_loaded(self, model: str, version: str, executor_id: int, load_s: float) -> None:
        """An executor of a version is up, `load_s` after it was started."""
        name = f"W-{executor_id}-{model}_{version}"
        with self._lock:
            self._executors.setdefault((model, version), set()).add(name)
        self._load_time_ms.labels(name, "Host", self._hostname).set(int(load_s * 1000))

    def watch_queue(self, model: str, version: str, depth: Callable[[], float]) -> None:
        """Ask `depth` for the number of waiting requests of a version, at each exposition."""
        self._queue_depth.labels(model, version).set_function(depth)

    def watch_readiness(self, ready: Callable[[], bool]) -> None:
        """Ask `ready` whether the server is ready, at each exposition."""
        self._ready.set_function(lambda: float(ready()))

    def gpu_sampled(
        self, device_id: int, *, memory_bytes: int, memory_percent: float, percent: float
    ) -> None:
        """Take over a sample of one GPU: memory in use, and both utilisations from 0 to 100."""
        self._system.gpu_sampled(
            device_id, memory_bytes=memory_bytes, memory_percent=memory_percent, percent=percent
        )

    def forget(self, model: str, version: str, *, was_last: bool) -> None:
        """A version is gone: drop its series, and with the last version those of the whole model.

        Call it after the last answer of the version.
        """
        self._predictions.forget(model, version)
        self._batch_size.remove(model, version)
        self._queue_depth.remove(model, version)
        with self._lock:
            executors = self._executors.pop((model, version), set())
        for name in executors:
            self._load_time_ms.remove(name, "Host", self._hostname)
        if was_last:
            self._predictions.forget(model, None)
            self._prediction_time_ms.remove(model, "Model", self._hostname)
            self._of_handlers.forget(model)

    def exposition(self, names: Collection[str] = ()) -> str:
        """All metrics as text; only the samples called `names` when there are any."""
        self._system.sample_if_due()
        return render(self._families.registry.collect(), self._families.declared, names)
