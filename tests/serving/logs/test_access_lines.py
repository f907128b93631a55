"""Access lines in batches: each test has a logger of its own, because pytest listens to the real one."""

import io
import json
import logging
import logging.handlers
import re
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from torchere.archiver.errors import one_line
from torchere.serving.batching.request import Request
from torchere.serving.logs import files as log_files
from torchere.serving.logs import files as rotating_file
from torchere.serving.logs.access_lines import AccessLine, AccessLog, TakesAccessLines
from torchere.serving.logs.lines import JsonFormatter, TextFormatter, configure
from torchere.serving.logs.trace_context import TraceContext
from torchere.serving.telemetry.metrics import Metrics

EVIL = '/a"\r\n2026-01-01 forged\x1b[2J\x7f\u202e'
TRACE = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", True)
METER = Metrics("vm").meter("m", "1.0")
LINE = AccessLine(1_800_000_000.000_25, ("127.0.0.1", 7), b"GET /ping HTTP/1.1", 200, 7, "r-1", TRACE, METER)


class Keeper(TakesAccessLines):
    """Takes many lines at once, and keeps them; waits for `gate` before it does."""

    def __init__(self):
        super().__init__()
        self.lines, self.batches = [], 0
        self.gate = threading.Event()
        self.gate.set()
        self.written = threading.Event()

    def emit(self, record):
        pass

    def access_text(self, line):
        return f"{line.message}\n"

    def write_access(self, text, lines):
        self.gate.wait(10)
        assert text.count("\n") == lines
        self.lines += text.splitlines()
        self.batches += 1
        self.written.set()


@pytest.fixture
def keeper():
    return Keeper()


@pytest.fixture
def log(keeper, request):
    logger = logging.Logger(request.node.name, logging.INFO)
    logger.addHandler(keeper)
    access = AccessLog(logger, flush_s=0.02)
    yield access
    keeper.gate.set()
    access.close()


def add(log, number=0, **others):
    log.add(("127.0.0.1", 7), b"GET /%d HTTP/1.1" % number, 200, time.monotonic(), **others)


def test_lines_come_together_in_order_and_complete(log, keeper):
    for number in range(2500):
        add(log, number)
    log.close()
    assert [line.split()[2] for line in keeper.lines] == [f"/{number}" for number in range(2500)]
    assert keeper.batches < 50


def test_lines_are_written_by_themselves_before_long(log, keeper):
    add(log)
    assert keeper.written.wait(10)
    assert keeper.lines[0].startswith('/127.0.0.1:7 "GET /0 HTTP/1.1" 200 ')


def test_an_output_that_stands_still_costs_lines_and_holds_nobody_up(keeper, caplog):
    logger = logging.Logger("stuck", logging.INFO)
    logger.addHandler(keeper)
    keeper.gate.clear()
    log = AccessLog(logger, flush_s=0.001, limit=10)
    started_s = time.monotonic()
    for number in range(2000):
        add(log, number)
    assert time.monotonic() - started_s < 5
    assert log.dropped > 0
    keeper.gate.set()
    with caplog.at_level(logging.WARNING):
        log.close()
    assert len(keeper.lines) + log.dropped == 2000
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == f"{log.dropped} lines of the access log are lost: the output did not take them in time"
    log.close()
    assert len(caplog.records) == 1


def test_a_line_goes_where_lines_go_when_it_comes(log, keeper):
    second = Keeper()
    add(log, 1)
    log.flush()
    log.logger.addHandler(second)
    add(log, 2)
    log.close()
    assert [len(keeper.lines), len(second.lines)] == [2, 1]


def test_a_handler_that_has_no_text_for_a_line_gets_none(log, keeper):
    class Silent(Keeper):
        def access_text(self, line):
            return ""

    silent = Silent()
    log.logger.addHandler(silent)
    add(log)
    log.close()
    assert silent.batches == 0
    assert len(keeper.lines) == 1


def test_after_the_end_it_goes_on(log, keeper):
    add(log, 1)
    log.close()
    add(log, 2)
    log.close()
    assert len(keeper.lines) == 2


def test_lines_that_come_during_the_end_and_after_it_are_written_by_themselves(log, keeper):
    keeper.gate.clear()
    add(log, 1)
    while log._outputs[0].texts:  # until the thread stands still with it
        time.sleep(0.001)
    closing = threading.Thread(target=log.close)
    closing.start()
    while log._writer is not None:
        time.sleep(0.001)
    add(log, 2)
    keeper.gate.set()
    closing.join()
    deadline_s = time.monotonic() + 10
    add(log, 3)
    while len(keeper.lines) < 3 and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert [line.split()[2] for line in keeper.lines] == ["/1", "/2", "/3"]


