import asyncio
import io
import json
import logging
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchere.handlers.metrics import MetricSample
from torchere.handlers.ts_compat.legacy import Metric
from torchere.serving.io import loop_time
from torchere.serving.logs import worker_lines
from torchere.serving.logs.access_lines import ACCESS_LOGGER
from torchere.serving.logs.audit import AUDIT_LOGGER
from torchere.serving.logs.lines import JsonFormatter
from torchere.serving.logs.worker_lines import (
    MAX_LINE_BYTES,
    MAX_LOGGERS,
    SEPARATOR,
    SERVER_LOGGERS,
    WorkerFormatter,
    metric_of,
    name_rank,
    print_whole_lines,
    relay,
)
from torchere.serving.telemetry import torchserve

ORIGIN = {"model": "net", "version": "1.0", "executor": 9000}
PLAIN = logging.getLogger("torchere.worker")
TOKEN = "0123456789abcdef"  # fixed, since names of tests hold it
MARK = SEPARATOR + TOKEN


def line_of(**changes):
    record = logging.makeLogRecord(
        {"name": "my.handler", "levelno": logging.ERROR, "levelname": "ERROR", "msg": "%s", "args": ("bad",)}
        | changes
    )
    lines = WorkerFormatter()
    lines.token = TOKEN
    return lines.format(record)


def relayed(caplog, line):
    with caplog.at_level(logging.DEBUG):
        relay(line, TOKEN, ORIGIN, PLAIN)
    (record,) = caplog.records
    return record


def test_a_record_arrives_with_its_level_its_logger_and_where_it_came_from(caplog):
    record = relayed(caplog, line_of(request_id="r-1", model="forged"))
    assert (record.levelno, record.name, record.getMessage()) == (logging.ERROR, "my.handler", "bad")
    assert (record.request_id, record.model, record.executor) == ("r-1", "net", 9000)


def test_a_traceback_stays_in_one_piece(caplog):
    try:
        raise ValueError("100 % wrong")
    except ValueError as err:
        line = line_of(exc_info=(type(err), err, err.__traceback__), msg="it failed: 100 %", args=())
    assert "\n" not in line
    record = relayed(caplog, line)
    assert record.getMessage() == "it failed: 100 %"
    assert JsonFormatter().format(record).count("ValueError: 100 % wrong") == 1


def test_the_stack_that_was_asked_for_comes_with_it(caplog):
    record = relayed(caplog, line_of(stack_info="Stack (most recent call last):\n  here"))
    assert JsonFormatter().format(record).count("here") == 1


def test_what_a_handler_prints_is_text_at_info(caplog):
    record = relayed(caplog, "hello %s")
    assert (record.levelno, record.name, record.getMessage()) == (logging.INFO, "torchere.worker", "hello %s")
    assert record.model == "net"


def test_a_record_behind_what_was_printed_without_a_line_end_stays_one(caplog):
    with caplog.at_level(logging.DEBUG):
        relay(f"loading:  50%{line_of()}", TOKEN, ORIGIN, PLAIN)
    found = [(record.levelno, record.name, record.getMessage()) for record in caplog.records]
    assert found == [
        (logging.INFO, "torchere.worker", "loading:  50%"),
        (logging.ERROR, "my.handler", "bad"),
    ]


@pytest.mark.parametrize(
    "line",
    [MARK, MARK + "{", MARK + "[]", MARK + '{"level": "x"}', MARK + "[" * 100_000, line_of()[:-5]],
)
def test_a_line_that_is_only_marked_like_a_record_is_text(caplog, line):
    assert relayed(caplog, line).name == "torchere.worker"


@pytest.mark.parametrize("level", ["1e999", "-1", "51", "40.0", "true", '"40"', "null", "9" * 30])
def test_a_record_whose_level_is_none_of_logging_is_text(caplog, level):
    line = line_of().replace('"level": 40', f'"level": {level}')
    assert level in line
    record = relayed(caplog, line)
    assert (record.levelno, record.name) == (logging.INFO, "torchere.worker")


def test_a_level_beyond_those_of_logging_counts_as_the_next_of_them(caplog):
    assert relayed(caplog, line_of(levelno=99)).levelno == logging.CRITICAL


@pytest.mark.parametrize("token", ["", "0" * len(TOKEN), TOKEN[:-1]])
def test_what_a_client_makes_a_handler_print_speaks_in_nobodys_name(caplog, token):
    fields = '{"level": 50, "logger": "torchere.serving.server", "message": "on fire", "exception": "", '
    record = relayed(caplog, f'{SEPARATOR}{token}{fields}"extra": {{}}}}')
    assert (record.levelno, record.name) == (logging.INFO, "torchere.worker")


