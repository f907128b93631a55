"""The log files of old: TorchServe's lines, in TorchServe's files."""

import logging
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchere.serving.logs import files as rotating_file
from torchere.serving.logs.access_lines import access_log
from torchere.serving.logs.files import add_log_files, remove_log_files
from torchere.serving.logs.worker_lines import WorkerFormatter, relay

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3}"  # log4j's ISO8601


@pytest.fixture(autouse=True)
def clean_root() -> Iterator[None]:
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.INFO)
    yield
    remove_log_files()
    root.setLevel(level)


def text_of(directory: Path, name: str) -> str:
    return (directory / name).read_text()


def test_each_line_is_in_the_file_that_torchserve_has_it_in(tmp_path: Path) -> None:
    assert add_log_files(tmp_path / "logs")
    logging.getLogger("ACCESS_LOG").info('/127.0.0.1:1 "GET /ping HTTP/1.1" 200 7')
    said = {"model": "m", "version": "1.0", "executor": 9000}
    logging.getLogger("torchere.serving.workers.worker_process").info("hello", extra=said)
    logging.getLogger("torchere.x").warning("careful")
    logs = tmp_path / "logs"
    access = text_of(logs, "access_log.log")
    assert re.fullmatch(TIME + r' - /127\.0\.0\.1:1 "GET /ping HTTP/1\.1" 200 7\n', access)
    model = text_of(logs, "model_log.log")
    assert re.fullmatch(TIME + r" \[INFO \] W-9000-m_1\.0-stdout MODEL_LOG - hello\n", model)
    _, second, third = text_of(logs, "ts_log.log").splitlines()
    assert second + "\n" == model
    assert re.fullmatch(TIME + r" \[WARN \] MainThread torchere\.x - careful", third)


def test_lines_of_requests_come_before_what_is_logged_after_them(tmp_path: Path) -> None:
    add_log_files(tmp_path)
    for number in range(3):
        access_log.add(("127.0.0.1", number), "GET /ping HTTP/1.1", 200, time.monotonic())
        logging.getLogger("torchere.x").info("after %d", number)
    names = [line.split(" - ")[0].split()[-1] for line in text_of(tmp_path, "ts_log.log").splitlines()]
    assert names == ["ACCESS_LOG", "torchere.x"] * 3


def test_a_message_cannot_forge_a_line(tmp_path: Path) -> None:
    add_log_files(tmp_path)
    logging.getLogger("ACCESS_LOG").info("/a\n2026-01-01T00:00:00,000 - forged")
    for name in ("access_log.log", "ts_log.log"):
        assert len(text_of(tmp_path, name).splitlines()) == 1


def test_a_traceback_follows_its_line(tmp_path: Path) -> None:
    add_log_files(tmp_path)
    try:
        raise ValueError("x\ny")
    except ValueError:
        logging.getLogger("torchere.x").exception("failed")
    first, second, *_ = text_of(tmp_path, "ts_log.log").splitlines()
    assert first.endswith("torchere.x - failed")
    assert second == "Traceback (most recent call last):"


def test_so_does_one_of_a_worker(tmp_path: Path) -> None:
    add_log_files(tmp_path)
    lines = WorkerFormatter()
    lines.token = "token"
    try:
        raise ValueError("x")
    except ValueError:
        failed = logging.LogRecord("h", logging.ERROR, "h.py", 1, "failed", (), sys.exc_info())
    relay(lines.format(failed), "token", {"model": "m"}, logging.getLogger("torchere.x"))
    assert "Traceback (most recent call last):" in text_of(tmp_path, "ts_log.log").splitlines()


def test_files_rotate_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotating_file, "MAX_FILE_BYTES", 200)
    add_log_files(tmp_path)
    for number in range(40):
        logging.getLogger("torchere.x").info("line %d", number)
    kept = sorted(path.name for path in tmp_path.glob("ts_log.log*"))
    assert kept == ["ts_log.log", *(f"ts_log.log.{number}" for number in range(1, 6))]


def test_adding_again_replaces_the_files(tmp_path: Path) -> None:
    add_log_files(tmp_path / "a")
    add_log_files(tmp_path / "b")
    logging.getLogger("torchere.x").info("once")
    assert text_of(tmp_path / "a", "ts_log.log") == ""
    assert len(text_of(tmp_path / "b", "ts_log.log").splitlines()) == 1


def test_a_directory_that_cannot_be_made_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert not add_log_files(tmp_path / "file" / "logs")
    assert "no log files in" in caplog.text
