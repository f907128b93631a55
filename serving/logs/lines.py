"""What log lines look like: JSON for machines, one readable line for people, forged by nobody.

Clients choose model names, URLs and request ids that end up in messages; a newline or an escape sequence
among them must not look like a line of ours, or move the terminal's cursor.
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
from json.encoder import encode_basestring_ascii as _quoted  # text as json.dumps writes it, sooner
from typing import TYPE_CHECKING, Any, TextIO

from torchere.serving.logs.access_lines import AccessLine, LineFormatter
from torchere.serving.logs.output import Outlet, SaysWhatIsLost, may_stand_still

if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[TextIO]
else:
    _StreamHandler = logging.StreamHandler  # takes a parameter at run time from Python 3.11 on only

ACCESS_LOGGER = "ACCESS_LOG"
FLUSH_TIMEOUT_S = 2.0  # for the reader of standard output, at the end of the process
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class _Handler(SaysWhatIsLost, _StreamHandler):
    """Ours, so that configuring again replaces it and leaves the handlers of others alone.

    Who logs does not wait for whoever reads the stream: see `outlet.py`.
    """

    def __init__(self, stream: TextIO, lines: LineFormatter) -> None:
        super().__init__(stream)
        self.setFormatter(lines)
        self._lines = lines
        self._outlet: Outlet | None = None
        if (descriptor := may_stand_still(stream)) is not None:
            encoding = stream.encoding or "utf-8"
            self._outlet = Outlet(descriptor, encoding, say_lost=self._lost_text, failed=self._failed)
            if isinstance(stream, io.TextIOWrapper):
                # Records pass its buffer by, so that they do not flush what was printed.
                stream.reconfigure(line_buffering=True)

    @property
    def dropped(self) -> int:
        """How many lines were lost because nobody read the stream."""
        return 0 if self._outlet is None else self._outlet.dropped

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or have it written."""
        if self._outlet is None:
            super().emit(record)
            return
        try:
            self._outlet.put(self.format(record) + self.terminator)
        except Exception:  # as logging's own handlers do
            self.handleError(record)

    def flush(self) -> None:
        """Wait until what was logged is written, but not for ever: a server has to end."""
        if self._outlet is None:
            super().flush()
        else:
            self._outlet.flush(FLUSH_TIMEOUT_S)

    def close(self) -> None:
        """Take no more."""
        if self._outlet is not None:
            self._outlet.close()
        super().close()

    def _lost_text(self, lines: int) -> str:
        record = logging.makeLogRecord(
            {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING"}
            | {"msg": "%d lines of the log are lost: nobody took them in time", "args": (lines,)}
        )
        return self.format(record) + self.terminator

    def _failed(self) -> None:
        self.handleError(logging.makeLogRecord({"msg": "lines of the log"}))

    def access_text(self, line: AccessLine) -> str:
        """The text of a line of the access log."""
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
            except (OSError, ValueError):  # nobody reads any more, or it is closed: as with any other line
                self.handleError(logging.makeLogRecord({"msg": f"{lines} lines of the access log"}))


class JsonFormatter(LineFormatter):
    """One JSON object a line: time, level, logger, message, then what `extra=` gave, then the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end. An extra that JSON has no form for is shown by its `str`."""
        fields: dict[str, Any] = {
            "time": _utc(record.created, "microseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in extras_of(record).items():
            fields.setdefault(name, _plain(value))
        if trace := trace_of(self, record):
            fields["exception"] = trace
        # JSON may hold DEL as it is, a terminal should not; it can only stand inside of a string.
        return json.dumps(fields).replace("\x7f", "\\u007f")

    def format_access(self, line: AccessLine) -> str:
        """The same for a line of the access log, without a record."""
        # All but the two numbers is the same for a connection's requests, and numbers need no escapes.
        second, microseconds = _second_and_rest(line.created_s)
        ids = f', "request_id": {_quoted_json(line.request_id)}' if line.request_id else ""
        if line.trace is not None:
            ids += f', "trace_id": "{line.trace.trace_id}"'
        if line.version is not None:
            ids += _version_json(line.version.model, line.version.version)
        return (
            f'{{"time": "{second}.{microseconds:06d}Z", "level": "INFO", '
            f'"logger": "{ACCESS_LOGGER}", "message": "{_inside(line.asked)} {line.status} '
            f'{line.elapsed_ms}"{ids}}}'
        )


class TextFormatter(LineFormatter):
    """`time LEVEL logger: message name=value ...`; a traceback follows on lines that begin with a bar."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        extras = "".join(f" {escape(name)}={escape(str(value))}" for name, value in extras_of(record).items())
        moment = _utc(record.created, "milliseconds")
        line = f"{moment} {record.levelname:<7} {escape(record.name)}: {escape(record.getMessage())}{extras}"
        trace = trace_of(self, record)
        return "\n".join([line, *(f"  | {escape(part)}" for part in trace.split("\n") if part)])

    def format_access(self, line: AccessLine) -> str:
        """The same for a line of the access log, without a record."""
        ids = "".join([f" {name}={escape(value)}" for name, value in line.ids.items()])
        second, microseconds = _second_and_rest(line.created_s)
        moment = f"{second}.{microseconds // 1000:03d}Z"
        return f"{moment} INFO    {ACCESS_LOGGER}: {escape(line.message)}{ids}"


def configure(level: str, json_lines: bool, stream: TextIO, *, lines: LineFormatter | None = None) -> None:
    """Send every log record of this process of at least this level to the stream.

    Call it before other threads log. Calling it again replaces what the last call did.

    Args:
        level: One of `LEVELS`, in any case.
        json_lines: One JSON object a line; otherwise text for people.
        stream: Usually standard output; nothing stays in its buffer. What may stand still, as a pipe, is
            written to by a thread, and what is printed to it goes out line by line, as its reader takes it.
        lines: Another form of line than these two.

    Raises:
        ValueError: the level is none of `LEVELS`.
    """
    name = level.upper()
    if name not in LEVELS:
        raise ValueError(f"log level: found {level!r}, expected one of {', '.join(LEVELS)}")
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")  # a line is never lost to a narrow encoding
    handler = _Handler(stream, lines or (JsonFormatter() if json_lines else TextFormatter()))
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, _Handler)]:
        root.removeHandler(old)
        old.flush()
        old.close()
    root.addHandler(handler)
    root.setLevel(name)
    # What no line of ours shows need not be found out for every record (the logging HOWTO, "Optimization").
    logging.logProcesses = logging.logMultiprocessing = False


def say(line: str) -> None:
    """Write a line that is no record to where records go, in its turn; before `configure` print it."""
    ours = [handler for handler in logging.getLogger().handlers if isinstance(handler, _Handler)]
    for handler in ours:
        handler.write_access(f"{line}\n", 1)
    if not ours:
        print(line, flush=True)


def lost_lines() -> int:
    """How many lines of this process's log were lost because nobody read them."""
    return sum(handler.dropped for handler in logging.getLogger().handlers if isinstance(handler, _Handler))


def escape(text: str) -> str:
    r"""The text on one line: line ends, control and invisible characters as `\n`, `\x1b`, `\u202e` ..."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def _plain(value: object) -> object:
    """The value if JSON has it, its `str` otherwise; NaN and infinity are not JSON."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)


def _quoted_json(text: str) -> str:
    """The text as a JSON string that a terminal can show."""
    return _quoted(text).replace("\x7f", "\\u007f")


@lru_cache(maxsize=512)  # the same few texts come again and again
def _inside(text: str) -> str:
    """What stands between the quotes of such a string."""
    return _quoted_json(text)[1:-1]


@lru_cache(maxsize=512)
def _version_json(model: str, version: str) -> str:
    """The last of a line's ids, as they stand behind the others."""
    return f', "model": {_quoted_json(model)}, "version": {_quoted_json(version)}'


def _second_and_rest(created_s: float) -> tuple[str, int]:
    """The time to the second, whose text is found out once, and the microseconds after it."""
    second, microseconds = divmod(round(created_s * 1e6), 1_000_000)
    return _second(second), microseconds


@lru_cache(maxsize=2)
def _second(epoch_s: int) -> str:
    return datetime.fromtimestamp(epoch_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")


def _utc(created: float, timespec: str) -> str:
    moment = datetime.fromtimestamp(created, timezone.utc).replace(tzinfo=None)
    return f"{moment.isoformat(timespec=timespec)}Z"


OWN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""What a record is made of. `taskName` came with Python 3.12."""

_HIDDEN_PREFIX = "_"  # extras for other handlers


def extras_of(record: logging.LogRecord) -> Mapping[str, Any]:
    """What `extra=` gave, by name."""
    return {
        name: value
        for name, value in vars(record).items()
        if name not in OWN_FIELDS and not name.startswith(_HIDDEN_PREFIX)
    }


def trace_of(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """The traceback and the stack of a record of this process or another; "" without."""
    parts = []
    if record.exc_info:
        parts.append(formatter.formatException(record.exc_info))
    elif record.exc_text:
        parts.append(record.exc_text)  # a record that came from another process
    if record.stack_info:
        parts.append(formatter.formatStack(record.stack_info))
    return "\n".join(parts)
