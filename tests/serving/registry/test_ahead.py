"""What is unpacked before it is asked for: found once, never stale, never left behind."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchere.archiver.reader import Archive
from torchere.serving.registry.ahead import UnpackedAhead
from torchere.serving.registry.store import Store, StoredArchive
from torchere.serving.settings import Limits

MANIFEST = '{"runtime": "python", "model": {"modelName": "m", "modelVersion": "1.0", "handler": "h.py"}}'


def pack(path: Path, text: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("h.py", text)
        archive.writestr("MAR-INF/MANIFEST.json", MANIFEST)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    (tmp_path / "store").mkdir()
    (tmp_path / "temp").mkdir()
    pack(tmp_path / "store" / "m.mar", "x = 1\n")
    store = Store(tmp_path / "store", Limits(), tmp_path / "temp")
    yield store
    store.close()


def folders(tmp_path: Path) -> list[Path]:
    """The unpacked archives that are there."""
    return list((tmp_path / "temp").glob("torchere-models-*/*/model"))


def test_what_was_unpacked_is_found_once(store: Store, tmp_path: Path) -> None:
    ahead = UnpackedAhead(store, ["m.mar"])
    archive = store.open("m.mar")
    stored = ahead.take("m.mar", archive)
    assert stored is not None
    assert (stored.directory / "h.py").read_text() == "x = 1\n"
    assert ahead.take("m.mar", archive) is None
    ahead.close()
    assert folders(tmp_path) == [stored.directory]


def test_what_nobody_took_is_deleted(store: Store, tmp_path: Path) -> None:
    ahead = UnpackedAhead(store, ["m.mar", "m.mar", "missing.mar", "not a name/.."])
    ahead.close()
    assert folders(tmp_path) == []


def test_an_archive_that_was_replaced_meanwhile_does_not_count(store: Store, tmp_path: Path) -> None:
    pack(tmp_path / "store" / "later.mar", "x = 3\n")
    ahead = UnpackedAhead(store, ["m.mar", "later.mar"])
    assert ahead.take("later.mar", store.open("later.mar")) is not None  # so the first one is unpacked, too
    pack(tmp_path / "store" / "m.mar", "x = 2\n")
    assert ahead.take("m.mar", store.open("m.mar")) is None
    ahead.close()
    assert len(folders(tmp_path)) == 1


def test_a_broken_archive_is_not_there(store: Store, tmp_path: Path) -> None:
    archive = store.open("m.mar")
    (tmp_path / "store" / "m.mar").write_bytes(b"no zip")
    ahead = UnpackedAhead(store, ["m.mar"])
    assert ahead.take("m.mar", archive) is None
    ahead.close()


def test_what_nobody_expects_is_told_to_who_takes_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(url: str, archive: Archive) -> StoredArchive:
        raise RuntimeError("unexpected")

    monkeypatch.setattr(store, "unpack", fail)
    ahead = UnpackedAhead(store, ["m.mar"])
    with pytest.raises(RuntimeError, match="unexpected"):
        ahead.take("m.mar", store.open("m.mar"))
    ahead.close()