@pytest.mark.parametrize("letter", ["x", "ж", "\U0001f600", "\n"])
def test_a_long_record_keeps_its_end_and_fits_into_a_line(caplog, letter):
    text = letter * 20_000 + "the end"
    line = line_of(args=(text,), exc_text=text, field=text)
    assert len(line.encode()) <= MAX_LINE_BYTES
    record = relayed(caplog, line)
    assert record.getMessage().endswith("the end")
    assert record.exc_text.endswith("the end")
    assert record.levelno == logging.ERROR


def test_a_record_that_the_handler_has_asked_for_is_logged(caplog):
    with caplog.at_level(logging.INFO):
        caplog.handler.setLevel(logging.NOTSET)
        relay(line_of(levelno=logging.DEBUG), TOKEN, ORIGIN, PLAIN)
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]


def test_a_record_below_the_level_of_its_logger_here_is_left_out(caplog):
    with caplog.at_level(logging.CRITICAL, "my.handler"):
        relay(line_of(), TOKEN, ORIGIN, PLAIN)
    assert caplog.records == []


@given(st.dictionaries(st.text(max_size=12), st.text(max_size=12), max_size=4), st.text())
def test_no_field_replaces_what_a_record_is_made_of(extra, message):
    line = line_of(**{f"x{name}": value for name, value in extra.items()}, args=(message,))
    seen = []

    class Keeper(logging.Handler):
        def emit(self, record):
            seen.append((record.levelno, record.getMessage()))

    keeper = Keeper()
    logging.getLogger("my.handler").addHandler(keeper)
    try:
        relay(line, TOKEN, ORIGIN, PLAIN)
    finally:
        logging.getLogger("my.handler").removeHandler(keeper)
    assert seen == [(logging.ERROR, message)]


def test_a_warning_that_each_worker_of_a_version_repeats_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = logging.getLogger("torchere.worker")
    fields = {"level": logging.WARNING, "exception": "", "extra": {}}

    def lines(message: str, logger: str = "torchere.handlers.labels", **extra: str) -> list[str]:
        caplog.clear()
        for executor in (9000, 9001):
            record = {**fields, "logger": logger, "message": message, "extra": extra}
            line = f"{SEPARATOR}t{json.dumps(record)}"
            relay(line, "t", {"model": "m", "version": "1.0", "executor": executor}, plain)
        return [record.getMessage() for record in caplog.records]

    assert lines("the labels are missing") == ["the labels are missing"]
    assert len(lines("no JSON", request_id="r")) == 2  # of two requests, which may be alike
    assert len(lines("tired", logger="handler")) == 2  # a handler's own line


def test_the_server_loggers_are_those_with_lines_of_their_own():
    own = {
        ACCESS_LOGGER,
        AUDIT_LOGGER,
        torchserve.MODEL_LOGGER,
        torchserve.SERVER_LOGGER,
        "TELEMETRY_METRICS",
    }
    assert own == SERVER_LOGGERS


@pytest.mark.parametrize("name", [*sorted(SERVER_LOGGERS), "AUDIT_LOG.child"])
def test_a_handler_forges_no_line_of_the_logs_that_the_server_keeps(caplog, name):
    record = relayed(caplog, line_of(name=name, msg="unregister of net by admin: done", args=()))
    assert record.name == PLAIN.name
    assert record.levelno == logging.ERROR


CATS = "[METRICS]Cats.Count:2.5|#ModelName:net,Time:12:30|#type:COUNTER|#hostname:h,1700000000,r-1,r-2"


@pytest.mark.parametrize("line", [CATS, f"INFO > {CATS}", line_of(args=(CATS,))])
def test_the_line_of_a_metric_is_reported_and_not_logged(caplog, line):
    reported: list[MetricSample] = []
    with caplog.at_level(logging.DEBUG):
        relay(line, TOKEN, ORIGIN, PLAIN, report=reported.extend)
    labels = (("ModelName", "net"), ("Time", "12:30"))
    assert reported == [MetricSample("Cats", 2.5, "Count", "counter", labels, ("r-1", "r-2"))]
    assert not caplog.records


def test_the_line_of_a_metric_needs_no_type_no_labels_and_no_request(caplog):
    line = str(Metric("Walk", 3, "ms", []))
    assert metric_of(line) == MetricSample("Walk", 3.0, "Milliseconds", "", (), ())


