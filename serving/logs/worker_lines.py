"""Transfers log records of a worker process to the server's log, unsplit and with their level.

A worker can send log records only through its output stream, to which its handler also prints text. A log
record is written as one line of JSON after a mark, so that a traceback stays in one piece and an error keeps
its level. The mark contains a token that only the server and the worker's formatter know: handlers print text
from clients, and a client must not be able to forge a log record.

A line or message that TorchServe reads as a metric's value is read so here, too. It needs no token, because a
handler's child processes have none; so clients can forge values if a handler prints their text as lines.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeAlias

from torchere.handlers.metrics import MetricSample
from torchere.serving.io.loop_time import TURN_S, LoopShare
from torchere.serving.logs.lines import OWN_FIELDS, extras_of, model_log, trace_of

SEPARATOR = "\x1e"  # ASCII's record separator, which is rarely printed
MAX_TEXT_CHARACTERS = 6000  # per message, traceback or extra field
REPEATS_WITHIN_S = 30.0  # the workers of a version load at about the same time
_MOST_TOLD = 1000
MAX_LINE_BYTES = 8192  # the server splits longer lines, and a part of a line is not a record
# Loggers of the server that have their own format or file. Handlers must not write to them.
SERVER_LOGGERS = frozenset({"ACCESS_LOG", "AUDIT_LOG", "MODEL_METRICS", "TS_METRICS", "TELEMETRY_METRICS"})
# Python keeps each logger, and one for each dot of its name, for as long as the process runs.
MAX_LOGGERS = 1000  # for all workers together
MAX_LOGGER_CHARACTERS = 200
MAX_LOGGER_DOTS = 16
_METRIC_MARKS = ("[METRICS]", "INFO > [METRICS]")
# TorchServe's pattern of a metric's value, which scripts for `system_metrics_cmd` print as well.
_METRIC = re.compile(
    r"\s*(?P<name>\w[\w\s]*)\.(?P<unit>[\w\s]+):(?P<value>[0-9\-+,.e]+)\|#(?P<labels>[^|]*)"
    r"(\|#type:(?P<kind>[^|,]+))?\|#hostname:[^,]+,[^,]+(,(?P<ids>.*))?"
)

Report: TypeAlias = Callable[[Sequence[MetricSample]], None]


def new_token() -> str:
    """Return a new token that marks the records of one worker."""
    return secrets.token_hex(8)


def print_whole_lines() -> None:
    """Make this process write each line that it prints in one piece, as soon as the line is complete.

    If the output is a pipe, Python holds back 8 KiB, which a crash loses. Without any buffer
    (`PYTHONUNBUFFERED`) `print` writes each argument separately, and those of several ranks are mixed.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a handler may have replaced it
            stream.reconfigure(line_buffering=True, write_through=False)


class WorkerFormatter(logging.Formatter):
    """Formats a record as one marked line, which the server accepts if `token` is the worker's token.

    Args:
        origin: returns fields that name the origin of the calling thread's records, if it differs by thread.
    """

    token = ""
    rank = ""  # rank of this process, if its worker has several processes

    def __init__(self, origin: Callable[[], Mapping[str, str]] = dict) -> None:
        super().__init__()
        self._origin = origin

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without its line end; long texts lose their middle, to fit `MAX_LINE_BYTES`."""
        longest = MAX_TEXT_CHARACTERS
        while len(line := self._line(record, longest)) > MAX_LINE_BYTES and longest > 1:
            longest //= 2  # JSON uses 6 or 12 bytes for a character that is not ASCII
        return line

    def _line(self, record: logging.LogRecord, longest: int) -> str:
        extra = {**extras_of(record), **self._origin(), **({"rank": self.rank} if self.rank else {})}
        fields = {
            "level": min(max(record.levelno, logging.NOTSET), logging.CRITICAL),
            "logger": record.name,
            "message": _shortened(record.getMessage(), longest),
            "exception": _shortened(trace_of(self, record), longest),
            "extra": {name: _shortened(str(value), longest) for name, value in extra.items()},
        }
        return f"{SEPARATOR}{self.token}{json.dumps(fields)}"


def name_rank(rank: int) -> None:
    """Give the log records of this process a field with the number of its rank."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, WorkerFormatter):
            handler.formatter.rank = str(rank)


