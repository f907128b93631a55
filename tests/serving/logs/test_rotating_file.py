"""Files of the log that somebody moves, removes, or fills the disk of."""

import contextlib
import errno
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torchere.serving.logs import files as rotating_file
from torchere.serving.logs.files import RotatingFile
from torchere.serving.logs.lines import configure

PUTS: list[Callable[[RotatingFile, str], object]] = [
    lambda file, text: file.handle(logging.makeLogRecord({"msg": text})),
    lambda file, text: file.write(f"{text}\n", 1),
]


@pytest.fixture(params=PUTS, ids=["a record", "many lines"])
def put(request: pytest.FixtureRequest) -> Callable[[RotatingFile, str], None]:
    return request.param


@pytest.fixture
def file(tmp_path: Path) -> Iterator[RotatingFile]:
    (tmp_path / "logs").mkdir()
    file = RotatingFile(tmp_path / "logs/a.log", logging.Formatter())
    yield file
    file.close()


def test_a_file_that_was_moved_gets_no_more_lines(file, put, tmp_path):
    put(file, "one")
    (tmp_path / "logs/a.log").rename(tmp_path / "logs/a.log-20261122")
    put(file, "two")
    assert (tmp_path / "logs/a.log-20261122").read_text() == "one\n"
    assert (tmp_path / "logs/a.log").read_text() == "two\n"


def test_one_that_was_moved_and_made_anew_by_another_is_gone_on_with(file, put, tmp_path):
    put(file, "one")
    (tmp_path / "logs/a.log").rename(tmp_path / "old")
    (tmp_path / "logs/a.log").write_text("")
    put(file, "two")
    assert (tmp_path / "logs/a.log").read_text() == "two\n"


def test_one_that_was_emptied_begins_at_its_beginning(file, put, tmp_path):
    put(file, "one")
    with (tmp_path / "logs/a.log").open("r+") as copied:
        copied.truncate(0)
    put(file, "two")
    assert (tmp_path / "logs/a.log").read_text() == "two\n"


def test_a_folder_that_was_removed_is_made_anew(file, put, tmp_path):
    put(file, "one")
    shutil.rmtree(tmp_path / "logs")
    put(file, "two")
    assert (tmp_path / "logs/a.log").read_text() == "two\n"


def test_one_whose_file_system_was_mounted_anew_is_opened_anew(file, put, tmp_path, monkeypatch, capsys):
    put(file, "one")
    gone, fstat = [file.stream.fileno()], os.fstat

    def look(descriptor: int) -> os.stat_result:
        if descriptor in gone:
            gone.clear()  # the next one may have its number
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return fstat(descriptor)

    monkeypatch.setattr(os, "fstat", look)
    put(file, "two")
    assert (tmp_path / "logs/a.log").read_text() == "one\ntwo\n"
    assert capsys.readouterr().err == ""


def test_lines_come_again_when_the_file_can_be_made_again(put, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rotating_file, "MAX_FILE_BYTES", 8)
    folder = tmp_path / "logs"
    folder.mkdir()
    file = RotatingFile(folder / "a.log", logging.Formatter())
    put(file, "one")
    folder.rename(tmp_path / "away")
    folder.write_text("in the way")
    put(file, "lost")
    folder.unlink()
    put(file, "two")
    file.close()
    assert (folder / "a.log").read_text() == "two\n"
    assert "Traceback" not in capsys.readouterr().err


def test_a_file_stays_open_and_begins_anew_at_100_mb_and_five_old_ones_are_kept(file, put, tmp_path):
    path = tmp_path / "logs/a.log"
    put(file, "0")
    for number in range(1, 8):
        stream = file.stream
        os.truncate(path, 100 * 2**20 - 3)
        put(file, f"{number}")  # with which it is a byte short of 100 MB
        assert file.stream is stream
        put(file, f"{number}")
        assert path.read_text() == f"{number}\n"
    kept = sorted(path.parent.iterdir())
    assert [kept_one.name for kept_one in kept] == ["a.log", *(f"a.log.{number}" for number in range(1, 6))]


