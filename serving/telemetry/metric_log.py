"""Metric updates as log lines, for `metrics_mode` log and legacy: TorchServe's grammar, loggers and files."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from torchere.serving.telemetry.exposition import java_double
from torchere.serving.telemetry.log_files import AccessFormatter
from torchere.serving.telemetry.rotating_file import RotatingFile

logger = logging.getLogger(__name__)

SERVER_LOGGER = "TS_METRICS"
MODEL_LOGGER = "MODEL_METRICS"
FILES = {SERVER_LOGGER: "ts_metrics.log", MODEL_LOGGER: "model_metrics.log"}


class _MetricFile(RotatingFile):
    """Ours, so that opening again replaces it."""


class MetricLog:
    """Writes one line for each update, to one of the two loggers. Thread-safe."""

    def __init__(self, logger_name: str, hostname: str, now: Callable[[], float] = time.time) -> None:
        self._logger = logging.getLogger(logger_name)
        self._hostname = hostname
        self._now = now  # seconds since the epoch

    def write(
        self,
        name: str,
        unit: str,
        value: float,
        labels: Iterable[tuple[str, str]],
        request_ids: Sequence[str] = (),
    ) -> None:
        """Log one update; `labels` are without the host's."""
        line = metric_line(
            name,
            unit,
            value,
            labels,
            hostname=self._hostname,
            timestamp_s=int(self._now()),
            request_ids=request_ids,
        )
        self._logger.info("%s", line)


def metric_line(
    name: str,
    unit: str,
    value: float,
    labels: Iterable[tuple[str, str]],
    *,
    hostname: str,
    timestamp_s: int,
    request_ids: Sequence[str] = (),
) -> str:
    """`Name.Unit:value|#Label:value,...|#hostname:host,[requestID:id,...,]timestamp:seconds`."""
    dimensions = ",".join(f"{label}:{text}" for label, text in labels)
    requests = f"requestID:{','.join(request_ids)}," if request_ids else ""
    tail = f"hostname:{hostname},{requests}timestamp:{timestamp_s}"
    return f"{name}.{unit}:{java_double(value)}|#{dimensions}|#{tail}"


def open_metric_files(directory: Path) -> bool:
    """Let both loggers write to their files in `directory`, at any log level of the server.

    Returns:
        Whether the files could be opened; if not, there is a warning and the lines go to the console only.
    """
    close_metric_files()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        files = {name: _MetricFile(directory / file, AccessFormatter()) for name, file in FILES.items()}
    except OSError as err:
        logger.warning("no metric files in %s: %s", directory, err.strerror)
        return False
    for name, file in files.items():
        logging.getLogger(name).addHandler(file)
        logging.getLogger(name).setLevel(logging.INFO)
    return True


def close_metric_files() -> None:
    """Close the files of the last `open_metric_files`."""
    for name in FILES:
        metric_logger = logging.getLogger(name)
        for old in [old for old in metric_logger.handlers if isinstance(old, _MetricFile)]:
            metric_logger.removeHandler(old)
            old.close()