def test_without_a_thread_lines_wait_until_one_starts(log, keeper, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        add(log, 1)
        add(log, 2)
    assert not keeper.lines
    add(log, 3)
    assert keeper.written.wait(10)
    assert [line.split()[2] for line in keeper.lines] == ["/1", "/2", "/3"]


def test_with_a_handler_that_takes_single_lines_only_they_go_through_logging(log, keeper):
    single = logging.handlers.BufferingHandler(100)
    log.logger.addHandler(single)
    add(log, prediction=Request("r-1", time.monotonic()))
    (record,) = single.buffer
    assert record.getMessage() == '/127.0.0.1:7 "GET /0 HTTP/1.1" 200 0'
    assert vars(record)["request_id"] == "r-1"
    assert keeper.lines == []


@pytest.mark.parametrize(("level", "enabled"), [(logging.INFO, True), (logging.WARNING, False)])
def test_it_is_off_when_nobody_wants_lines_of_its_level(level, enabled):
    assert AccessLog(logging.Logger("any", level)).enabled is enabled


def as_record(line):
    record = logging.makeLogRecord(
        {"msg": "%s", "args": (line.message,), "levelname": "INFO", "name": "ACCESS_LOG"}
        | {"created": line.created_s, "threadName": "MainThread", **line.ids}
    )
    return record


@pytest.mark.parametrize(
    "form", [JsonFormatter(), TextFormatter(), log_files.AccessFormatter(), log_files.Log4jFormatter()]
)
@pytest.mark.parametrize(
    "line",
    [
        LINE,
        LINE._replace(
            client=None, request_line=EVIL.encode("utf-8"), version=Metrics("vm").meter(EVIL, "1.0")
        ),
        LINE._replace(
            client="unix:", request_line="gRPC a/b HTTP/2.0", request_id="", trace=None, version=None
        ),
        LINE._replace(created_s=1_800_000_000.999_999_9),
    ],
)
def test_a_line_has_the_form_that_logging_would_give_it(form, line):
    quick = form.format_access(line)
    assert quick.isprintable() or one_line(quick) == quick
    slow = form.format(as_record(line))
    if isinstance(form, JsonFormatter):
        assert json.loads(quick) == json.loads(slow)
    else:
        assert quick == slow


def test_a_line_says_which_request_trace_model_and_version_it_is_about():
    assert json.loads(JsonFormatter().format_access(LINE)) == {
        "time": "2027-01-15T08:00:00.000250Z",
        "level": "INFO",
        "logger": "ACCESS_LOG",
        "message": '/127.0.0.1:7 "GET /ping HTTP/1.1" 200 7',
        "request_id": "r-1",
        "trace_id": TRACE.trace_id,
        "model": "m",
        "version": "1.0",
    }


def test_standard_output_takes_many_lines_at_once():
    stream = io.StringIO()
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        configure("INFO", True, stream)
        ours: Any
        (ours,) = [handler for handler in root.handlers if handler not in before]
        ours.write_access(ours.access_text(LINE) * 2, 2)
    finally:
        for handler in [handler for handler in root.handlers if handler not in before]:
            root.removeHandler(handler)
        root.setLevel(level)
    first, second = stream.getvalue().splitlines()
    assert first == second
    assert json.loads(first)["message"] == '/127.0.0.1:7 "GET /ping HTTP/1.1" 200 7'


def test_files_take_many_lines_at_once_and_are_rotated(tmp_path, monkeypatch):
    monkeypatch.setattr(rotating_file, "MAX_FILE_BYTES", 500)
    assert log_files.add_log_files(tmp_path)
    try:
        files = [h for h in logging.getLogger().handlers if isinstance(h, log_files._LogFile)]
        for _ in range(3):
            for file in files:
                file.write_access(file.access_text(LINE) * 5, 5)
    finally:
        log_files.remove_log_files()
    access = (tmp_path / "access_log.log").read_text().splitlines()
    assert len(access) == 5
    assert re.fullmatch(r'\S+,\d{3} - /127\.0\.0\.1:7 "GET /ping HTTP/1\.1" 200 7', access[0])
    assert (tmp_path / "access_log.log.1").exists()
    assert "[INFO ] MainThread ACCESS_LOG - /127.0.0.1:7" in (tmp_path / "ts_log.log").read_text()
    assert (tmp_path / "model_log.log").read_text() == ""


SCRIPT = """
import logging, os, sys, time
from torchere.serving.logs.access_lines import AccessLog
from torchere.serving.logs.lines import configure
configure("INFO", False, sys.stdout)
log = AccessLog(logging.getLogger("ACCESS_LOG"))
for number in range(1000):
    log.add(("127.0.0.1", 7), "GET /%d HTTP/1.1" % number, 200, time.monotonic())
if sys.argv[1] == "crash":
    time.sleep(1.0)
    os.abort()
"""


@pytest.mark.parametrize("end", ["normal", "crash"])
def test_no_line_is_lost_at_the_end_of_the_process(end):
    done = subprocess.run([sys.executable, "-c", SCRIPT, end], capture_output=True, text=True, check=False)
    assert done.stdout.count("HTTP/1.1") == 1000
