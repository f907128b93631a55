"""Plain directories as archives."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import NoReturn

import pytest

from torchere.archiver.container.entries import CHUNK_BYTES, MANIFEST_NAME, ArchiveLimits
from torchere.archiver.errors import ArchiveError
from torchere.archiver.manifest import Manifest
from torchere.archiver.reader import open_archive

_A = hashlib.sha256(b"a").hexdigest()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "x.mar"  # named like a file: what it is decides, not its name
    (made / "d").mkdir(parents=True)
    (made / "service.py").write_text("x = 1\n")
    (made / "d" / "a.txt").write_text("a")
    return made


def test_files_are_listed_in_order_and_caches_are_not(folder: Path) -> None:
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "service.pyc").write_text("")
    assert [entry.name for entry in open_archive(folder).entries] == ["d/a.txt", "service.py"]


def test_it_is_copied(folder: Path, tmp_path: Path) -> None:
    target = open_archive(folder).extract(tmp_path / "t")
    assert (target / "d" / "a.txt").read_text() == "a"


def test_a_directory_that_only_holds_a_directory_is_descended(folder: Path, tmp_path: Path) -> None:
    outer = tmp_path / "outer"
    outer.mkdir()
    folder.rename(outer / "model")
    (outer / ".DS_Store").write_text("")
    assert [entry.name for entry in open_archive(outer).entries] == ["d/a.txt", "service.py"]


def test_a_directory_with_only_a_manifest_is_not_descended(tmp_path: Path) -> None:
    (tmp_path / "m" / "MAR-INF").mkdir(parents=True)
    (tmp_path / "m" / "MAR-INF" / "MANIFEST.json").write_text(
        '{"runtime": "python", "model": {"modelName": "named"}}'
    )
    assert open_archive(tmp_path / "m").manifest.model_name == "named"


@pytest.mark.parametrize("names", [["d/a.txt", "e/b.txt"], ["service.py"]])
def test_a_directory_that_holds_anything_else_is_not_descended(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / "m" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "m" / name).write_text("")
    assert [entry.name for entry in open_archive(tmp_path / "m").entries] == names


@pytest.mark.parametrize("to", ["service.py", "/etc", "/etc/passwd", "nowhere", "link", "../../x.mar"])
def test_links_to_no_file_in_it_are_refused(folder: Path, to: str) -> None:
    (folder / "d" / "link").symlink_to(to)
    with pytest.raises(ArchiveError, match=r"'d/link': it is a link that leads to no file of the folder"):
        open_archive(folder)


def test_a_link_to_a_cache_of_python_is_refused(folder: Path) -> None:
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "service.pyc").write_text("")
    (folder / "link").symlink_to("__pycache__/service.pyc")
    with pytest.raises(ArchiveError, match="it is a link"):
        open_archive(folder)


def test_a_download_of_hugging_face_is_copied_once(folder: Path, tmp_path: Path) -> None:
    download = folder / "model" / "models--org--name"
    (download / "snapshots" / "abc").mkdir(parents=True)
    (download / "blobs").mkdir()
    (download / "blobs" / "b1").write_text("weights")
    (download / "snapshots" / "abc" / "a.bin").symlink_to("../../blobs/b1")
    (folder / "b.bin").symlink_to(download / "snapshots" / "abc" / "a.bin")  # a link to a link
    archive = open_archive(folder, ArchiveLimits(max_total_bytes=len("x = 1\n" + "a" + "weights")))
    assert archive.read_text("model/models--org--name/snapshots/abc/a.bin") == "weights"
    target = archive.extract(tmp_path / "t")
    copies = sorted(target.rglob("*b*1")) + sorted(target.rglob("*.bin"))
    assert [copy.read_text() for copy in copies] == ["weights"] * 3
    assert len({copy.stat().st_ino for copy in copies}) == 1
    assert not any(copy.is_symlink() for copy in copies)


def test_links_are_copied_where_the_file_system_has_none_and_count_then(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(source: Path, target: Path) -> NoReturn:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", unsupported)
    for number in range(2):
        (folder / f"link{number}").symlink_to("service.py")
    size = len("x = 1\n" * 3 + "a")
    target = open_archive(folder, ArchiveLimits(max_total_bytes=size)).extract(tmp_path / "t")
    assert [(target / f"link{number}").read_text() for number in range(2)] == ["x = 1\n"] * 2
    archive = open_archive(folder, ArchiveLimits(max_total_bytes=size - 1))
    with pytest.raises(ArchiveError, match=r"larger than 18 bytes .*max_archive_bytes raises"):
        archive.extract(tmp_path / "u")
    assert not (tmp_path / "u").exists()


def test_two_names_of_one_file_stay_so(folder: Path, tmp_path: Path) -> None:
    os.link(folder / "service.py", folder / "d" / "second.py")
    (folder / "link.py").symlink_to("service.py")
    (folder / "d" / "link.py").symlink_to("second.py")
    archive = open_archive(folder, ArchiveLimits(max_total_bytes=len("x = 1\n" + "a")))
    assert [entry.size for entry in archive.entries] == [1, 6, 6, 6, 6]
    target = archive.extract(tmp_path / "t")
    copies = list(target.rglob("*.py"))
    assert [copy.read_text() for copy in copies] == ["x = 1\n"] * 4
    assert len({copy.stat().st_ino for copy in copies}) == 1


def test_a_link_in_place_of_a_file_has_its_digest_compared(folder: Path, tmp_path: Path) -> None:
    digests = {"service.py": f"sha256:{hashlib.sha256(b'x = 1').hexdigest()}", "d/a.txt": f"sha256:{_A}"}
    (folder / "MAR-INF").mkdir()
    (folder / MANIFEST_NAME).write_text(Manifest(model_name="m", digests=digests).dump())
    (folder / "service.py").unlink()
    (folder / "service.py").symlink_to("d/a.txt")
    archive = open_archive(folder)
    target = archive.extract(tmp_path / "t")
    assert (target / "service.py").read_text() == "a"
    assert (target / "service.py").samefile(target / "d" / "a.txt")  # no bytes that are not counted
    assert archive.changed == {"service.py"}
    with pytest.raises(ArchiveError, match="not the one in the manifest"):
        open_archive(folder, as_packed=True).extract(tmp_path / "u")


def test_the_directory_itself_may_be_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert len(open_archive(tmp_path / "link").entries) == 2


def test_pipes_are_refused_and_not_opened(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(folder / "pipe")
    with pytest.raises(ArchiveError, match="FIFO"):
        open_archive(folder)
    with pytest.raises(ArchiveError, match="not a regular file"):
        open_archive(folder / "pipe")


def test_limits_hold_and_their_settings_are_named(folder: Path) -> None:
    with pytest.raises(ArchiveError, match=r"more than 2 entries .*max_archive_entries raises"):
        open_archive(folder, ArchiveLimits(max_entries=2))
    with pytest.raises(ArchiveError, match=r"larger than 6 bytes .*max_archive_bytes raises"):
        open_archive(folder, ArchiveLimits(max_total_bytes=6))
    for number in range(4):
        (folder / f"link{number}").symlink_to("nowhere")
    with pytest.raises(ArchiveError, match="more than 3 entries"):  # before it is known where they lead
        open_archive(folder, ArchiveLimits(max_entries=3))


def test_a_name_that_is_not_utf8_is_refused(folder: Path) -> None:
    os.close(os.open(os.fsencode(folder) + b"/\xff", os.O_CREAT | os.O_WRONLY))
    with pytest.raises(ArchiveError, match="surrogate"):
        open_archive(folder)


def test_folders_deeper_than_a_name_may_be_are_refused(folder: Path) -> None:
    deep = folder
    for _ in range(600):
        deep = deep / "d"
        deep.mkdir(exist_ok=True)
    with pytest.raises(ArchiveError, match="longer than"):
        open_archive(folder)


@pytest.mark.parametrize("text", ["", "longer than before"])
def test_a_file_that_changed_since_is_refused(folder: Path, tmp_path: Path, text: str) -> None:
    archive = open_archive(folder)
    (folder / "d" / "a.txt").write_text(text)
    with pytest.raises(ArchiveError, match="changed after"):
        archive.extract(tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_no_more_is_read_of_a_file_that_grew_than_shows_it(folder: Path, tmp_path: Path) -> None:
    (folder / "d" / "a.txt").write_bytes(bytes(CHUNK_BYTES))
    archive = open_archive(folder)
    os.truncate(folder / "d" / "a.txt", 2**40)  # takes no room on the disk
    with pytest.raises(ArchiveError, match="changed after"):
        archive.extract(tmp_path / "t")
