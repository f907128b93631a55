"""The audit log: its file, its lines, and the bound on refused calls."""

import json
import logging
import time
from typing import Any

import pytest

from torchere.serving.logs import audit
from torchere.serving.logs.audit import AuditedCall, AuditFileUnusable, AuditLog


def call(outcome="done", **changed):
    fields: dict[str, Any] = {"identity": "ci", "address": "10.0.0.7", "transport": "rest", "action": "scale"}
    fields |= {"model": "net", "version": "1.0", "status": 200} | changed
    return AuditedCall(**fields, outcome=outcome)


@pytest.fixture
def log():
    made = AuditLog()
    yield made
    made.close()


@pytest.fixture
def lines(caplog):
    """The records of the log so far, whose level would leave out such lines of other loggers."""
    caplog.set_level(logging.ERROR)
    caplog.handler.setLevel(logging.NOTSET)
    return lambda: caplog.records


def test_a_call_is_one_json_object_in_the_file_and_one_record_of_the_log(log, tmp_path, lines):
    log.open(tmp_path / "logs/audit.json")
    log.add(call())
    log.add(call(model="", action="renew-token", outcome="failed", status=409))
    written = (tmp_path / "logs/audit.json").read_text().splitlines()
    first, second = map(json.loads, written)
    assert {name: first[name] for name in ("logger", "message", "identity", "address", "transport")} == {
        "logger": "AUDIT_LOG",
        "message": "scale of net by ci: done",
        "identity": "ci",
        "address": "10.0.0.7",
        "transport": "rest",
    }
    assert (first["action"], first["model"], first["version"]) == ("scale", "net", "1.0")
    assert (first["outcome"], first["status"]) == ("done", 200)
    assert first["time"].endswith("Z")
    assert "change" not in first
    assert second["message"] == "renew-token by ci: failed (409)"
    assert [record.getMessage() for record in lines()] == [
        "scale of net by ci: done",
        "renew-token by ci: failed (409)",
    ]


def test_a_name_can_not_forge_a_line(log, tmp_path):
    log.open(tmp_path / "audit.json")
    log.add(call(model='net"}\n{"identity": "root'))
    (line,) = (tmp_path / "audit.json").read_text().splitlines()
    assert json.loads(line)["identity"] == "ci"


def test_a_closed_file_gets_no_more_lines(log, tmp_path, lines):
    log.open(tmp_path / "audit.json")
    log.close()
    log.add(call())
    assert (tmp_path / "audit.json").read_text() == ""
    assert len(lines()) == 1


def test_a_file_that_can_not_be_opened_is_an_error(log, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AuditFileUnusable) as caught:
        log.open(tmp_path / "file/audit.json")
    assert "audit_log=" in caught.value.detail


def test_refused_calls_are_bounded_and_those_left_out_are_counted(log, lines, monkeypatch):
    now_s = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    for _ in range(audit.MAX_REFUSED + 7):
        log.add(call("refused"))
    assert len(lines()) == audit.MAX_REFUSED
    log.add(call("done"))
    assert vars(lines()[-1])["omitted"] == 7
    log.add(call("done"))
    assert "omitted" not in vars(lines()[-1])
    log.add(call("refused"))
    assert lines()[-1].getMessage() == "scale of net by ci: done"
    now_s[0] += audit.REFUSED_WITHIN_S
    log.add(call("refused"))
    assert lines()[-1].getMessage() == "scale of net by ci: refused (200)"
