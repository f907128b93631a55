"""What log lines look like: JSON for machines, one readable line for people, forged by nobody.

Clients choose model names, URLs and request ids that end up in messages; a newline or an escape sequence
among them must not look like a line of ours, or move the terminal's cursor.
"""

from __future__ import annotations

import io
import json
import logging
import math
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[TextIO]
else:
    _StreamHandler = logging.StreamHandler  # takes a parameter at run time from Python 3.11 on only

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

_OWN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_HIDDEN_PREFIX = "_"  # extras for other handlers


class _Handler(_StreamHandler):
    """Ours, so that configuring again replaces it and leaves the handlers of others alone."""


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, then what `extra=` gave, then the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end. An extra that JSON has no form for is shown by its `str`."""
        fields: dict[str, Any] = {
            "time": _utc(record.created, "microseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in _extras(record).items():
            fields.setdefault(name, _plain(value))
        if trace := _trace(self, record):
            fields["exception"] = trace
        # JSON may hold DEL as it is, a terminal should not; it can only stand inside of a string.
        return json.dumps(fields).replace("\x7f", "\\u007f")


class TextFormatter(logging.Formatter):
    """`time LEVEL logger: message name=value ...`; a traceback follows on lines that begin with a bar."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        extras = "".join(f" {escape(name)}={escape(str(value))}" for name, value in _extras(record).items())
        moment = _utc(record.created, "milliseconds")
        line = f"{moment} {record.levelname:<7} {escape(record.name)}: {escape(record.getMessage())}{extras}"
        trace = _trace(self, record)
        return "\n".join([line, *(f"  | {escape(part)}" for part in trace.split("\n") if part)])


def configure(level: str, json_lines: bool, stream: TextIO) -> None:
    """Send every log record of this process of at least this level to the stream.

    Call it before other threads log. Calling it again replaces what the last call did.

    Args:
        level: One of `LEVELS`, in any case.
        json_lines: One JSON object a line; otherwise text for people.
        stream: Usually standard output; flushed after each line.

    Raises:
        ValueError: the level is none of `LEVELS`.
    """
    name = level.upper()
    if name not in LEVELS:
        raise ValueError(f"log level: found {level!r}, expected one of {', '.join(LEVELS)}")
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")  # a line is never lost to a narrow encoding
    handler = _Handler(stream)
    handler.setFormatter(JsonFormatter() if json_lines else TextFormatter())
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, _Handler)]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(name)
    # What no line of ours shows need not be found out for every record (the logging HOWTO, "Optimization").
    logging.logProcesses = logging.logMultiprocessing = False


def escape(text: str) -> str:
    r"""The text on one line: line ends, control and invisible characters as `\n`, `\x1b`, `\u202e` ..."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def _extras(record: logging.LogRecord) -> Mapping[str, Any]:
    return {
        name: value
        for name, value in vars(record).items()
        if name not in _OWN_FIELDS and not name.startswith(_HIDDEN_PREFIX)
    }


def _plain(value: object) -> object:
    """The value if JSON has it, its `str` otherwise; NaN and infinity are not JSON."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = []
    if record.exc_info:
        parts.append(formatter.formatException(record.exc_info))
    elif record.exc_text:
        parts.append(record.exc_text)  # a record that came from another process
    if record.stack_info:
        parts.append(formatter.formatStack(record.stack_info))
    return "\n".join(parts)


def _utc(created: float, timespec: str) -> str:
    moment = datetime.fromtimestamp(created, timezone.utc).replace(tzinfo=None)
    return f"{moment.isoformat(timespec=timespec)}Z"
