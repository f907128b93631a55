"""Format of log lines: JSON or plain text, one line per record, safe from log injection.

Clients choose model names, URLs and request ids, which appear in messages. A newline or an escape sequence in
one must not forge a log line or move the terminal's cursor.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
from collections.abc import Mapping
from datetime import datetime, timezone
from functools import lru_cache
from json.encoder import encode_basestring_ascii as _quoted  # text as json.dumps writes it, but faster
from typing import TYPE_CHECKING, Any, TextIO

from torchere.archiver.errors import one_line
from torchere.serving.logs.access_lines import ACCESS_LOGGER, AccessLine, LineFormatter, TakesAccessLines
from torchere.serving.logs.output import Outlet, SaysWhatIsLost, may_stand_still

if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[TextIO]
else:
    _StreamHandler = logging.StreamHandler  # generic at run time only since Python 3.11

FLUSH_TIMEOUT_S = 2.0  # wait for the reader of standard output, at the end of the process
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
MODEL_LOGGER = "MODEL_LOG"  # TorchServe's name for all that workers log and print
model_log = logging.getLogger(MODEL_LOGGER)  # logs nothing: its level is the least of all lines of workers


class _Handler(TakesAccessLines, SaysWhatIsLost, _StreamHandler):
    """The handler that `configure` installs; a later `configure` replaces only handlers of this class.

    A logging call does not wait for the reader of the stream: see `output.py`.
    """

    def __init__(self, stream: TextIO, lines: LineFormatter) -> None:
        super().__init__(stream)
        self.setFormatter(lines)
        self._lines = lines
        self._outlet: Outlet | None = None
        self._refused = 0  # lines that failed in this class, not in the outlet
        if (descriptor := may_stand_still(stream)) is not None:
            encoding = stream.encoding or "utf-8"
            self._outlet = Outlet(descriptor, encoding, say_lost=self._lost_text, failed=self._failed)
            if isinstance(stream, io.TextIOWrapper):
                # Records bypass its buffer, so they do not flush text that was printed.
                stream.reconfigure(line_buffering=True)

    @property
    def dropped(self) -> int:
        """Lines that were dropped because the stream was blocked or broken."""
        return self._refused + (0 if self._outlet is None else self._outlet.dropped)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or queue it for the writer thread."""
        if self._outlet is None:
            super().emit(record)
            return
        try:
            self._outlet.put(self.format(record) + self.terminator)
        except Exception:  # as logging's own handlers do
            self.handleError(record)

    def flush(self) -> None:
        """Wait until all records are written; at most `FLUSH_TIMEOUT_S` for a stream that may block."""
        if self._outlet is None:
            super().flush()
        else:
            self._outlet.flush(FLUSH_TIMEOUT_S)

    def close(self) -> None:
        """End the writer thread once all records are written, and close the handler."""
        if self._outlet is not None:
            self._outlet.close()
        super().close()

    def _lost_text(self, lines: int) -> str:
        record = logging.makeLogRecord(
            {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING"}
            | {"msg": "%d lines of the log are lost: the output did not take them in time", "args": (lines,)}
        )
        return self.format(record) + self.terminator

    def _failed(self) -> None:
        super().handleError(logging.makeLogRecord({"msg": "lines of the log"}))

    def handleError(self, record: logging.LogRecord) -> None:
        """Count the record as a dropped line, and report the error."""
        self._refused += 1
        super().handleError(record)

    def access_text(self, line: AccessLine) -> str:
        """Return the text of a line of the access log."""
        return self._lines.format_access(line) + "\n"

    def write_access(self, text: str, lines: int) -> None:
        """Write the text of many lines of the access log at once."""
        if self._outlet is not None:
            self._outlet.put(text, lines)
            return
        with self.lock or contextlib.nullcontext():
            try:
                self.stream.write(text)
                self.flush()
            except (OSError, ValueError):  # the reader or the stream is closed: handled as for a record
                self._refused += lines
                super().handleError(logging.makeLogRecord({"msg": f"{lines} lines of the access log"}))


class JsonFormatter(LineFormatter):
    """One JSON object per line: time, level, logger, message, the fields of `extra=`, then the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without its line end. Extra fields that JSON lacks are converted by `str`."""
        fields: dict[str, Any] = {
            "time": _utc(record.created, 6),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in extras_of(record).items():
            fields.setdefault(name, _plain(value))
        if trace := trace_of(self, record):
            fields["exception"] = trace
        # JSON allows a raw DEL, but a terminal should not get one; it can only occur inside a string.
        return json.dumps(fields).replace("\x7f", "\\u007f")

    def format_access(self, line: AccessLine) -> str:
        """Format a line of the access log in the same way, without a log record."""
        # Lines of one connection often differ only in status and time, so the rest of the text is cached.
        ids = f', "request_id": {_quoted_json(line.request_id)}' if line.request_id else ""
        if line.trace is not None:
            ids += f', "trace_id": "{line.trace.trace_id}"'
        if line.version is not None:
            ids += _version_json(line.version.model, line.version.version)
        return (
            f'{{"time": "{_utc(line.created_s, 6)}", "level": "INFO", '
            f'"logger": "{ACCESS_LOGGER}", "message": "{_inside(line.asked)} {line.status} '
            f'{line.elapsed_ms}"{ids}}}'
        )


class TextFormatter(LineFormatter):
    """`time LEVEL logger: message name=value ...`; a traceback follows on lines that begin with a bar."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without its line end."""
        extras = "".join(f" {name}={value!s}" for name, value in extras_of(record).items())
        said = one_line(f"{record.name}: {record.getMessage()}{extras}")
        line = f"{_utc(record.created, 3)} {record.levelname:<7} {said}"
        trace = trace_of(self, record)
        return "\n".join([line, *(f"  | {one_line(part)}" for part in trace.split("\n") if part)])

    def format_access(self, line: AccessLine) -> str:
        """Format a line of the access log in the same way, without a log record."""
        ids = "".join([f" {name}={value}" for name, value in line.ids.items()])
        return f"{_utc(line.created_s, 3)} INFO    {ACCESS_LOGGER}: {one_line(line.message + ids)}"


def configure(level: str, json_lines: bool, stream: TextIO, *, lines: LineFormatter | None = None) -> None:
    """Send every log record of at least this level, from this process, to the stream.

    Call it before other threads log. A second call replaces the handler of the first. The stream, usually
    standard output, is flushed after every write; one that may block, such as a pipe, is written by a
    separate thread, and printed text is flushed after each line. `lines` formats in place of JSON or text.

    Raises:
        ValueError: the level is not in `LEVELS`.
    """
    name = level.upper()
    if name not in LEVELS:
        raise ValueError(f"log level: found {level!r}, expected one of {', '.join(LEVELS)}")
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")  # for characters that the encoding lacks
    handler = _Handler(stream, lines or (JsonFormatter() if json_lines else TextFormatter()))
    if (shows := getattr(lines, "shows", None)) is not None:
        handler.addFilter(shows)
    root = logging.getLogger()
    for old in _installed():
        root.removeHandler(old)
        old.flush()
        old.close()
    root.addHandler(handler)
    root.setLevel(name)
    # No formatter here uses these fields, so logging need not collect them (logging HOWTO, "Optimization").
    logging.logProcesses = logging.logMultiprocessing = False


def formatter() -> logging.Formatter | None:
    """Return the formatter of the stream that `configure` has set up; None before."""
    return next((handler.formatter for handler in _installed()), None)


def say(line: str) -> None:
    """Write a plain line to the stream of the log records, in order; before `configure`, print it."""
    ours = _installed()
    for handler in ours:
        handler.write_access(f"{line}\n", 1)
    if not ours:
        print(line, flush=True)


def lost_lines() -> int:
    """Return how many log lines of this process were dropped because the stream was blocked or broken."""
    return sum(handler.dropped for handler in _installed())


def _installed() -> list[_Handler]:
    """Return the handlers of `configure`: one, or none before."""
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, _Handler)]


