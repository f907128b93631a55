import logging

import pytest

from torchere.serving.logs.levels import LogLevelError, change_level, levels


@pytest.fixture(autouse=True)
def as_before():
    before = logging.root.level
    yield
    logging.root.setLevel(before)
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
        ("", "NOTSET", "found 'NOTSET'"),
        ("", "", "found ''"),
        ("made.up", "INFO", "nothing logs as 'made.up'"),
    ],
)
def test_what_is_not_there_is_refused_and_nothing_is_made_of_it(name, level, cause):
    with pytest.raises(LogLevelError, match=cause):
        change_level(name, level)
    assert "made.up" not in logging.root.manager.loggerDict
