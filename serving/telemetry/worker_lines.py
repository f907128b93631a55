"""Log records of a worker process on their way to the server's log: whole, and with their level.

A worker has nothing but its output. What its handler prints is lines of text; what it logs goes there as one
line of JSON behind a mark, so that a traceback stays in one piece and an error stays an error. The mark holds
a token that only the server and the worker's formatter know: handlers print what clients send them, and a
client that sends what looks like a record must not speak in the name of the server.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping

SEPARATOR = "\x1e"  # ASCII's record separator: nobody prints it by accident
MAX_TEXT_CHARACTERS = 6000  # of a message or a traceback; the server cuts lines that are longer than 8 KB
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def new_token() -> str:
    """What records of one worker are known by."""
    return secrets.token_hex(8)


class WorkerFormatter(logging.Formatter):
    """One marked line a record; the server takes it for one as soon as `token` is that of the worker."""

    token = ""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        trace = self.formatException(record.exc_info) if record.exc_info else record.exc_text or ""
        fields = {
            "level": min(max(record.levelno, logging.NOTSET), logging.CRITICAL),
            "logger": record.name,
            "message": _shortened(record.getMessage()),
            "exception": _shortened(trace),
            "extra": {
                name: str(value)
                for name, value in vars(record).items()
                if name not in _STANDARD and not name.startswith("_")
            },
        }
        return f"{SEPARATOR}{self.token}{json.dumps(fields)}"


def relay(line: str, token: str, origin: Mapping[str, object], plain: logging.Logger) -> None:
    """Log one line of a worker's output here: a record of it as what it was, anything else as text at INFO.

    Args:
        line: without its end.
        token: that of the worker's formatter.
        origin: what every record says of where it came from; wins over what the worker says.
        plain: the logger for what is no record.
    """
    mark = f"{SEPARATOR}{token}"
    record = _record(line.removeprefix(mark), origin) if line.startswith(mark) else None
    if record is None:
        plain.info("%s", line, extra=dict(origin))
        return
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


def _record(text: str, origin: Mapping[str, object]) -> logging.LogRecord | None:
    try:
        fields = json.loads(text)
        level, name = fields["level"], str(fields["logger"])
        message, exception = str(fields["message"]), str(fields["exception"])
        extra = {str(key): value for key, value in dict(fields["extra"]).items() if key not in _STANDARD}
    except (ValueError, KeyError, TypeError, RecursionError):  # cut, or not ours after all
        return None
    if type(level) is not int or not logging.NOTSET <= level <= logging.CRITICAL:
        return None
    level_name = logging.getLevelName(level)
    return logging.makeLogRecord(
        {"levelno": level, "levelname": level_name, "name": name, "msg": "%s", "args": (message,)}
        | {"exc_text": exception or None}
        | extra
        | dict(origin)
    )


def _shortened(text: str) -> str:
    """The text, or its beginning and its longer end, where a traceback says what it is about."""
    if len(text) <= MAX_TEXT_CHARACTERS:
        return text
    head = MAX_TEXT_CHARACTERS // 4
    return f"{text[:head]}\n[...]\n{text[head - MAX_TEXT_CHARACTERS :]}"