def test_one_that_can_not_be_moved_grows_on(put, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rotating_file, "MAX_FILE_BYTES", 10)
    tried: list[str] = []

    def busy(source: str, target: str) -> None:  # what a file that is mounted by itself answers
        tried.append(source)
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    file = RotatingFile(tmp_path / "a.log", logging.Formatter())
    with monkeypatch.context() as mounted:
        mounted.setattr(os, "rename", busy)
        for text in ("one", "two", "six", "ten"):
            put(file, text)
    assert (tmp_path / "a.log").read_text() == "one\ntwo\nsix\nten\n"
    assert tried == [str(tmp_path / "a.log")]  # once, and not again before it has grown by as much
    for text in ("abc", "def", "ghi"):
        put(file, text)
    file.close()
    texts = [(tmp_path / name).read_text() for name in ("a.log", "a.log.1", "a.log.2")]
    assert texts == ["ghi\n", "abc\ndef\n", "one\ntwo\nsix\nten\n"]
    said = capsys.readouterr().err
    assert said == f"{tmp_path / 'a.log'} can't be moved, and grows: Device or resource busy\n"


def test_a_full_disk_is_said_once_a_minute_and_not_by_a_traceback_a_line(put, tmp_path, capsys, monkeypatch):
    (tmp_path / "a.log").symlink_to("/dev/full")
    file = RotatingFile(tmp_path / "a.log", logging.Formatter())
    for _ in range(100):
        put(file, "lost")
    said = [capsys.readouterr().err]
    minute_s = time.monotonic() + 60
    monkeypatch.setattr(time, "monotonic", lambda: minute_s)
    put(file, "lost")
    put(file, "lost")
    said.append(capsys.readouterr().err)
    file.close()
    assert said == [f"lines of {tmp_path / 'a.log'} are lost: No space left on device\n"] * 2


def test_where_nobody_reads_standard_error_a_full_disk_holds_nobody_up(put, tmp_path, monkeypatch):
    (tmp_path / "a.log").symlink_to("/dev/full")
    file = RotatingFile(tmp_path / "a.log", logging.Formatter())
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writes, b"x")
    os.set_blocking(writes, True)
    with open(reads, "rb") as reader, open(writes, "w") as unread:
        monkeypatch.setattr(sys, "stderr", unread)
        thread = threading.Thread(target=put, args=(file, "lost"), daemon=True)
        thread.start()
        thread.join(10)
        stands = thread.is_alive()
        monkeypatch.undo()
        os.read(reader.fileno(), 2**20)  # which lets a thread that stands go on
        thread.join()
    file.close()
    assert not stands


def test_so_it_is_where_standard_output_is_a_file(capsys):
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    with contextlib.suppress(OSError), open("/dev/full", "w") as stream:  # it can't be closed, either
        configure("INFO", True, stream)
        (ours,) = [handler for handler in root.handlers if handler not in before]
        for _ in range(100):
            ours.handle(logging.makeLogRecord({"msg": "lost"}))
            ours.flush()
        root.removeHandler(ours)
        ours.close()
        root.setLevel(level)
    assert capsys.readouterr().err == "lines of standard output are lost: No space left on device\n"


def test_what_is_wrong_with_a_record_is_shown_as_ever(file, capsys):
    file.handle(logging.makeLogRecord({"msg": "%d", "args": ("x",)}))
    assert "TypeError" in capsys.readouterr().err


def test_a_closed_file_takes_no_more(file, put, tmp_path):
    file.close()
    put(file, "late")
    assert (tmp_path / "logs/a.log").read_text() == ""


def test_a_pipe_may_stand_for_a_file(put, tmp_path):
    reading, writing = os.pipe()
    (tmp_path / "a.log").symlink_to(f"/proc/self/fd/{writing}")
    file = RotatingFile(tmp_path / "a.log", logging.Formatter())
    put(file, "one")
    file.close()
    os.close(writing)
    with open(reading) as pipe:
        assert pipe.read() == "one\n"
