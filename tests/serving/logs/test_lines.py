from __future__ import annotations

import errno
import io
import json
import logging
import os
import re
from collections.abc import Callable, Iterator

import pytest

from torchere.archiver.errors import one_line
from torchere.serving.logs.access_lines import TakesAccessLines
from torchere.serving.logs.lines import configure, lost_lines

Log = Callable[[], str]


@pytest.fixture(autouse=True)
def root_logger_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)


def lines(json_lines: bool, log: Callable[[logging.Logger], None], level: str = "INFO") -> list[str]:
    stream = io.StringIO()
    configure(level, json_lines, stream)
    log(logging.getLogger("torchere.test"))
    return stream.getvalue().splitlines()


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_lines_that_a_file_does_not_take_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    configure("INFO", False, FullDisk())
    logging.getLogger("torchere.test").error("lost")
    handler = logging.getLogger().handlers[-1]
    assert isinstance(handler, TakesAccessLines)
    handler.write_access("one\ntwo\n", 2)
    assert lost_lines() == 3
    assert capsys.readouterr().err == "lines of standard output are lost: No space left on device\n"


def test_a_json_line_has_time_level_logger_message_and_extras() -> None:
    extra = {"model": "net", "request_id": "r-1", "batch": [1, "a"], "share": float("nan"), "owner": {1}}
    (line,) = lines(True, lambda log: log.warning("queue of %s is full", "net", extra=extra))
    record = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", record.pop("time"))
    assert record == {
        "level": "WARNING",
        "logger": "torchere.test",
        "message": "queue of net is full",
        "model": "net",
        "request_id": "r-1",
        "batch": [1, "a"],
        "share": "nan",
        "owner": "{1}",
    }


def test_a_text_line_is_for_people() -> None:
    (line,) = lines(False, lambda log: log.info("loaded", extra={"model": "net"}))
    assert re.fullmatch(r"\S+T\S+\.\d{3}Z INFO    torchere\.test: loaded model=net", line)


@pytest.mark.parametrize("json_lines", [True, False])
def test_nothing_in_a_message_or_an_extra_makes_a_second_line_or_reaches_the_terminal(
    json_lines: bool,
) -> None:
    evil = "x\r\n2026-01-01 ERROR forged\x1b[2J\x7f\x85\u2028\u202e"
    written = lines(json_lines, lambda log: log.info("model %s", evil, extra={"model": evil}))
    assert len(written) == 1
    assert written[0].isprintable()


def test_an_extra_can_not_replace_a_field() -> None:
    (line,) = lines(True, lambda log: log.info("real", extra={"level": "forged", "time": "forged"}))
    record = json.loads(line)
    assert record["level"] == "INFO"
    assert record["time"] != "forged"


def fail(log: logging.Logger) -> None:
    try:
        raise ValueError("first\n2026-01-01 INFO forged")
    except ValueError:
        log.exception("it failed", stack_info=False)


def test_a_traceback_is_one_field_of_the_json_line() -> None:
    (line,) = lines(True, fail)
    trace = json.loads(line)["exception"]
    assert trace.startswith("Traceback (most recent call last):\n")
    assert trace.endswith("forged")


def test_a_traceback_in_text_stands_behind_a_bar() -> None:
    first, *rest = lines(False, fail)
    assert first.endswith("it failed")
    assert rest[0] == "  | Traceback (most recent call last):"
    assert all(line.startswith("  | ") for line in rest)
    assert rest[-1] == "  | 2026-01-01 INFO forged"


def test_a_stack_is_shown_when_asked_for() -> None:
    written = lines(False, lambda log: log.info("here", stack_info=True))
    assert written[1] == "  | Stack (most recent call last):"


def test_lower_levels_are_left_out() -> None:
    assert lines(True, lambda log: log.info("quiet"), level="warning") == []


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="log level: found 'LOUD', expected one of DEBUG, INFO"):
        configure("LOUD", True, io.StringIO())


def test_configuring_again_replaces_our_handler_and_no_other() -> None:
    root = logging.getLogger()
    other = logging.NullHandler()
    root.addHandler(other)
    first, second = io.StringIO(), io.StringIO()
    configure("INFO", True, first)
    configure("INFO", True, second)
    logging.getLogger("torchere.test").info("once")
    assert first.getvalue() == ""
    assert len(second.getvalue().splitlines()) == 1
    assert other in root.handlers


def test_a_narrow_encoding_loses_no_line() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    configure("INFO", False, stream)
    logging.getLogger("torchere.test").info("café")
    assert b"caf\\xe9" in raw.getvalue()


def test_printable_text_of_any_script_is_left_as_it_is() -> None:
    assert one_line("naïve 模型 🔥") == "naïve 模型 🔥"
