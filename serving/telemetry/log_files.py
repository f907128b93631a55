"""TorchServe's log files, for what collects and parses them: same names, same lines, same rotation by size.

Standard output stays as it is. The files are `access_log.log` (one line a request), `model_log.log` (what
handlers print) and `ts_log.log` (everything).
"""

from __future__ import annotations

import logging
import logging.handlers
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from torchere.serving.telemetry.logging import escape

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 100 * 2**20  # TorchServe's; it compresses old files and rotates daily as well
KEPT_FILES = 5
ACCESS_LOGGER = "ACCESS_LOG"
MODEL_LOGGER = "MODEL_LOG"
_LEVELS = {"WARNING": "WARN", "CRITICAL": "FATAL"}  # where log4j's names are others


class _LogFile(logging.handlers.RotatingFileHandler):
    """Ours, so that adding again replaces it."""

    def __init__(
        self, path: Path, takes: Callable[[logging.LogRecord], bool], lines: logging.Formatter
    ) -> None:
        super().__init__(path, maxBytes=MAX_FILE_BYTES, backupCount=KEPT_FILES, encoding="utf-8")
        self.addFilter(takes)
        self.setFormatter(lines)


class AccessFormatter(logging.Formatter):
    """`time - message`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        return f"{_time(record)} - {escape(record.getMessage())}"


class Log4jFormatter(logging.Formatter):
    """`time [LEVEL] thread logger - message`; a traceback follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        level = _LEVELS.get(record.levelname, record.levelname)
        thread, name = _origin(record)
        line = f"{_time(record)} [{level:<5}] {escape(thread)} {name} - {escape(record.getMessage())}"
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        return "\n".join([line, *(escape(part) for part in trace.split("\n") if part)])


def add_log_files(directory: Path) -> bool:
    """Write the records of this process to the three files, too; call it after `logging.configure`.

    Returns:
        Whether they could be opened. If not (a read-only file system, say) there is a warning and no file, as
        in TorchServe.
    """
    remove_log_files()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        files = [
            _LogFile(directory / "access_log.log", _is_access, AccessFormatter()),
            _LogFile(directory / "model_log.log", _is_model, Log4jFormatter()),
            _LogFile(directory / "ts_log.log", lambda record: True, Log4jFormatter()),
        ]
    except OSError as err:
        logger.warning("no log files in %s: %s", directory, err.strerror)
        return False
    for file in files:
        logging.getLogger().addHandler(file)
    return True


def remove_log_files() -> None:
    """Close the files of the last `add_log_files`."""
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, _LogFile)]:
        root.removeHandler(old)
        old.close()


def _is_access(record: logging.LogRecord) -> bool:
    return record.name == ACCESS_LOGGER


def _is_model(record: logging.LogRecord) -> bool:
    return hasattr(record, "executor")  # only lines that a worker printed carry one


def _origin(record: logging.LogRecord) -> tuple[str, str]:
    """Thread and logger, as TorchServe names them for what a handler prints."""
    if not _is_model(record):
        return record.threadName or "main", record.name
    fields = vars(record)
    return f"W-{fields['executor']}-{fields.get('model')}_{fields.get('version')}-stdout", MODEL_LOGGER


def _time(record: logging.LogRecord) -> str:
    """Local time, as log4j's ISO8601 has it: a comma before the milliseconds, and no zone."""
    moment = datetime.fromtimestamp(record.created)
    return f"{moment:%Y-%m-%dT%H:%M:%S},{moment.microsecond // 1000:03d}"
