"""Packing: layout, reproducibility, and what is left when it fails."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from torchere.archiver import writer
from torchere.archiver.container.entries import MANIFEST_NAME
from torchere.archiver.errors import PackingError
from torchere.archiver.request import FORMATS
from torchere.archiver.writer import Progress, check_target, gather, write_archive


def test_a_mar_stores_weights_and_deflates_the_rest_with_the_manifest_last(request_for: Any) -> None:
    with zipfile.ZipFile(write_archive(request_for())) as archive:
        methods = {info.filename: info.compress_type for info in archive.infolist()}
    assert list(methods)[-1] == MANIFEST_NAME
    assert list(methods)[:-1] == sorted(list(methods)[:-1])
    assert {name for name, method in methods.items() if method == zipfile.ZIP_STORED} == {"model.pt"}


def test_zip_store_stores_everything(request_for: Any) -> None:
    with zipfile.ZipFile(write_archive(request_for(archive_format="zip-store"))) as archive:
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}


def test_the_built_in_handler_is_not_packed_without_the_signature_that_it_reads(
    request_for: Any, sources: Path
) -> None:
    with pytest.raises(PackingError, match=r"'tensor', the default, needs signature\.json: give --example"):
        write_archive(request_for(handler="tensor"))
    (sources / "signature.json").write_text("{}")
    write_archive(request_for(handler="tensor", extra_files=(sources / "signature.json",)))


def test_a_tgz_has_everything_below_the_models_name(request_for: Any) -> None:
    with tarfile.open(write_archive(request_for(archive_format="tgz"))) as archive:
        members = archive.getmembers()
    assert "mlp/MAR-INF/MANIFEST.json" in [member.name for member in members]
    assert all(member.name.startswith("mlp/") and member.isreg() for member in members)
    assert {(member.uid, member.gid, member.uname, member.mode) for member in members} == {(0, 0, "", 0o644)}


def test_no_archive_is_a_plain_directory(request_for: Any, sources: Path) -> None:
    folder = write_archive(request_for(archive_format="no-archive"))
    assert (folder / "model.pt").read_bytes() == (sources / "model.pt").read_bytes()
    assert (folder / "deep" / "vocab.txt").is_file()
    assert (folder / MANIFEST_NAME).is_file()


def test_the_manifest_has_the_digest_of_every_other_file(request_for: Any, sources: Path) -> None:
    with zipfile.ZipFile(write_archive(request_for())) as archive:
        manifest = json.loads(archive.read(MANIFEST_NAME))
    assert sorted(manifest["torchere"]["digests"]) == [
        "deep/vocab.txt",
        "model-config.yaml",
        "model.pt",
        "names.json",
        "service.py",
    ]
    expected = hashlib.sha256((sources / "model.pt").read_bytes()).hexdigest()
    assert manifest["torchere"]["digests"]["model.pt"] == f"sha256:{expected}"
    assert manifest["createdOn"] == "01/01/1980 00:00:00"
    assert manifest["archiverVersion"] == "0.12.0"


@pytest.mark.parametrize("archive_format", ["default", "zip-store", "tgz"])
def test_the_same_inputs_give_the_same_bytes(
    request_for: Any, sources: Path, tmp_path: Path, archive_format: str
) -> None:
    first = write_archive(request_for(archive_format=archive_format)).read_bytes()
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(sources, elsewhere, copy_function=shutil.copyfile)
    for number, path in enumerate(elsewhere.rglob("*")):
        os.utime(path, (number, number))
        path.chmod(0o700)
    again = write_archive(
        request_for(
            archive_format=archive_format,
            handler=str(elsewhere / "service.py"),
            serialized_file=elsewhere / "model.pt",
            config_file=elsewhere / "model-config.yaml",
            extra_files=(elsewhere / "extra",),
            export_path=tmp_path / "again",
        )
    )
    assert again.read_bytes() == first


def test_a_given_date_is_written(request_for: Any) -> None:
    folder = write_archive(request_for(archive_format="no-archive", epoch_s=1735689599))
    assert json.loads((folder / MANIFEST_NAME).read_text())["createdOn"] == "31/12/2024 23:59:59"


def test_large_files_are_stored_only_when_compressing_them_is_wasted(request_for: Any, sources: Path) -> None:
    (sources / "extra" / "noise.dat").write_bytes(os.urandom(300_000))
    (sources / "extra" / "text.dat").write_bytes(b"tell me again " * 30_000)
    with zipfile.ZipFile(write_archive(request_for())) as archive:
        assert archive.getinfo("noise.dat").compress_type == zipfile.ZIP_STORED
        assert archive.getinfo("text.dat").compress_type == zipfile.ZIP_DEFLATED


@pytest.mark.skipif(shutil.which("unzip") is None, reason="unzip is not installed")
def test_unzip_finds_nothing_wrong(request_for: Any) -> None:
    path = write_archive(request_for())
    done = subprocess.run(["unzip", "-t", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_existing_output_is_refused_with_the_known_text(request_for: Any) -> None:
    path = write_archive(request_for())
    before = path.read_bytes()
    with pytest.raises(PackingError) as caught:
        write_archive(request_for(version="2"))
    assert str(caught.value) == (
        f"{path} already exists.\n"
        "Please specify --force/-f option to overwrite the model archive output file.\n"
        "See -h/--help for more details."
    )
    assert path.read_bytes() == before


def test_whether_an_output_may_be_written_is_told_without_changing_anything(
    request_for: Any, tmp_path: Path
) -> None:
    check_target(request_for())
    assert not (tmp_path / "out").exists()
    path = write_archive(request_for())
    with pytest.raises(PackingError, match="already exists"):
        check_target(request_for())
    check_target(request_for(force=True))
    with pytest.raises(PackingError, match="is not a directory"):
        check_target(request_for(export_path=path))


def test_an_output_that_appears_while_packing_is_not_replaced(
    request_for: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_for()

    def gather_slowly(given: Any) -> Any:
        request.target.write_text("of another run")
        return gather(given)

    monkeypatch.setattr(writer, "gather", gather_slowly)
    with pytest.raises(PackingError, match="already exists"):
        write_archive(request)
    assert request.target.read_text() == "of another run"
    assert os.listdir(request.target.parent) == [request.target.name]


@pytest.mark.parametrize("archive_format", FORMATS)
def test_force_replaces_the_whole_output(request_for: Any, archive_format: str) -> None:
    first = write_archive(request_for(archive_format=archive_format))
    again = write_archive(request_for(archive_format=archive_format, extra_files=(), force=True))
    assert again == first
    assert os.listdir(first.parent) == [first.name]


def test_force_keeps_what_else_lies_in_a_folder_even_the_weights_that_are_packed(
    request_for: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "out" / "mlp"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "shard.bin").write_bytes(b"downloaded")
    (folder / "model" / "model.safetensors").write_bytes(b"weights")
    weights = folder / "model" / "model.safetensors"
    write_archive(request_for(archive_format="no-archive", serialized_file=weights, force=True))
    assert (folder / "model" / "shard.bin").read_bytes() == b"downloaded"
    assert weights.read_bytes() == (folder / "model.safetensors").read_bytes() == b"weights"


def test_force_does_not_replace_a_directory_by_a_file(request_for: Any, tmp_path: Path) -> None:
    (tmp_path / "out" / "mlp.mar").mkdir(parents=True)
    with pytest.raises(PackingError, match="is a directory"):
        write_archive(request_for(force=True))


def test_an_export_path_that_is_a_file_is_refused_with_the_known_text(
    request_for: Any, sources: Path
) -> None:
    place = sources / "model.pt"
    with pytest.raises(PackingError) as caught:
        write_archive(request_for(export_path=place))
    assert str(caught.value) == (
        f"Given export-path {place} is not a directory. Point to a valid export-path directory."
    )


@pytest.mark.parametrize("archive_format", FORMATS)
def test_a_failed_run_leaves_nothing_behind(
    request_for: Any, tmp_path: Path, monkeypatch: Any, archive_format: str
) -> None:
    class DiskFull(Progress):
        def advance(self, count: int) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match=r"No space left on device: '.*/out/mlp.*'$"):
        write_archive(request_for(archive_format=archive_format), DiskFull(None))
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("change", [(b"short", b"a longer text"), (b"a longer text", b"short")])
@pytest.mark.parametrize("archive_format", FORMATS)
def test_a_file_that_changes_while_it_is_packed_is_an_error(
    request_for: Any, sources: Path, monkeypatch: Any, archive_format: str, change: tuple[bytes, bytes]
) -> None:
    before, after = change
    (sources / "extra" / "names.json").write_bytes(before)
    true_status = os.fstat

    def writes_meanwhile(number: int) -> Any:
        status = true_status(number)
        if status.st_size == len(before):
            (sources / "extra" / "names.json").write_bytes(after)
        return status

    monkeypatch.setattr(os, "fstat", writes_meanwhile)
    request = request_for(archive_format=archive_format)
    with pytest.raises((PackingError, OSError), match=r"changed while|unexpected end"):
        write_archive(request)
    assert os.listdir(request.export_path) == []


def test_memory_stays_small_however_large_the_file() -> None:
    class Endless(io.RawIOBase):
        largest = 0

        def read(self, size: int = -1, /) -> bytes:
            self.largest = max(self.largest, size)
            return bytes(size)

    source = Endless()
    hashed = writer._HashedSource(source, 10**9, Progress(None))  # type: ignore[arg-type]
    with open(os.devnull, "wb") as nowhere:
        shutil.copyfileobj(hashed, nowhere, writer_chunk := 2**20)
    assert source.largest == writer_chunk


def test_a_folder_of_weights_is_told_which_formats_take_it(request_for: Any, tmp_path: Path) -> None:
    (tmp_path / "bert").mkdir()
    with pytest.raises(PackingError, match=r"is a folder, .* expected --format torchscript, export or aoti"):
        write_archive(request_for(serialized_file=tmp_path / "bert"))