share = LoopShare()  # for all workers' lines, about 30 us each; when it is used up, handlers wait in `print`


async def relay_all(
    output: asyncio.StreamReader,
    token: str,
    origin: Mapping[str, object] | Callable[[], Mapping[str, object]],
    plain: logging.Logger,
    has_ended: Callable[[], bool],
    *,
    report: Report | None = None,
) -> None:
    """Call `relay` for each line of a worker's output, until the output ends.

    Metric values among the lines are given to `report`; without it they are logged like other lines.

    For a process that several models share, `origin` is a function: it returns the fields that apply to every
    line, and each record contains the other fields. Once the process `has_ended`, its last lines do not wait
    for their share of the loop's time: they are no more than a pipe and a buffer hold.
    """

    async def relay_each(lines: Sequence[bytes]) -> None:
        waiting = deque(lines)
        while waiting:
            while (wait_s := share.wait_s()) > 0 and not has_ended():
                await asyncio.sleep(wait_s)
            began_s = time.monotonic()
            known = origin() if callable(origin) else origin
            while waiting and time.monotonic() - began_s < TURN_S:
                text = waiting.popleft().decode(errors="replace")
                try:
                    relay(text, token, known, plain, is_shared=callable(origin), report=report)
                except Exception:  # keep reading after any error: a worker whose pipe is full hangs
                    with suppress(Exception):
                        plain.exception("a line of worker %s could not be logged", known.get("executor"))
            share.spend(time.monotonic() - began_s)
            if waiting:
                await asyncio.sleep(0)

    rest = b""
    while chunk := await output.read(65536):
        *lines, rest = (rest + chunk).split(b"\n")
        while len(rest) > MAX_LINE_BYTES:
            lines.append(rest[:MAX_LINE_BYTES])
            rest = rest[MAX_LINE_BYTES:]
        await relay_each(lines)
    await relay_each([rest] if rest else [])


def relay(
    line: str,
    token: str,
    origin: Mapping[str, object],
    plain: logging.Logger,
    *,
    is_shared: bool = False,
    report: Report | None = None,
) -> None:
    """Log one line of a worker's output: a record by its own logger and level, other text by `plain`.

    The fields of `origin` identify the worker, and override those of the record. In a process that several
    models share (`is_shared`) the worker knows which model a record belongs to, so its fields take
    precedence. If the line, or the record's message, is a metric's value, `report` gets it, and it is not
    logged.
    """
    printed, mark, fields = line.partition(f"{SEPARATOR}{token}")  # `printed`: such as a progress bar
    record = _record(fields, origin, is_shared) if mark else None
    if record is None:
        if not _is_reported(line, report):
            _print(line, origin, plain)
        return
    if printed:
        _print(printed, origin, plain)
    if _is_reported(record.getMessage(), report):
        return
    if record.name.partition(".")[0] in SERVER_LOGGERS:
        record.name = plain.name
    logger = _logger_of(record.name)
    # The worker drops records below INFO unless its handler sets a lower level. So a record that arrives is
    # wanted, and only a level above INFO, which an operator sets, suppresses it.
    level = logger.getEffectiveLevel()
    is_wanted = record.levelno >= level or level <= logging.INFO
    if is_wanted and record.levelno >= model_log.level and not _repeats(record):
        logger.handle(record)


def _is_reported(text: str, report: Report | None) -> bool:
    """If the text is a metric's value, report the value; return whether it was reported."""
    if not text.startswith(_METRIC_MARKS) or report is None:
        return False
    sample = metric_of(text.partition("]")[2])
    if sample is not None:
        report([sample])
    return sample is not None


