"""Archives that are hostile or broken in ways that the tests of their rooms do not try.

`docs/bad-inputs.md` names these tests.
"""

from __future__ import annotations

import errno
import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from torchere.archiver.container import zip as zip_container
from torchere.archiver.container.entries import ArchiveLimits, problem_with
from torchere.archiver.errors import ArchiveError
from torchere.archiver.manifest import Manifest
from torchere.archiver.reader import open_archive
from torchere.archiver.scan.pickles import UNKNOWN, foreign_names_in
from torchere.serving.config.model_settings import Asked, effective_settings, parse_model_config
from torchere.serving.config.server_settings import Limits, ServerSettings
from torchere.serving.errors import InvalidArchive
from torchere.serving.registry.names import check_version_name
from torchere.serving.store.package import Store

MANIFEST = json.dumps({"runtime": "python", "model": {"modelName": "m", "handler": "h.py"}})


def zip_of(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return path


@pytest.mark.parametrize("name", ["CON", "aux.py", "NUL", "com1.txt"])
def test_names_that_only_windows_reserves_are_files(tmp_path: Path, name: str) -> None:
    path = zip_of(tmp_path / "a.mar", {name: b"x", "MAR-INF/MANIFEST.json": MANIFEST.encode()})
    assert problem_with(name) is None
    assert (open_archive(path).extract(tmp_path / "out") / name).read_bytes() == b"x"


def test_a_name_of_64_kb_is_refused(tmp_path: Path) -> None:
    path = zip_of(tmp_path / "a.mar", {"n" * 65_000: b"x"})
    with pytest.raises(ArchiveError):
        open_archive(path)
    with tarfile.open(tmp_path / "a.tgz", "w:gz", format=tarfile.GNU_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("n" * 65_000))
    with pytest.raises(ArchiveError, match="longer than 1024 bytes"):
        open_archive(tmp_path / "a.tgz")


def test_a_zip_of_a_million_entries_is_refused_by_its_number(tmp_path: Path) -> None:
    path = zip_of(tmp_path / "a.mar", {f"f{number}": b"" for number in range(20)})
    with pytest.raises(ArchiveError, match="more than 10 entries"):
        open_archive(path, ArchiveLimits(max_entries=10))
    data = bytearray(path.read_bytes())
    end = data.rindex(b"PK\5\6")
    data[end + 8 : end + 12] = b"\xff\xfe\xff\xfe"  # says 65,279 entries
    path.write_bytes(data)
    with pytest.raises(ArchiveError, match="more than 10000 entries"):
        open_archive(path)


def test_zips_within_zips_are_files_and_are_looked_into_no_deeper_than_models_have_them(
    tmp_path: Path,
) -> None:
    inner = b""
    for _ in range(50):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("weights.pt", inner or b"cos\nsystem\n.")
        inner = buffer.getvalue()
    assert foreign_names_in(io.BytesIO(inner), len(inner)) == (UNKNOWN,)
    path = zip_of(tmp_path / "a.mar", {"w.pt": inner, "MAR-INF/MANIFEST.json": MANIFEST.encode()})
    assert (open_archive(path).extract(tmp_path / "out") / "w.pt").read_bytes() == inner


def test_a_disk_that_fails_while_an_archive_is_read_is_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = zip_of(tmp_path / "a.mar", {"w.bin": bytes(1000), "MAR-INF/MANIFEST.json": MANIFEST.encode()})
    archive = open_archive(path)

    def failing(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(zip_container, "open_regular", failing)
    with pytest.raises(ArchiveError, match="Input/output error"):
        archive.extract(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_archive_that_is_deleted_after_it_was_opened_is_said(tmp_path: Path) -> None:
    path = zip_of(tmp_path / "a.mar", {"w.bin": bytes(1000), "MAR-INF/MANIFEST.json": MANIFEST.encode()})
    archive = open_archive(path)
    path.unlink()
    with pytest.raises(ArchiveError, match="No such file"):
        archive.extract(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "config",
    [
        b"\xff\xfe",
        b"batchSize: \xe9",
        b"a:\n\t- b",
        b"a: b: c",
        b"? {a: 1}\n: b",
        b"\0",
        b"a: \x07",
        b"--- 1\n--- 2",
        b"%YAML 9.9\n--- {}",
    ],
)
def test_a_model_config_that_is_none_is_refused_and_leaves_nothing(tmp_path: Path, config: bytes) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "temp").mkdir()
    manifest = json.dumps({"runtime": "python", "model": {"modelName": "m", "configFile": "c.yaml"}})
    zip_of(tmp_path / "store" / "m.mar", {"c.yaml": config, "MAR-INF/MANIFEST.json": manifest.encode()})
    store = Store(tmp_path / "store", Limits(), tmp_path / "temp")
    with pytest.raises(InvalidArchive):
        store.unpack("m.mar", store.open("m.mar"))
    store.close()
    assert list((tmp_path / "temp").iterdir()) == []


@pytest.mark.parametrize(
    ("text", "executors", "batch_size"),
    [
        ("minWorkers: 4\nmaxWorkers: 2", (1, 1), 1),
        ("minWorkers: -1\nmaxWorkers: 0", (1, 1), 1),
        ("minWorkers: '2'\nmaxWorkers: '2'\nbatchSize: '8'", (1, 1), 1),
        ("batchSize: 0", (1, 1), 1),
        ("batchSize: 2\nbatchSize: 3", (1, 1), 3),
        ("maxBatchDelay: -1\nresponseTimeout: 0", (1, 1), 1),
        ("deviceIds: [0, 99]\ndeviceType: gpu", (1, 1), 1),
        ("deviceIds: [-1]", (1, 1), 1),
        ("batchSize: true\nminWorkers: 1.5", (1, 1), 1),
    ],
)
def test_settings_of_a_model_that_make_no_sense_count_as_unset(
    text: str, executors: tuple[int, int], batch_size: int
) -> None:
    config = parse_model_config(text)
    got = effective_settings(Asked(executors=1), config, {}, ServerSettings(), gpus=0)
    assert (got.min_executors, got.max_executors) == executors
    assert got.batch.max_batch_size == batch_size
    assert got.response_timeout_s > 0
    assert got.batch.max_queue_delay_ms >= 0
    assert got.gpu_ids == ()


@pytest.mark.parametrize("version", ["", " ", "\t", "../1", "a/b", "1\n", "1\0", "x" * 256, "x" * 10_000])
def test_versions_that_no_path_or_log_line_should_have_are_refused(version: str) -> None:
    with pytest.raises(InvalidArchive):
        check_version_name("m.mar", Manifest(model_version=version))


@pytest.mark.parametrize("version", ["1.0", "1.00", "１.０", "..", "a\\b", "1 2", "é", "x" * 255])
def test_other_versions_are_texts_that_are_compared_letter_by_letter(version: str) -> None:
    assert check_version_name("m.mar", Manifest(model_version=version)) == version


@pytest.mark.parametrize("runtime", ["ruby", "", "PYTHON", None, 3, ["python"]])
def test_a_runtime_that_is_none_is_refused(runtime: object) -> None:
    with pytest.raises(ArchiveError):
        Manifest.parse(json.dumps({"runtime": runtime, "model": {}}), "m.mar")
