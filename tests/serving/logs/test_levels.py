import logging

import pytest

from torchere.serving.logs.levels import LogLevelError, change_level, levels, set_level


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
