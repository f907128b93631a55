"""TorchServe's log files, for what collects and parses them: same names, same lines, same rotation by size.

Standard output stays as it is. The files are `access_log.log` (one line a request), `model_log.log` (what
handlers print) and `ts_log.log` (everything).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from pathlib import Path

from torchere.serving.telemetry.access_lines import AccessLine, LineFormatter
from torchere.serving.telemetry.logging import ACCESS_LOGGER, escape
from torchere.serving.telemetry.record_parts import trace_of
from torchere.serving.telemetry.rotating_file import RotatingFile

logger = logging.getLogger(__name__)

MODEL_LOGGER = "MODEL_LOG"
_LEVELS = {"WARNING": "WARN", "CRITICAL": "FATAL"}  # where log4j's names are others


class _LogFile(RotatingFile):
    """Ours, so that adding again replaces it. `form` is for lines of the access log; None: it takes none."""

    def __init__(
        self,
        path: Path,
        takes: Callable[[logging.LogRecord], bool],
        lines: logging.Formatter,
        form: Callable[[AccessLine], str] | None = None,
    ) -> None:
        super().__init__(path, lines)
        self.addFilter(takes)
        self._form = form

    def access_text(self, line: AccessLine) -> str:
        """The text of a line of the access log; "" in the file that has none."""
        return "" if self._form is None else f"{self._form(line)}\n"

    def write_access(self, text: str, lines: int) -> None:
        """Write many lines of the access log at once."""
        self.write(text, lines)


class AccessFormatter(LineFormatter):
    """`time - message`."""

    def format_access(self, line: AccessLine) -> str:
        """The same for a line of the access log, without a record."""
        return f"{_time(line.created_s)} - {escape(line.message)}"

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        return f"{_time(record.created)} - {escape(record.getMessage())}"


class Log4jFormatter(LineFormatter):
    """`time [LEVEL] thread logger - message`; a traceback follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        level = _LEVELS.get(record.levelname, record.levelname)
        thread, name = _origin(record)
        line = f"{_time(record.created)} [{level:<5}] {escape(thread)} {name} - {escape(record.getMessage())}"
        trace = trace_of(self, record)
        return "\n".join([line, *(escape(part) for part in trace.split("\n") if part)])

    def format_access(self, line: AccessLine) -> str:
        """The same for a line of the access log, without a record."""
        return f"{_time(line.created_s)} [INFO ] MainThread {ACCESS_LOGGER} - {escape(line.message)}"


def add_log_files(directory: Path) -> bool:
    """Write the records of this process to the three files, too; call it after `logging.configure`.

    Returns:
        Whether they could be opened. If not (a read-only file system, say) there is a warning and no file, as
        in TorchServe.
    """
    remove_log_files()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        access, everything = AccessFormatter(), Log4jFormatter()
        files = [
            _LogFile(directory / "access_log.log", _is_access, access, access.format_access),
            _LogFile(directory / "model_log.log", _is_model, everything),
            _LogFile(directory / "ts_log.log", lambda record: True, everything, everything.format_access),
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


def _time(created_s: float) -> str:
    """Local time, as log4j's ISO8601 has it: a comma before the milliseconds, and no zone."""
    second, microseconds = divmod(round(created_s * 1e6), 1_000_000)
    return f"{_second(second)},{microseconds // 1000:03d}"


@lru_cache(maxsize=2)  # a line of the access log asks for each request
def _second(epoch_s: int) -> str:
    return f"{datetime.fromtimestamp(epoch_s):%Y-%m-%dT%H:%M:%S}"