def metric_of(text: str) -> MetricSample | None:
    """Return the value of `Name.Unit:value|#label:text,...|#type:KIND|#hostname:host,seconds,ids`, or None.

    Without `#type`, which not all of TorchServe's lines have, the sample has the type "".
    """
    match = _METRIC.fullmatch(text)
    if match is None:
        return None
    try:
        value = float(match["value"])
    except ValueError:  # such as "1,5"
        return None
    labels = [label.partition(":") for label in match["labels"].split(",") if label]
    dimensions = tuple((name, label) for name, _, label in labels)
    ids = tuple(filter(None, (match["ids"] or "").split(",")))
    kind = (match["kind"] or "").lower()
    return MetricSample(match["name"].strip(), value, match["unit"].strip(), kind, dimensions, ids)


def _print(line: str, origin: Mapping[str, object], plain: logging.Logger) -> None:
    """Log text at INFO, without `Logger.info`, which spends half of the time on finding its caller."""
    if plain.isEnabledFor(logging.INFO) and model_log.level <= logging.INFO:
        plain.handle(_made(logging.INFO, plain.name, line, origin))


def _made(level: int, name: str, message: str, fields: Mapping[str, object]) -> logging.LogRecord:
    return logging.makeLogRecord(
        {"levelno": level, "levelname": logging.getLevelName(level), "name": name}
        | {"msg": "%s", "args": (message,)}
        | dict(fields)
    )


_named: set[str] = set()  # loggers that records of workers have named


def _logger_of(name: str) -> logging.Logger:
    """Return the logger of that name; for further or very long names the root logger, to bound the memory.

    Loggers of handlers are made here, because only those that exist can be given a level.
    """
    if name not in _named:
        is_short = len(name) <= MAX_LOGGER_CHARACTERS and name.count(".") <= MAX_LOGGER_DOTS
        if not is_short or len(_named) >= MAX_LOGGERS:
            return logging.getLogger()
        _named.add(name)
    return logging.getLogger(name)


_told_s: dict[tuple[object, ...], float] = {}  # warnings of loads: when each was logged, monotonic


def _repeats(record: logging.LogRecord) -> bool:
    """Return whether another worker of the version has just logged this warning: all load the same files.

    A warning that names its request, or that a handler's own logger wrote, is never a repetition.
    """
    is_ours = record.name.partition(".")[0] == "torchere"
    if not is_ours or record.levelno != logging.WARNING or hasattr(record, "request_id"):
        return False
    origin = (getattr(record, "model", None), getattr(record, "version", None))
    key = (*origin, record.name, record.getMessage(), record.exc_text)
    now_s = time.monotonic()
    if now_s - _told_s.get(key, -REPEATS_WITHIN_S) < REPEATS_WITHIN_S:
        return True
    if len(_told_s) >= _MOST_TOLD:
        _told_s.clear()
    _told_s[key] = now_s
    return False


def _record(text: str, origin: Mapping[str, object], is_shared: bool) -> logging.LogRecord | None:
    try:
        fields = json.loads(text)
        level, name = fields["level"], str(fields["logger"])
        message, exception = str(fields["message"]), str(fields["exception"])
        extra = {str(key): value for key, value in dict(fields["extra"]).items() if key not in OWN_FIELDS}
    except (ValueError, KeyError, TypeError, RecursionError):  # cut off, or not a record
        return None
    if type(level) is not int or not logging.NOTSET <= level <= logging.CRITICAL:
        return None
    known = dict(origin) | extra if is_shared else extra | dict(origin)
    return _made(level, name, message, {"exc_text": exception or None} | known)


def _shortened(text: str, longest: int) -> str:
    """Return about `longest` characters of the text at most; a longer text loses its middle.

    Three quarters of the result are from the end, where a traceback names its error.
    """
    if len(text) <= longest:
        return text
    head = longest // 4
    return f"{text[:head]}\n[...]\n{text[head - longest :]}"
