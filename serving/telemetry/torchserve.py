"""TorchServe's request and batch metrics, rendered from the counters or updated at each event.

By default they are rendered from the counters at a scrape (`families`). If the configuration declares a
metric with another type, or `metrics_mode` requires a log line per update, `ServerMetrics` records events.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from prometheus_client import Metric

from torchere.serving.config.server_settings import MetricsMode
from torchere.serving.logs.files import AccessFormatter, RotatingFile
from torchere.serving.telemetry.catalogue import Families, Family, help_text, updater
from torchere.serving.telemetry.declared import LATENCY, QUEUE_LATENCY, REQUESTS, DeclaredMetric, is_logged
from torchere.serving.telemetry.exposition import java_double
from torchere.serving.telemetry.numbers import Listener, Predicted, ServerNumbers, Tally, VersionNumbers

DEFAULT_VERSION = "default"  # label value of requests without a version
QUEUE_TIME = "QueueTime"
THREAD_TIME = "WorkerThreadTime"
ANSWERS = {2: "Requests2XX", 4: "Requests4XX", 5: "Requests5XX"}  # first digit of the status -> metric
# The metrics that can be rendered from counters, if they are declared with this type.
PLAIN = {
    **dict.fromkeys(ANSWERS.values(), "counter"),
    **dict.fromkeys((REQUESTS, LATENCY, QUEUE_LATENCY), "counter"),
    **dict.fromkeys((QUEUE_TIME, THREAD_TIME), "gauge"),
}

# Metric name -> its samples: label values without the host, and the value.
Samples: TypeAlias = Mapping[str, list[tuple[tuple[str, ...], float]]]


def samples_of(numbers: ServerNumbers) -> Samples:
    """Return the current samples of `PLAIN`."""
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
    """Render samples with the declared labels of their metrics. Pure function."""
    for metric in declared:
        family = Metric(metric.name, help_text(metric.kind, metric.unit), metric.kind)
        for values, number in samples[metric.name]:
            family.add_sample(metric.name, dict(zip(metric.labels, (*values, hostname), strict=True)), number)
        yield family


def _labels(version: VersionNumbers, named: bool) -> tuple[str, str]:
    return version.model, version.version if named else DEFAULT_VERSION


class ServerMetrics(Listener):
    """Records values of the metrics that are not rendered from the counters. Thread-safe.

    Only `declared` metrics are recorded; `hostname` is the last label value of each.
    """

    def __init__(
        self,
        declared: Mapping[str, DeclaredMetric],
        families: Families,
        hostname: str,
        mode: MetricsMode,
        *,
        numbers: ServerNumbers,
    ) -> None:
        self._declared = declared
        self._numbers = numbers
        self._hostname = hostname
        self._families: dict[str, Family] = {}
        self.plain: dict[str, DeclaredMetric] = {}
        for metric in declared.values():
            if is_logged(metric.name, mode):
                continue
            if PLAIN.get(metric.name) == metric.kind:
                self.plain[metric.name] = metric
            else:
                self._families[metric.name] = families.declare(
                    metric.kind, metric.name, metric.unit, metric.labels
                )
        self.needs_events = any(name in declared and name not in self.plain for name in PLAIN)

    def update(self, name: str, value: float, *labels: str) -> None:
        """Record a value of a metric; ignore it if the metric is not declared.

        `labels` are the label values in the order of the built-in file, without the host.

        Raises:
            ValueError: the metric is declared with other labels, or is a counter that would shrink.
        """
        if name not in self._declared or name in self.plain:
            return
        metric, family = self._declared[name], self._families.get(name)
        if family is None:
            # Without the last label, the host's, with which the line ends. Samples may have other labels.
            named = zip(metric.labels[:-1], labels, strict=False)
            log_value(SERVER_LOGGER, metric, value, named, hostname=self._hostname)
        else:
            updater(family.labels(*labels, self._hostname))(value)

    def drop(self, name: str, *values: str) -> None:
        """Remove the series with these label values of a metric, if it exists."""
        family = self._families.get(name)
        if family is not None:
            family.remove(*values, self._hostname)

    def accepted(self, version: VersionNumbers, named: bool) -> None:
        """See `Listener`."""
        self.update(REQUESTS, 1, *_labels(version, named))

    def answered(self, version: VersionNumbers, named: bool, total_s: float, wait_s: float) -> None:
        """See `Listener`."""
        if not self._numbers.shows(version):
            return  # it has been removed, and its labels must not reappear
        labels = _labels(version, named)
        self.update(LATENCY, total_s * 1e6, *labels)
        self.update(QUEUE_LATENCY, wait_s * 1e6, *labels)
        self.update(QUEUE_TIME, int(wait_s * 1000), "Host")

    def batch_finished(
        self,
        version: VersionNumbers,
        executor_s: float,
        handler_s: float,
        requests: Sequence[Predicted],
        succeeded: bool,
    ) -> None:
        """See `Listener`."""
        around_ms = max(0, int((executor_s - handler_s) * 1000))
        self.update(THREAD_TIME, around_ms, "Host")

    def forget(self, model: str, versions: Collection[str]) -> None:
        """Remove the series with these version labels of a model."""
        for name in (REQUESTS, LATENCY, QUEUE_LATENCY):
            for version in versions:
                self.drop(name, model, version)


logger = logging.getLogger(__name__)

SERVER_LOGGER = "TS_METRICS"
MODEL_LOGGER = "MODEL_METRICS"
FILES = {SERVER_LOGGER: "ts_metrics.log", MODEL_LOGGER: "model_metrics.log"}


def log_value(
    logger_name: str,
    metric: DeclaredMetric,
    value: float,
    labels: Iterable[tuple[str, str]],
    *,
    hostname: str,
    request_ids: Sequence[str] = (),
) -> None:
    """Log one update to one of the two loggers; `labels` do not include the host. Thread-safe.

    The line is `Name.Unit:value|#Label:value,...|#hostname:host,[requestID:id,...,]timestamp:seconds`.
    """
    dimensions = ",".join(f"{label}:{text}" for label, text in labels)
    requests = f"requestID:{','.join(request_ids)}," if request_ids else ""
    tail = f"hostname:{hostname},{requests}timestamp:{int(time.time())}"
    line = f"{metric.name}.{metric.unit}:{java_double(value)}|#{dimensions}|#{tail}"
    logging.getLogger(logger_name).info("%s", line)


def open_metric_files(directory: Path) -> bool:
    """Open the files of both loggers in `directory`; only a level of their own affects them.

    Return whether they could be opened; if not, a warning is logged and the lines go to the console only.
    """
    close_metric_files()
    try:
        files = {name: RotatingFile(directory / file, AccessFormatter()) for name, file in FILES.items()}
    except OSError as err:
        logger.warning("no metric files in %s: %s", directory, err.strerror)
        return False
    for name, file in files.items():
        logging.getLogger(name).addHandler(file)
        if not logging.getLogger(name).level:  # otherwise `log_levels` has set it
            logging.getLogger(name).setLevel(logging.INFO)
    return True


def close_metric_files() -> None:
    """Close the files that the last `open_metric_files` opened."""
    for name in FILES:
        metric_logger = logging.getLogger(name)
        for old in [old for old in metric_logger.handlers if isinstance(old, RotatingFile)]:
            metric_logger.removeHandler(old)
            old.close()
