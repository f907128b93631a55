"""Lines of the log for people at a terminal."""

from __future__ import annotations

import logging
import time

import pytest

from torchere.serving.logs.access_lines import AccessLine
from torchere.serving.logs.console import ConsoleFormatter, wants_color
from torchere.serving.logs.lines import AT_START

TRACE = """Traceback (most recent call last):
  File "/work/serving/workers/host.py", line 117, in load
    initialise()
  File "/tmp/torchere-models-a/tmpb/model/mine.py", line 3, in initialize
    raise RuntimeError("boom")
  File "/usr/lib/python3.11/json/decoder.py", line 9, in decode
    raise
RuntimeError: boom"""


@pytest.fixture
def lines() -> ConsoleFormatter:
    return ConsoleFormatter(color=False)


def record(
    text: str, level: int = logging.INFO, name: str = "torchere.x", **extra: object
) -> logging.LogRecord:
    fields = {
        "name": name,
        "levelno": level,
        "levelname": logging.getLevelName(level),
        "msg": text,
        "args": (),
    }
    return logging.makeLogRecord(fields | extra)


def said(lines: ConsoleFormatter, *args: object, **extra: object) -> str:
    moment, _, text = lines.format(record(*args, **extra)).partition(" ")  # type: ignore[arg-type]
    assert len(moment) == len("12:34:56")
    return text


def test_a_line_has_time_and_text_and_from_warnings_on_its_level(lines: ConsoleFormatter) -> None:
    assert said(lines, "loaded") == "loaded"
    assert said(lines, "old", logging.WARNING) == "warning old"
    assert said(lines, "broken", logging.ERROR, model="net") == "error [net] broken"
    assert lines.warnings == 1


def test_a_traceback_is_one_line_with_the_place_in_the_handler(lines: ConsoleFormatter) -> None:
    first = said(lines, "model net failed", logging.ERROR, exc_text=TRACE, model="net")
    assert first == (
        "error model net failed: RuntimeError: boom (mine.py, line 3); --log-format text shows tracebacks"
    )
    assert said(lines, "model net failed", logging.ERROR, exc_text=TRACE).endswith("(mine.py, line 3)")


def test_a_load_that_fails_in_each_worker_has_one_line(lines: ConsoleFormatter) -> None:
    for _ in range(2):
        told = record(
            "loading net failed in its handler mine.py",
            logging.ERROR,
            "torchere.serving.workers.host",
            exc_text=TRACE,
            model="net",
        )
        assert not lines.shows(told)
    text = "Failed to start workers for model net version: 1.0: handler mine.py raised RuntimeError: boom"
    assert said(lines, text, logging.ERROR, model="net") == f"error {text} (mine.py, line 3)"


def test_temporary_folders_are_left_out(lines: ConsoleFormatter) -> None:
    assert said(lines, "/tmp/torchere-models-a_b/tmpc1/model/h.py is bad") == "h.py is bad"
    quoted = "No such file or directory: '/tmp/torchere-models-a_b/tmpc1/model/words.json'"
    assert said(lines, quoted) == "No such file or directory: 'words.json'"
    twice = "a=/tmp/torchere-models-a/b/model/c /tmp/torchere-models-a/b/model/d"
    assert said(lines, twice) == "a=c d"


@pytest.mark.parametrize("text", ["A" * 64_000, "/torchere-models-a" * 3500])
def test_a_long_word_takes_linear_time(lines: ConsoleFormatter, text: str) -> None:
    began_s = time.monotonic()
    assert said(lines, text) == text
    assert time.monotonic() - began_s < 1


def test_nothing_can_move_the_cursor_of_the_terminal(lines: ConsoleFormatter) -> None:
    assert said(lines, "a\x1b[2J\nb") == "a\\x1b[2J\\nb"
    access = AccessLine(0.0, None, "GET /\x1b[2J HTTP/1.1", 200, 3)
    assert lines.format_access(access).endswith(" 200 GET /\\x1b[2J 3 ms")


def test_lines_that_the_summary_repeats_are_shown_after_it_only(lines: ConsoleFormatter) -> None:
    assert not lines.shows(record("Inference API: ...", logging.INFO, "torchere.x", **AT_START))
    assert lines.shows(record("Inference API: ...", logging.WARNING, "torchere.x", **AT_START))
    lines.is_started = True
    assert lines.shows(record("net:1.0 is ready", logging.INFO, "torchere.x", **AT_START))


@pytest.mark.parametrize(
    ("environ", "is_terminal", "wanted"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"TERM": "dumb"}, True, False),
    ],
)
def test_colors_are_for_terminals_that_want_them(
    environ: dict[str, str], is_terminal: bool, wanted: bool
) -> None:
    assert wants_color(environ, is_terminal) is wanted
    painted = ConsoleFormatter(color=wanted).format(record("x", logging.ERROR))
    assert ("\x1b[31merror\x1b[0m" in painted) is wanted