@pytest.mark.parametrize(
    "line",
    [
        f"a client says {CATS}",
        CATS.replace("2.5", "1,5"),
        CATS.replace("2.5", "nan"),
        CATS.replace("|#hostname:h,1700000000", ""),
        "[METRICS]Failed to update metric with name:Cats",
        f"[METRICS]{' ' * 8000}",
    ],
)
def test_a_line_that_is_only_like_that_of_a_metric_is_text(caplog, line):
    reported: list[MetricSample] = []
    with caplog.at_level(logging.DEBUG):
        relay(line, TOKEN, ORIGIN, PLAIN, report=reported.extend)
    assert not reported
    assert [record.getMessage() for record in caplog.records] == [line]


def test_a_handler_makes_no_loggers_without_end(caplog, monkeypatch):
    monkeypatch.setattr(worker_lines, "_named", set())
    known = logging.root.manager.loggerDict
    before = len(known)
    with caplog.at_level(logging.INFO):
        for number in range(2 * MAX_LOGGERS):
            relay(line_of(name=f"number{number}"), TOKEN, ORIGIN, PLAIN)
        relay(line_of(name=".".join("a" * 1000)), TOKEN, ORIGIN, PLAIN)
        relay(line_of(name="n" * 1000), TOKEN, ORIGIN, PLAIN)
    assert len(known) - before <= MAX_LOGGERS
    assert len(caplog.records) == 2 * MAX_LOGGERS + 2
    assert caplog.records[-3].name == f"number{2 * MAX_LOGGERS - 1}"


class Clock:
    """A clock that a line moves by a millisecond, and a sleep by its time."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.lines_at_once: list[int] = [0]

    def monotonic(self) -> float:
        return self.now_s

    async def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s
        self.lines_at_once.append(0)

    def relay(self, *_: object, **__: object) -> None:
        self.now_s += 0.001
        self.lines_at_once[-1] += 1


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_worker_that_prints_without_end_takes_a_share_of_the_loop(monkeypatch, has_ended):
    clock, lines = Clock(), 1000

    async def relayed() -> None:
        output = asyncio.StreamReader()
        output.feed_data(b"x\n" * lines)
        output.feed_eof()
        await worker_lines.relay_all(output, TOKEN, ORIGIN, PLAIN, lambda: has_ended)

    monkeypatch.setattr(worker_lines, "share", loop_time.LoopShare())
    monkeypatch.setattr(worker_lines, "time", clock)
    monkeypatch.setattr(loop_time, "time", clock)
    monkeypatch.setattr(worker_lines, "asyncio", clock)
    monkeypatch.setattr(worker_lines, "relay", clock.relay)
    began_s = clock.now_s
    asyncio.run(relayed())
    assert sum(clock.lines_at_once) == lines
    assert max(clock.lines_at_once) <= 3  # then other work of the loop has its turn
    alone_s = lines * 0.001
    saved_s = loop_time.UNUSED_S
    expected_s = alone_s if has_ended else alone_s / loop_time.SHARE - saved_s
    assert clock.now_s - began_s == pytest.approx(expected_s, abs=0.05)


class _Pipe(io.RawIOBase):
    """Keeps what each write has written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data):
        self.written.append(bytes(data))
        return len(data)


@pytest.mark.parametrize("is_buffered", [False, True])  # False: with PYTHONUNBUFFERED
def test_a_line_that_is_printed_is_written_at_once_and_in_one_piece(monkeypatch, is_buffered):
    pipe = _Pipe()
    binary: Any = io.BufferedWriter(pipe) if is_buffered else pipe
    stream = io.TextIOWrapper(binary, write_through=not is_buffered)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream)
    print_whole_lines()
    print("line", 1, "of", 2)
    print("a bar", end="\r")
    assert pipe.written == [b"line 1 of 2\n", b"a bar\r"]


def test_a_stream_that_is_no_file_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", None)
    print_whole_lines()


def test_records_of_a_rank_name_it():
    formatter = WorkerFormatter()
    record = logging.makeLogRecord({"msg": "said", "levelno": logging.INFO})
    assert "rank" not in json.loads(formatter.format(record).removeprefix(SEPARATOR))["extra"]
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.getLogger().addHandler(handler)
    try:
        name_rank(3)
    finally:
        logging.getLogger().removeHandler(handler)
    assert json.loads(formatter.format(record).removeprefix(SEPARATOR))["extra"] == {"rank": "3"}


def test_the_level_of_model_log_bounds_all_that_workers_log_and_print(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("MODEL_LOG"), "level", logging.WARNING)
    caplog.set_level(logging.DEBUG)
    for line in ("printed", line_of(levelno=logging.INFO), line_of(levelno=logging.WARNING)):
        relay(line, TOKEN, ORIGIN, PLAIN)
    assert [(record.name, record.levelno) for record in caplog.records] == [("my.handler", logging.WARNING)]
