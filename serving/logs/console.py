"""Log lines for people: short, coloured, one line for each failure; other formats have every detail."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from pathlib import PurePath

from torchere.archiver.errors import one_line
from torchere.serving.logs.access_lines import AccessLine, LineFormatter
from torchere.serving.logs.lines import AT_START, trace_of

_COLORS = {"red": "31", "green": "32", "yellow": "33", "cyan": "36", "dim": "2", "bold": "1"}
_OF_LEVELS = {"DEBUG": "dim", "WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}
# A match begins only after a blank, quote, bracket or "=": tried at every character of a long word, the
# pattern would take quadratic time.
_UNPACKED = re.compile(r"(?<![^\s'\"`(=])[^\s'\"`(=]*/torchere-models-\w+/\w+/model/")
_FRAME = re.compile(r'^  File "([^"]+)", line (\d+), in (.+)$', re.MULTILINE)
_OURS = re.compile(r"/(serving|handlers|archiver)/[\w/]+\.py$|[/\\](torch|lib/python3\.\d+)[/\\]")
_LOADS = "torchere.serving.workers.host"  # the reconciler logs its load errors again


def wants_color(environ: Mapping[str, str], is_terminal: bool) -> bool:
    """Return whether to color output: on a terminal that can, unless NO_COLOR is set (no-color.org)."""
    return is_terminal and not environ.get("NO_COLOR") and environ.get("TERM", "") != "dumb"


class ConsoleFormatter(LineFormatter):
    """`time message`, with the level if it is a warning or worse, and the model of a worker's line.

    Args:
        color: write ANSI colors.

    `warnings` counts warnings. Before `is_started`, lines that the start's summary repeats are hidden.
    """

    def __init__(self, *, color: bool) -> None:
        super().__init__()
        self._color = color
        self._hint = "; --log-format text shows tracebacks"  # goes with the first traceback left out
        self._places: dict[object, str] = {}  # by model: where the last failed load raised its exception
        self.warnings = 0
        self.is_started = False  # whether the summary was printed; set by the server

    def paint(self, text: str, color: str) -> str:
        """Return the text in a color, or unchanged without colors."""
        return f"\x1b[{_COLORS[color]}m{text}\x1b[0m" if self._color and color else text

    def shows(self, record: logging.LogRecord) -> bool:
        """Return whether the record gets a line. Serves as a filter of logging handlers."""
        is_error = record.levelno == logging.ERROR
        if is_error and record.name == _LOADS and record.getMessage().startswith("loading "):
            self._places[getattr(record, "model", None)] = _place(trace_of(self, record))
            return False
        return self.is_started or record.levelno > logging.INFO or not hasattr(record, *AT_START)

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line, without its line end.

        A traceback is reduced to its last line, and the file and line that `_place` finds.
        """
        text = one_line(shortened(record.getMessage()))
        trace = trace_of(self, record)
        if trace:
            text += f": {one_line(trace.rstrip().rpartition(chr(10))[2])}{_place(trace)}{self._hint}"
            self._hint = ""
        elif "Failed to start workers" in text:
            text += self._places.pop(getattr(record, "model", None), "")
        self.warnings += record.levelno == logging.WARNING
        level = record.levelname.lower()
        color = _OF_LEVELS.get(record.levelname, "")
        start = f"{self.paint(level, color)} " if color else ""
        model = one_line(str(getattr(record, "model", "")))
        if model not in text or record.name == "torchere.worker":
            start += self.paint(f"[{model}] ", "cyan")
        return f"{self.paint(_clock(record.created), 'dim')} {start}{text}"

    def format_access(self, line: AccessLine) -> str:
        """Return the line of a request: the time, the status, the request line, and the milliseconds."""
        asked = (
            line.request_line if isinstance(line.request_line, str) else line.request_line.decode("latin-1")
        )
        color = "red" if line.status >= 500 else "yellow" if line.status >= 400 else "green"
        status = self.paint(str(line.status), color)
        moment = self.paint(_clock(line.created_s), "dim")
        return f"{moment} {status} {one_line(asked.removesuffix(' HTTP/1.1'))} {line.elapsed_ms} ms"


def _clock(created_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(created_s))


def shortened(text: str) -> str:
    """Return the text without the temporary folders of unpacked archives."""
    return _UNPACKED.sub("", text)


def _place(trace: str) -> str:
    """Return the file and line of the last frame outside of the server, torch and Python, in parentheses."""
    frames = [(file, line) for file, line, _ in _FRAME.findall(trace)]
    outside = [frame for frame in frames if not _OURS.search(frame[0])] or frames
    return f" ({PurePath(outside[-1][0]).name}, line {outside[-1][1]})" if outside else ""
