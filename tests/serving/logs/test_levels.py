import logging

import pytest

from torchere.serving.config import kinds
from torchere.serving.logs import levels as module
from torchere.serving.logs.levels import (
    LogLevelError,
    change_level,
    follow,
    levels,
    set_at_start,
    set_level,
)
from torchere.serving.logs.lines import LEVELS


@pytest.fixture(autouse=True)
def as_before():
    before = logging.root.level
    yield
    change_level("", "NOTSET")
    assert logging.root.level == before
    logging.getLogger("torchere.test.levels").setLevel(logging.NOTSET)


def test_a_level_holds_from_now_on():
    log = logging.getLogger("torchere.test.levels")
    change_level("", "WARNING")
    assert not log.isEnabledFor(logging.INFO)
    change_level("torchere.test.levels", "debug")
    assert log.isEnabledFor(logging.DEBUG)
    assert levels()[""] == "WARNING"
    assert levels()["torchere.test.levels"] == "DEBUG"
    change_level("torchere.test.levels", "NOTSET")
    assert not log.isEnabledFor(logging.INFO)
    assert "torchere.test.levels" not in levels()


def test_the_root_logger_is_taken_back_to_the_level_of_the_start(caplog):
    start = logging.root.level
    change_level("", "ERROR")
    change_level("", "DEBUG")
    change_level("", "notset")
    assert logging.root.level == start
    said = f"the log level of everything else is {logging.getLevelName(start)} from now on"
    assert caplog.records[-1].getMessage() == said


def test_a_worker_takes_its_own_root_logger_back():
    start = logging.root.level
    set_level("", logging.NOTSET)  # of a worker that started after the level was taken back
    assert logging.root.level == start
    set_level("", logging.CRITICAL)
    set_level("", logging.NOTSET)
    assert logging.root.level == start


def test_a_change_is_in_the_log(caplog):
    change_level("", "WARNING")
    change_level("torchere.test.levels", "debug")
    assert [record.getMessage() for record in caplog.records] == [
        "the log level of everything else is WARNING from now on",
        "the log level of torchere.test.levels is DEBUG from now on",
    ]


@pytest.mark.parametrize(
    ("name", "level", "cause"),
    [
        ("", "LOUD", "found 'LOUD', expected one of DEBUG, INFO"),
        ("", "", "found ''"),
        ("made.up", "INFO", "nothing logs as 'made.up'"),
        ("torchere.handlers.made.up", "INFO", "nothing logs as"),
        ("torchere.handlersome", "INFO", "nothing logs as"),
        ("torchere.handlers.../serving/server", "INFO", "nothing logs as"),
        ("torchere.handlers.", "INFO", "nothing logs as"),
        ("torchere.handlers." + "x" * 300, "INFO", "nothing logs as"),
    ],
)
def test_what_is_not_there_is_refused_and_nothing_is_made_of_it(name, level, cause):
    before = set(logging.root.manager.loggerDict)
    with pytest.raises(LogLevelError, match=cause):
        change_level(name, level)
    assert set(logging.root.manager.loggerDict) == before


@pytest.mark.parametrize(
    "name", ["torchere.handlers", "torchere.handlers.vision", "torchere.handlers.vision.tasks"]
)
def test_modules_of_handlers_whose_loggers_only_workers_have_are_known(name):
    change_level(name, "INFO")
    change_level(name, "NOTSET")


def test_the_settings_take_the_same_levels():
    assert kinds.LOG_LEVELS == LEVELS


class _Worker:
    def __init__(self):
        self.told = []

    def set_log_level(self, name, level):
        self.told.append((name, level))


def test_levels_of_the_settings_hold_in_workers_and_for_loggers_that_are_made_later(monkeypatch):
    monkeypatch.setattr(module, "_changed", {})
    set_at_start({"torchere.test.levels": "ERROR", "torchere.test.levels.late": "DEBUG"})
    assert not logging.getLogger("torchere.test.levels.one").isEnabledFor(logging.WARNING)
    assert logging.getLogger("torchere.test.levels.late").isEnabledFor(logging.DEBUG)
    follow(worker := _Worker())
    assert worker.told == [
        ("torchere.test.levels", logging.ERROR),
        ("torchere.test.levels.late", logging.DEBUG),
    ]
    change_level("torchere.test.levels.late", "NOTSET")


def test_the_level_of_model_log_is_that_of_all_loggers_of_workers_while_it_is_set(monkeypatch):
    monkeypatch.setattr(module, "_changed", {})
    follow(worker := _Worker())
    for name, level in (("MODEL_LOG", "DEBUG"), ("", "WARNING"), ("MODEL_LOG", "NOTSET"), ("", "NOTSET")):
        change_level(name, level)
    assert worker.told == [("", logging.DEBUG), ("", logging.DEBUG), ("", logging.WARNING), ("", 0)]