def _plain(value: object) -> object:
    """Return the value if JSON can represent it, else its `str`; NaN and infinity are not JSON."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)


def _quoted_json(text: str) -> str:
    """Return the text as a JSON string that is safe to show in a terminal."""
    return _quoted(text).replace("\x7f", "\\u007f")


@lru_cache(maxsize=512)  # few different texts are logged
def _inside(text: str) -> str:
    """Return `_quoted_json` of the text without the enclosing quotes."""
    return _quoted_json(text)[1:-1]


@lru_cache(maxsize=512)
def _version_json(model: str, version: str) -> str:
    """Return the JSON fields `model` and `version`, which follow the other ids of a line."""
    return f', "model": {_quoted_json(model)}, "version": {_quoted_json(version)}'


def _utc(created_s: float, digits: int) -> str:
    """Return the time in UTC, with up to 6 digits after the second; the text of the second is cached."""
    second, microseconds = divmod(round(created_s * 1e6), 1_000_000)
    return f"{_second(second)}.{f'{microseconds:06d}'[:digits]}Z"


@lru_cache(maxsize=2)
def _second(epoch_s: int) -> str:
    return datetime.fromtimestamp(epoch_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")


OWN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""The attributes of a log record. `taskName` came with Python 3.12."""

_HIDDEN_PREFIX = "_"  # extras for other handlers
AT_START = {"_at_start": True}  # extra of records whose text the summary of a start repeats


def extras_of(record: logging.LogRecord) -> Mapping[str, Any]:
    """Return the fields of `extra=` by name, except names that begin with `_HIDDEN_PREFIX`."""
    return {
        name: value
        for name, value in vars(record).items()
        if name not in OWN_FIELDS and not name.startswith(_HIDDEN_PREFIX)
    }


def trace_of(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """Return the traceback and the stack of a record from any process, or "" if it has none."""
    parts = []
    if record.exc_info:
        parts.append(formatter.formatException(record.exc_info))
    elif record.exc_text:
        parts.append(record.exc_text)  # a record from another process
    if record.stack_info:
        parts.append(formatter.formatStack(record.stack_info))
    return "\n".join(parts)
