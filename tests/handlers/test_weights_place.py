"""A weights file that is still a part of its archive reads like a file; one that is there is read as ever."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from torchere.handlers import weights_place
from torchere.handlers.weights_place import Place

_BEFORE = b"x" * 100


@pytest.fixture
def part(tmp_path: Path) -> Place:
    """A zip between other bytes."""
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        archive.writestr("a", "one")
        archive.writestr("b", "two" * 1000)
    path = tmp_path / "whole"
    path.write_bytes(_BEFORE + held.getvalue() + b"y" * 100)
    return Place(str(path), len(_BEFORE), len(held.getvalue()))


def test_a_part_of_a_file_reads_like_a_file_of_its_own(part: Place) -> None:
    data = Path(part.path).read_bytes()[part.offset : part.offset + part.size]
    with part.open() as file, zipfile.ZipFile(file) as archive:
        assert (archive.read("a"), archive.read("b")) == (b"one", b"two" * 1000)
        assert (file.seek(0), file.read()) == (0, data)
        assert (file.read(1), file.tell()) == (b"", part.size)
        assert (file.seek(-5, os.SEEK_END), file.read(2), file.read(9)) == (
            part.size - 5,
            data[-5:-3],
            data[-3:],
        )
        assert (file.seek(1), file.seek(3, os.SEEK_CUR), file.read(4)) == (1, 4, data[4:8])
        assert (file.seek(part.size + 7), file.read(5)) == (part.size + 7, b"")
        with pytest.raises(ValueError, match="negative"):
            file.seek(-1)
    assert file.closed


class Coming:
    """A file of three bytes that is written when somebody waits for it."""

    def __init__(self, path: Path, place: Place) -> None:
        self.size = 3
        self._path = path
        self._place = place

    @contextmanager
    def lent(self) -> Iterator[Place | None]:
        yield None if self._path.exists() else self._place

    def wait(self) -> None:
        self._path.write_bytes(b"abc")
        weights_place.withdraw(str(self._path))


def test_a_file_that_is_to_come_is_found_where_its_bytes_are(tmp_path: Path, part: Place) -> None:
    path = tmp_path / "w.pt"
    late = Coming(path, part)
    weights_place.announce(str(path), late)
    assert weights_place.is_there(str(path))
    assert weights_place.weights_size(str(path)) == 3
    assert weights_place.late_weights_of(str(tmp_path)) is late
    with weights_place.weights_at(str(path)) as place:
        assert place is part
    weights_place.wait_for_weights(str(path))
    assert weights_place.late_weights_of(str(tmp_path)) is None
    with weights_place.weights_at(str(path)) as place:
        assert (place.path, place.offset, place.size, place.keep) == (str(path), 0, 3, None)
    assert weights_place.weights_size(str(path)) == 3


def test_what_came_in_the_last_moment_is_read_from_the_folder(tmp_path: Path, part: Place) -> None:
    path = tmp_path / "w.pt"
    weights_place.announce(str(path), Coming(path, part))
    path.write_bytes(b"abc")
    with weights_place.weights_at(str(path)) as place:
        assert place.path == str(path)
    weights_place.withdraw(str(path))


def test_a_file_that_nobody_promised_is_not_there(tmp_path: Path) -> None:
    path = str(tmp_path / "w.pt")
    assert not weights_place.is_there(path)
    weights_place.wait_for_weights(path)
    with pytest.raises(FileNotFoundError):
        weights_place.weights_size(path)
