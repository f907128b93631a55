"""TorchServe's log files, for log collectors: same names, same line formats, same rotation by size.

Standard output is written as well. The files are `access_log.log` (one line per request), `model_log.log`
(output of handlers) and `ts_log.log` (all lines).
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TextIO

from torchere.archiver.errors import one_line
from torchere.serving.logs.access_lines import (
    ACCESS_LOGGER,
    AccessLine,
    LineFormatter,
    TakesAccessLines,
    access_log,
)
from torchere.serving.logs.lines import MODEL_LOGGER, trace_of
from torchere.serving.logs.output import SaysWhatIsLost

MAX_FILE_BYTES = 100 * 2**20  # TorchServe's limit; TorchServe also compresses old files and rotates daily
KEPT_FILES = 5


class RotatingFile(SaysWhatIsLost, logging.handlers.RotatingFileHandler):
    """A rotating log file that checks its path before each write, and reopens it if logrotate moved the file.

    The lines of a failed write are lost; the next write tries again, and creates a missing folder. A file
    that can't be renamed (it is a mount point, or its folder is not writable) grows by `maxBytes` more before
    the next try.

    Raises:
        OSError: the file or its folder can't be made (from the constructor only).
    """

    def __init__(self, path: Path, lines: logging.Formatter) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path, maxBytes=MAX_FILE_BYTES, backupCount=KEPT_FILES, encoding="utf-8")
        self.setFormatter(lines)
        self.output = str(path)
        self._is_closed = False
        self._full_bytes = self.maxBytes  # the file is rotated at this size

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        try:
            text = self.format(record)
        except Exception:  # the handlers of `logging` catch all, too
            self.handleError(record)
        else:
            self.write(f"{text}\n", 1)

    def write(self, text: str, lines: int) -> None:
        """Write `text`, which holds `lines` lines, in any thread; rotate the file first if it is full."""
        with self.lock or contextlib.nullcontext():
            if self._is_closed:
                return
            try:
                stream = self._find()
                size = os.fstat(stream.fileno()).st_size  # 0 for a pipe
                if size + len(text) >= self._full_bytes:
                    stream = self._begin_anew(size)
                stream.write(text)
                stream.flush()
            except Exception:
                self.handleError(logging.makeLogRecord({"msg": f"{lines} lines of the log"}))

    def close(self) -> None:
        """Close the file and ignore later writes; on a full disk the buffered text is lost."""
        self._is_closed = True
        try:
            super().close()
        except OSError:
            self.handleError(logging.makeLogRecord({"msg": "the last lines of the log"}))

    def _begin_anew(self, size: int) -> TextIO:
        """Rotate the file of `size` bytes; return the new file, or the old one if it can't be renamed."""
        try:
            self.doRollover()
            self._full_bytes = self.maxBytes
        except OSError as err:
            self._full_bytes = size + self.maxBytes
            self.say(f"{self.output} can't be moved, and grows: {err.strerror or err}")
        return self._find()

    def _find(self) -> TextIO:
        """Return the open file; reopen it if its path now names another file or no file."""
        old = self.stream
        if old is not None:
            if not old.closed and _is_at(old.fileno(), self.baseFilename):
                return old
            self.stream = None  # RotatingFileHandler sets None between two files
            with contextlib.suppress(OSError):  # a full disk: the buffered text is lost
                old.close()
        os.makedirs(os.path.dirname(self.baseFilename), exist_ok=True)
        self.stream = self._open()
        return self.stream


