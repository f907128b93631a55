"""Helpers of `ts.utils` and `ts.handler_utils` that handlers import."""

import logging

import pytest

from torchere.handlers.ts_compat.legacy import deprecated, get_yaml_config, timeit


def test_a_yaml_file_is_read(tmp_path):
    (tmp_path / "c.yaml").write_text("a: {b: 1}")
    assert get_yaml_config(str(tmp_path / "c.yaml")) == {"a": {"b": 1}}


def test_a_deprecated_function_warns_and_works():
    @deprecated("1.0", "new_one")
    def old_one(number):
        return number + 1

    with pytest.warns(PendingDeprecationWarning, match="old_one is deprecated in 1.0 and moved to new_one"):
        assert old_one(1) == 2


def test_a_timed_function_logs_its_duration(caplog):
    @timeit
    def work():
        return "done"

    with caplog.at_level(logging.INFO):
        assert work() == "done"
    assert "work took" in caplog.text
