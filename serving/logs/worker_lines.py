"""Log records of a worker process on their way to the server's log: whole, and with their level.

A worker has nothing but its output. What its handler prints is lines of text; what it logs goes there as one
line of JSON behind a mark, so that a traceback stays in one piece and an error stays an error. The mark holds
a token that only the server and the worker's formatter know: handlers print what clients send them, and a
client that sends what looks like a record must not speak in the name of the server.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from torchere.serving.logs.lines import OWN_FIELDS, extras_of, trace_of

SEPARATOR = "\x1e"  # ASCII's record separator: nobody prints it by accident
MAX_TEXT_CHARACTERS = 6000  # of a message, a traceback or an extra
MAX_LINE_BYTES = 8192  # the server cuts a longer one into pieces of this size, and a piece is no record


def new_token() -> str:
    """What records of one worker are known by."""
    return secrets.token_hex(8)


class WorkerFormatter(logging.Formatter):
    """One marked line a record; the server takes it for one as soon as `token` is that of the worker.

    Args:
        origin: what records of the calling thread say of where they came from, where threads differ in that.
    """

    token = ""

    def __init__(self, origin: Callable[[], Mapping[str, str]] = dict) -> None:
        super().__init__()
        self._origin = origin

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end, at most `MAX_LINE_BYTES` long; texts lose their middle for that."""
        longest = MAX_TEXT_CHARACTERS
        while len(line := self._line(record, longest)) > MAX_LINE_BYTES and longest > 1:
            longest //= 2  # JSON takes 6 or 12 bytes for a character that is not ASCII
        return line

    def _line(self, record: logging.LogRecord, longest: int) -> str:
        extra = {**extras_of(record), **self._origin()}
        fields = {
            "level": min(max(record.levelno, logging.NOTSET), logging.CRITICAL),
            "logger": record.name,
            "message": _shortened(record.getMessage(), longest),
            "exception": _shortened(trace_of(self, record), longest),
            "extra": {name: _shortened(str(value), longest) for name, value in extra.items()},
        }
        return f"{SEPARATOR}{self.token}{json.dumps(fields)}"


async def relay_all(
    output: asyncio.StreamReader,
    token: str,
    origin: Mapping[str, object] | Callable[[], Mapping[str, object]],
    plain: logging.Logger,
) -> None:
    """Log each line of a worker's output as `relay` does, until the output ends.

    `origin` is a function for a process that several models share: it says what is known of any line, and
    records say the rest themselves.
    """
    rest = b""
    while chunk := await output.read(65536):
        *lines, rest = (rest + chunk).split(b"\n")
        while len(rest) > MAX_LINE_BYTES:
            lines.append(rest[:MAX_LINE_BYTES])
            rest = rest[MAX_LINE_BYTES:]
        _relay_each(lines, token, origin, plain)
    _relay_each([rest] if rest else [], token, origin, plain)


def _relay_each(
    lines: Sequence[bytes],
    token: str,
    origin: Mapping[str, object] | Callable[[], Mapping[str, object]],
    plain: logging.Logger,
) -> None:
    is_shared = callable(origin)
    known = origin() if callable(origin) else origin
    for line in lines:
        try:
            relay(line.decode(errors="replace"), token, known, plain, is_shared=is_shared)
        except Exception:  # reading goes on whatever it is: a worker whose pipe is full hangs
            with suppress(Exception):
                plain.exception("a line of worker %s could not be logged", known.get("executor"))


def relay(
    line: str, token: str, origin: Mapping[str, object], plain: logging.Logger, *, is_shared: bool = False
) -> None:
    """Log one line of a worker's output here: a record in it as what it was, anything else as text at INFO.

    Args:
        line: without its end.
        token: that of the worker's formatter.
        origin: what every record says of where it came from; wins over what the worker says.
        plain: the logger for what is no record.
        is_shared: several models have the process, and it knows better which one it was: its word wins.
    """
    printed, mark, fields = line.partition(f"{SEPARATOR}{token}")  # progress bars end no line
    record = _record(fields, origin, is_shared) if mark else None
    if record is None:
        plain.info("%s", line, extra=dict(origin))
        return
    if printed:
        plain.info("%s", printed, extra=dict(origin))
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


def _record(text: str, origin: Mapping[str, object], is_shared: bool) -> logging.LogRecord | None:
    try:
        fields = json.loads(text)
        level, name = fields["level"], str(fields["logger"])
        message, exception = str(fields["message"]), str(fields["exception"])
        extra = {str(key): value for key, value in dict(fields["extra"]).items() if key not in OWN_FIELDS}
    except (ValueError, KeyError, TypeError, RecursionError):  # cut, or not ours after all
        return None
    if type(level) is not int or not logging.NOTSET <= level <= logging.CRITICAL:
        return None
    level_name = logging.getLevelName(level)
    return logging.makeLogRecord(
        {"levelno": level, "levelname": level_name, "name": name, "msg": "%s", "args": (message,)}
        | {"exc_text": exception or None}
        | (dict(origin) | extra if is_shared else extra | dict(origin))
    )


def _shortened(text: str, longest: int) -> str:
    """The text, or its beginning and its longer end, where a traceback says what it is about."""
    if len(text) <= longest:
        return text
    head = longest // 4
    return f"{text[:head]}\n[...]\n{text[head - longest :]}"
