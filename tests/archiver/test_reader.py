"""Opening, verifying and unpacking, whatever the format."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchere.archiver.container.entries import MANIFEST_NAME, ArchiveLimits
from torchere.archiver.errors import ArchiveError
from torchere.archiver.reader import open_archive
from torchere.archiver.request import FORMATS
from torchere.archiver.writer import write_archive

BARE = '{"runtime": "python", "model": {"modelName": "m"}}'


@pytest.mark.parametrize("archive_format", FORMATS)
def test_what_was_packed_is_unpacked(
    request_for: Any, sources: Path, tmp_path: Path, archive_format: str
) -> None:
    archive = open_archive(write_archive(request_for(archive_format=archive_format)))
    assert (archive.manifest.model_name, archive.manifest.handler) == ("mlp", "service.py")
    folder = archive.extract(tmp_path / "t")
    assert (folder / "model.pt").read_bytes() == (sources / "model.pt").read_bytes()
    assert (folder / "deep" / "vocab.txt").read_bytes() == (
        sources / "extra" / "deep" / "vocab.txt"
    ).read_bytes()
    assert sorted(entry.name for entry in archive.entries) == sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )
    assert archive.read_text("model-config.yaml") == "minWorkers: 1\n"
    archive.verify()


def test_the_contents_decide_and_not_the_name(request_for: Any, tmp_path: Path) -> None:
    tgz = shutil.copy(write_archive(request_for(archive_format="tgz")), tmp_path / "a.mar")
    mar = shutil.copy(write_archive(request_for()), tmp_path / "a.tar.gz")
    assert (open_archive(tgz).kind, open_archive(mar).kind) == ("tgz", "zip")


def test_an_archive_without_a_manifest_has_the_defaults(zip_of: Callable[..., Path]) -> None:
    archive = open_archive(zip_of(("service.py", b"")))
    assert not archive.has_manifest
    assert (archive.manifest.model_name, archive.manifest.model_version, archive.manifest.runtime) == (
        None,
        "1.0",
        "python",
    )


@pytest.mark.parametrize("archive_format", sorted(set(FORMATS) - {"no-archive"}))
def test_nothing_is_left_when_a_digest_is_wrong(
    request_for: Any, tmp_path: Path, archive_format: str
) -> None:
    made = open_archive(write_archive(request_for(archive_format=archive_format)))
    folder = made.extract(tmp_path / "unpacked")
    (folder / "model.pt").write_bytes(b"other weights")
    with pytest.raises(ArchiveError, match="SHA-256"):
        open_archive(folder, as_packed=True).extract(tmp_path / "t")
    with pytest.raises(ArchiveError, match=r"model\.pt.*SHA-256"):
        open_archive(folder, as_packed=True).verify()
    assert sorted(os.listdir(tmp_path)) == ["out", "sources", "unpacked"]


def test_a_file_added_later_is_refused_where_the_archive_has_to_be_as_packed(request_for: Any) -> None:
    path = write_archive(request_for())
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("sitecustomize.py", "evil")
    with pytest.raises(ArchiveError, match=r"sitecustomize\.py.*added later"):
        open_archive(path, as_packed=True)


def test_a_file_taken_out_is_refused_where_the_archive_has_to_be_as_packed(
    request_for: Any, tmp_path: Path
) -> None:
    folder = open_archive(write_archive(request_for())).extract(tmp_path / "unpacked")
    (folder / "names.json").unlink()
    with pytest.raises(ArchiveError, match=r"names\.json.*taken out"):
        open_archive(folder, as_packed=True)


def test_a_folder_that_was_changed_is_unpacked_as_it_is_with_one_warning(
    request_for: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = open_archive(write_archive(request_for())).extract(tmp_path / "unpacked")
    assert caplog.text == ""
    (folder / "model.pt").write_bytes(b"other weights")
    (folder / "names.json").unlink()
    (folder / "models").mkdir()
    (folder / "models" / "1.bin").write_bytes(b"moved in")
    archive = open_archive(folder)
    assert archive.changed == {"models/1.bin", "names.json"}  # the contents of the others are not read yet
    found = archive.extract(tmp_path / "t")
    assert (found / "model.pt").read_bytes() == b"other weights"
    assert (found / "models" / "1.bin").read_bytes() == b"moved in"
    (told,) = caplog.messages
    assert told.startswith(f"{folder} was changed after packing, and is used as it is: ")
    assert told.endswith(": model.pt, models/1.bin, names.json")


def test_the_warning_about_a_changed_archive_is_bounded(
    request_for: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_archive(request_for())
    with zipfile.ZipFile(path, "a") as archive:
        for number in range(50):
            archive.writestr(f"{number:02}\u202e{'x' * 200}", "")
    open_archive(path).extract(tmp_path / "t")
    (told,) = caplog.messages
    assert told.isprintable()
    assert told.endswith(" and 45 more")
    assert len(told) < len(str(path)) + 600


def test_a_folder_that_was_packed_takes_other_weights_and_more_of_them(request_for: Any) -> None:
    folder = write_archive(request_for(archive_format="no-archive"))
    (folder / "model.pt").write_bytes(b"other weights")
    (folder / "shards").mkdir()
    (folder / "shards" / "1.bin").write_bytes(b"moved in")
    open_archive(folder).verify()


def test_the_manifests_size_is_limited(zip_of: Callable[..., Path]) -> None:
    path = zip_of((MANIFEST_NAME, BARE.encode() + b" " * 1000))
    with pytest.raises(ArchiveError, match="more than the 100 allowed"):
        open_archive(path, ArchiveLimits(max_manifest_bytes=100))


def test_two_manifests_are_refused(zip_of: Callable[..., Path]) -> None:
    with pytest.raises(ArchiveError, match="twice"):
        open_archive(zip_of((MANIFEST_NAME, BARE.encode()), (MANIFEST_NAME, b"{}")))


def test_a_manifest_that_is_not_utf8_is_refused(zip_of: Callable[..., Path]) -> None:
    with pytest.raises(ArchiveError, match="not UTF-8"):
        open_archive(zip_of((MANIFEST_NAME, b'{"a": "\xff"}')))


def test_a_manifest_of_an_older_archiver_is_read(zip_of: Callable[..., Path]) -> None:
    text = json.dumps({**json.loads(BARE), "modelServerVersion": "1.0", "implementationVersion": "1.0"})
    assert open_archive(zip_of((MANIFEST_NAME, text.encode()))).manifest.digests is None


@pytest.mark.parametrize(
    ("name", "said"), [("nowhere", "not in the archive"), ("big", "more than the 10 allowed")]
)
def test_text_that_is_missing_or_too_large_is_refused(
    zip_of: Callable[..., Path], name: str, said: str
) -> None:
    with pytest.raises(ArchiveError, match=said):
        open_archive(zip_of(("big", b"x" * 11))).read_text(name, max_bytes=10)


def test_an_existing_target_is_never_touched(zip_of: Callable[..., Path], tmp_path: Path) -> None:
    archive = open_archive(zip_of(("x", b"1")))
    target = tmp_path / "t"
    target.mkdir()
    (target / "mine").write_text("")
    with pytest.raises(ArchiveError, match="exists"):
        archive.extract(target)
    assert os.listdir(target) == ["mine"]


def test_a_full_disk_leaves_nothing_behind(
    zip_of: Callable[..., Path], tmp_path: Path, monkeypatch: Any
) -> None:
    archive = open_archive(zip_of(("a", b"1"), ("b", b"2")))
    true_mkdir = Path.mkdir

    def full(self: Path, *arguments: Any, **named: Any) -> None:
        if self.name.endswith(".part") and self.exists():
            raise OSError(28, "No space left on device", str(self))
        true_mkdir(self, *arguments, **named)

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(ArchiveError, match="No space left on device"):
        archive.extract(tmp_path / "t")
    assert os.listdir(tmp_path) == ["made.mar"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\x89PNG", "neither zip nor gzip"),
        (b"PK\3\4", "too short"),
        (b"\x1f\x8b", "damaged|cut off"),
    ],
)
def test_a_file_that_is_no_archive_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "x.mar"
    path.write_bytes(content)
    with pytest.raises(ArchiveError, match=said):
        open_archive(path)


@pytest.mark.parametrize("path", ["nowhere.mar", "a\0b", "x" * 5000, "/dev/null", ""])
def test_a_path_that_leads_to_no_archive_is_refused(tmp_path: Path, monkeypatch: Any, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArchiveError) as caught:
        open_archive(path).entry("x")
    assert str(caught.value).isprintable()


def test_an_error_names_archive_entry_reason_and_advice(zip_of: Callable[..., Path]) -> None:
    path = zip_of(("../x", b""))
    with pytest.raises(ArchiveError) as caught:
        open_archive(path)
    assert str(caught.value) == (
        f"{path}: entry '../x': the name leaves the archive by '..' "
        "(pack the archive again with relative names)"
    )
    assert (caught.value.archive, caught.value.entry) == (str(path), "../x")
