import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchere.serving.telemetry.logging import JsonFormatter
from torchere.serving.telemetry.worker_lines import (
    MAX_TEXT_CHARACTERS,
    SEPARATOR,
    WorkerFormatter,
    new_token,
    relay,
)

ORIGIN = {"model": "net", "version": "1.0", "executor": 9000}
PLAIN = logging.getLogger("torchere.worker")
TOKEN = new_token()
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


def test_what_a_handler_prints_is_text_at_info(caplog):
    record = relayed(caplog, "hello %s")
    assert (record.levelno, record.name, record.getMessage()) == (logging.INFO, "torchere.worker", "hello %s")
    assert record.model == "net"


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


def test_a_long_traceback_keeps_its_end_and_fits_into_a_line(caplog):
    line = line_of(args=("x" * 20_000 + "the end",))
    assert len(line) < MAX_TEXT_CHARACTERS + 1000
    assert relayed(caplog, line).getMessage().endswith("the end")


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