def _is_at(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:  # the file was moved, or its file system was replaced
        return False


logger = logging.getLogger(__name__)

_LEVELS = {"WARNING": "WARN", "CRITICAL": "FATAL"}  # log4j's names where they differ


class _LogFile(TakesAccessLines, RotatingFile):
    """A log file of this module, which `add_log_files` replaces when it is called again.

    It contains the records for which `takes` returns True.
    """

    def __init__(self, path: Path, takes: Callable[[logging.LogRecord], bool], lines: LineFormatter) -> None:
        super().__init__(path, lines)
        self.addFilter(takes)
        self._lines = lines
        self._takes_access = takes(logging.makeLogRecord({"name": ACCESS_LOGGER}))

    def access_text(self, line: AccessLine) -> str:
        """Return the text of a line of the access log, or "" if this file does not contain them."""
        return f"{self._lines.format_access(line)}\n" if self._takes_access else ""

    def write_access(self, text: str, lines: int) -> None:
        """Write `text`, which holds `lines` lines of the access log."""
        self.write(text, lines)


class _InOrder(TakesAccessLines):
    """Writes the queued lines of the access log ahead of every other line. Writes nothing itself.

    These lines wait up to 0.1 s to be written together; readers of the files take them for sorted by time.
    """

    def handle(self, record: logging.LogRecord) -> bool:
        """Write the queued lines, before the handlers after this one write the record."""
        if record.name != ACCESS_LOGGER and access_log.waits:
            access_log.flush()
        return True


class AccessFormatter(LineFormatter):
    """`time - message`."""

    def format_access(self, line: AccessLine) -> str:
        """Format a line of the access log in the same way, without a log record."""
        return f"{_time(line.created_s)} - {one_line(line.message)}"

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without its line end."""
        return f"{_time(record.created)} - {one_line(record.getMessage())}"


class Log4jFormatter(LineFormatter):
    """Formats a record as `time [LEVEL] thread logger - message`; a traceback follows on separate lines."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without its line end."""
        level = _LEVELS.get(record.levelname, record.levelname)
        thread, name = _origin(record)
        said = one_line(f"{thread} {name} - {record.getMessage()}")
        line = f"{_time(record.created)} [{level:<5}] {said}"
        trace = trace_of(self, record)
        return "\n".join([line, *(one_line(part) for part in trace.split("\n") if part)])

    def format_access(self, line: AccessLine) -> str:
        """Format a line of the access log in the same way, without a log record."""
        return f"{_time(line.created_s)} [INFO ] MainThread {ACCESS_LOGGER} - {one_line(line.message)}"


def add_log_files(directory: Path) -> bool:
    """Write this process's records to the three files as well; call it after `lines.configure`.

    Return whether they could be opened. If not (for example on a read-only file system), a warning is logged
    and no file is written, as in TorchServe.
    """
    remove_log_files()
    try:
        everything = Log4jFormatter()
        files = [
            _LogFile(directory / "access_log.log", _is_access, AccessFormatter()),
            _LogFile(directory / "model_log.log", _is_model, everything),
            _LogFile(directory / "ts_log.log", lambda record: True, everything),
        ]
    except OSError as err:
        logger.warning("no log files in %s: %s", directory, err.strerror)
        return False
    for file in files:
        logging.getLogger().addHandler(file)
    logging.getLogger().handlers.insert(0, _InOrder())
    return True


def remove_log_files() -> None:
    """Close the files that the last `add_log_files` opened."""
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, (_LogFile, _InOrder))]:
        root.removeHandler(old)
        old.close()


def _is_access(record: logging.LogRecord) -> bool:
    return record.name == ACCESS_LOGGER


def _is_model(record: logging.LogRecord) -> bool:
    return hasattr(record, "executor")  # only records of a worker's output have this field


def _origin(record: logging.LogRecord) -> tuple[str, str]:
    """Return the names of thread and logger; for text that a handler prints, those that TorchServe uses."""
    if not _is_model(record):
        return record.threadName or "main", record.name
    fields = vars(record)
    return f"W-{fields['executor']}-{fields.get('model')}_{fields.get('version')}-stdout", MODEL_LOGGER


def _time(created_s: float) -> str:
    """Return local time in log4j's ISO8601 format: a comma before the milliseconds, no time zone."""
    second, microseconds = divmod(round(created_s * 1e6), 1_000_000)
    return f"{_second(second)},{microseconds // 1000:03d}"


@lru_cache(maxsize=2)  # called for each line of the access log
def _second(epoch_s: int) -> str:
    return f"{datetime.fromtimestamp(epoch_s):%Y-%m-%dT%H:%M:%S}"
