"""Files that change under a running server."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from torchere.serving.access.reload import Reloaded, watch
from torchere.serving.errors import ServingError


class Unusable(ServingError):
    """What the tests' reader raises."""


class Reader:
    """Reads a file as text; counts how often, and finds "bad" unusable."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reads = 0

    def __call__(self) -> str:
        self.reads += 1
        try:
            text = self.path.read_text()
        except OSError as err:
            raise Unusable("gone.", str(err.strerror)) from err
        if text == "bad":
            raise Unusable("bad.", "found bad")
        return text


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    (tmp_path / "file").write_text("one")
    return Reader(tmp_path / "file")


def replace(path: Path, text: str) -> None:
    """As careful writers do it: a new file takes the place of the old one."""
    draft = path.with_name("draft")
    draft.write_text(text)
    os.replace(draft, path)


def test_a_file_that_did_not_change_is_not_read_again(reader: Reader) -> None:
    file = Reloaded("It", (reader.path,), reader)
    reads = reader.reads
    file.refresh()
    assert (file.value, reader.reads) == ("one", reads)


def test_a_file_that_was_replaced_is_read_again(reader: Reader) -> None:
    file = Reloaded("It", (reader.path,), reader)
    replace(reader.path, "two")
    file.refresh()
    assert file.value == "two"


def test_a_link_that_leads_elsewhere_is_a_change(tmp_path: Path) -> None:
    # As Kubernetes mounts a Secret: file -> ..data/file, ..data -> ..2026_1
    for name, text in (("..2026_1", "one"), ("..2026_2", "two")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(text)
    (tmp_path / "..data").symlink_to("..2026_1")
    (tmp_path / "file").symlink_to("..data/file")
    file = Reloaded("It", (tmp_path / "file",), Reader(tmp_path / "file"))
    (tmp_path / "..tmp").symlink_to("..2026_2")
    os.replace(tmp_path / "..tmp", tmp_path / "..data")
    file.refresh()
    assert file.value == "two"


def test_a_bad_change_is_said_once_and_leaves_what_was(
    reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    file = Reloaded("The thing", (reader.path,), reader)
    replace(reader.path, "bad")
    with caplog.at_level(logging.ERROR):
        file.refresh()
        file.refresh()
    assert [record.message for record in caplog.records] == [
        "The thing: bad. found bad Those from before stay in force."
    ]
    assert file.value == "one"


def test_a_bad_change_that_comes_back_is_said_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, text in (("good", "one"), ("broken", "bad")):
        (tmp_path / name).write_text(text)
    path = tmp_path / "file"
    path.symlink_to("good")
    file = Reloaded("It", (path,), Reader(path))
    for name in ("broken", "good", "broken"):
        path.unlink()
        path.symlink_to(name)
        file.refresh()
    assert len(caplog.records) == 2


def test_a_change_that_could_not_be_read_once_is_taken_up_later(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = Reloaded("The thing", (reader.path,), reader)
    replace(reader.path, "two")
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(Path, "read_text", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        file.refresh()
        file.refresh()
    assert file.value == "one"
    assert [record.message for record in caplog.records] == [
        "The thing: gone. Too many open files Those from before stay in force."
    ]
    file.refresh()
    assert file.value == "two"


def test_a_file_that_goes_and_comes_back_is_taken_up_again(reader: Reader) -> None:
    file = Reloaded("It", (reader.path,), reader)
    reader.path.unlink()
    file.refresh()
    assert file.value == "one"
    reader.path.write_text("three")
    file.refresh()
    assert file.value == "three"


def test_a_change_of_the_mode_is_a_change(reader: Reader) -> None:
    file = Reloaded("It", (reader.path,), reader)
    reads = reader.reads
    reader.path.chmod(0o400)
    file.refresh()
    assert reader.reads > reads


def test_a_file_that_can_not_be_used_at_the_start_is_an_error(reader: Reader) -> None:
    replace(reader.path, "bad")
    with pytest.raises(Unusable):
        Reloaded("It", (reader.path,), reader)


def test_files_that_change_while_they_are_read_are_read_once_more(tmp_path: Path) -> None:
    pair = (tmp_path / "a", tmp_path / "b")
    for path in pair:
        path.write_text("old")
    seen: list[str] = []

    def read() -> tuple[str, str]:
        first = pair[0].read_text()
        if not seen:  # somebody writes both, just between our two reads
            for path in pair:
                replace(path, "new")
        seen.append(first)
        return first, pair[1].read_text()

    assert Reloaded("The pair", pair, read).value == ("new", "new")


def test_files_that_did_not_fit_as_one_was_not_there_yet_are_read_once_more(tmp_path: Path) -> None:
    pair = (tmp_path / "a", tmp_path / "b")
    for path, text in zip(pair, ("new", "old"), strict=True):
        path.write_text(text)

    def read() -> str:
        first, second = (path.read_text() for path in pair)
        if first != second:
            replace(pair[1], "new")  # somebody writes the other one, just behind us
            raise Unusable("no pair.", f"{first} and {second}")
        return second

    assert Reloaded("The pair", pair, read).value == "new"


def test_of_files_that_never_stand_still_the_last_reading_counts(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("1")

    def read() -> str:
        text = path.read_text()
        replace(path, text + "1")
        return text

    file = Reloaded("It", (path,), read)
    assert file.value == "111"
    file.refresh()
    assert file.value == "111111"


def test_watching_refreshes_again_and_again(reader: Reader) -> None:
    async def main() -> str:
        file = Reloaded("It", (reader.path,), reader)
        watching = asyncio.create_task(watch([file], interval_s=0.001))
        replace(reader.path, "two")
        while file.value == "one":  # the suite's time limit bounds it
            await asyncio.sleep(0)
        watching.cancel()
        return file.value

    assert asyncio.run(main()) == "two"


def test_a_pipe_is_refused_for_nobody_may_ever_write_to_it(
    reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    file = Reloaded("It", (reader.path,), reader)
    reader.path.unlink()
    os.mkfifo(reader.path)
    file.refresh()
    assert file.value == "one"
    assert f"{reader.path} is not a regular file" in caplog.text
    with pytest.raises(ServingError, match="can't be read"):
        Reloaded("It", (reader.path,), reader)


def test_a_look_that_fails_is_said_and_not_the_last_one(caplog: pytest.LogCaptureFixture) -> None:
    class NoThreads:
        looks = 0

        def refresh(self) -> None:
            self.looks += 1
            if self.looks == 1:
                raise RuntimeError("can't start new thread")

    async def main() -> None:
        file: Any = NoThreads()
        watching = asyncio.create_task(watch([file], interval_s=0.001))
        while file.looks < 2 and not watching.done():
            await asyncio.sleep(0)
        assert not watching.done()
        watching.cancel()

    asyncio.run(main())
    assert "can't start new thread" in caplog.text
