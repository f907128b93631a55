"""The store: an archive is fetched, opened, unpacked and removed, and nothing is left behind."""

import json
import resource
import zipfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from torchere.archiver.request import ArchiveRequest
from torchere.archiver.writer import write_archive
from torchere.serving.config.server_settings import Limits, ServerSettings
from torchere.serving.errors import InvalidArchive, ModelNotFound, ServingError
from torchere.serving.store.fetch import Download, Origins
from torchere.serving.store.package import Store, store_of


def pack(path: Path, config: str | None = None, **model: object) -> None:
    manifest = {
        "runtime": "python",
        "model": {"modelName": "m", "modelVersion": "1.0", "handler": "h.py", **model},
    }
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("h.py", "x = 1\n")
        if config is not None:
            archive.writestr("c.yaml", config)
            manifest["model"]["configFile"] = "c.yaml"  # type: ignore[index]
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


@pytest.fixture
def store(root: Path, tmp_path: Path) -> Iterator[Store]:
    (tmp_path / "temp").mkdir()
    store = Store(root, Limits(), tmp_path / "temp")
    yield store
    store.close()
    assert list((tmp_path / "temp").iterdir()) == []


def test_an_archive_is_unpacked_with_what_it_says_of_itself(store: Store, root: Path) -> None:
    pack(root / "m.mar", config="batchSize: 4\n")
    stored = store.unpack("m.mar", store.open("m.mar"))
    assert (stored.directory / "h.py").read_text() == "x = 1\n"
    assert stored.manifest["model"]["modelName"] == "m"
    assert stored.config.batch_size == 4
    store.remove(stored)
    assert not stored.directory.exists()


@pytest.mark.parametrize("value", [1 << 64, -(1 << 63) - 1, "\ud800"])
def test_what_no_worker_could_be_told_is_refused_before_it_is_unpacked(
    value: object, store: Store, root: Path
) -> None:
    pack(root / "config.mar", config=json.dumps({"deep": [value]}))
    pack(root / "manifest.mar", extensions={"deep": [value]})
    for what, name in (("model config", "config.mar"), ("manifest", "manifest.mar")):
        with pytest.raises(InvalidArchive, match=f"The {what} can't be given to a worker process: "):
            store.unpack(name, store.open(name))


def test_a_broken_archive_names_itself_and_the_fault(store: Store, root: Path) -> None:
    (root / "bad.mar").write_bytes(b"this is no zip")
    with pytest.raises(InvalidArchive) as caught:
        store.open("bad.mar")
    assert "bad.mar" in caught.value.detail


def test_a_key_without_effect_is_said_with_the_reason(
    store: Store, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = "pippy: {chunks: 2}\nparallelLevel: 1\nasyncCommunication: false\n"
    pack(root / "m.mar", config=config)
    store.unpack("m.mar", store.open("m.mar"))
    assert "pippy in c.yaml has no effect: PiPPy is archived" in caplog.text
    assert "asyncCommunication" not in caplog.text
    assert "parallelLevel" not in caplog.text


def test_a_key_that_is_ignored_is_said_with_the_archive_and_the_file(
    store: Store, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pack(root / "m.mar", config="minWorkers: many\n")
    store.unpack("m.mar", store.open("m.mar"))
    assert "m.mar: minWorkers in c.yaml is 'many', expected an integer; it is ignored" in caplog.text


def test_a_bad_model_config_leaves_nothing_behind(store: Store, root: Path, tmp_path: Path) -> None:
    pack(root / "m.mar", config="a: [")
    with pytest.raises(InvalidArchive, match="not valid YAML"):
        store.unpack("m.mar", store.open("m.mar"))
    left = [path.name for path in (tmp_path / "temp").rglob("*") if path.is_file()]
    assert left == [".claim"]  # the store's own


def test_an_archive_that_is_changed_in_place_is_unpacked_as_it_is_then(
    store: Store, root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "h.py").write_text("x = 1\n")
    write_archive(
        ArchiveRequest(model_name="m", version="1.0", handler=str(tmp_path / "h.py"), export_path=root)
    )
    first = store.unpack("m.mar", store.open("m.mar"))
    assert caplog.text == ""
    with zipfile.ZipFile(root / "m.mar") as archive:
        packed = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(root / "m.mar", "w") as archive:  # as `zip -u` does, the manifest stays
        for name, content in {**packed, "h.py": b"x = 2\n"}.items():
            archive.writestr(name, content)
    second = store.unpack("m.mar", store.open("m.mar"))
    assert [(each.directory / "h.py").read_text() for each in (first, second)] == ["x = 1\n", "x = 2\n"]
    assert first.fingerprint != second.fingerprint
    (told,) = caplog.messages
    assert "m.mar was changed after packing" in told


def damaged(path: Path) -> None:
    """An archive whose handler's bytes are not those of its checksum."""
    pack(path)
    path.write_bytes(path.read_bytes().replace(b"x = 1", b"x = 2"))


def test_an_archive_that_cannot_be_unpacked_leaves_no_folder_behind(
    store: Store, root: Path, tmp_path: Path
) -> None:
    damaged(root / "m.mar")
    archive, before = store.open("m.mar"), sorted((tmp_path / "temp").rglob("*"))
    with pytest.raises(InvalidArchive):
        store.unpack("m.mar", archive)
    assert sorted((tmp_path / "temp").rglob("*")) == before


def test_a_disk_that_is_full_has_no_folder_more_afterwards_and_is_not_the_archives_fault(
    store: Store, root: Path, tmp_path: Path
) -> None:
    pack(root / "m.mar")
    with zipfile.ZipFile(root / "m.mar", "a") as more:
        more.writestr("weights.bin", bytes(100_000))
    archive, before = store.open("m.mar"), sorted((tmp_path / "temp").rglob("*"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # the system refuses, as a full disk does
    try:
        with pytest.raises(ServingError) as caught:
            store.unpack("m.mar", archive)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert type(caught.value) is ServingError
    assert caught.value.message == "Failed to save model: m.mar"
    assert caught.value.detail.startswith(f"{tmp_path}/temp/")  # the disk that is full, and not the archive
    assert "File too large" in caught.value.detail
    assert "name a folder on a larger disk in TEMP, or TMPDIR" in caught.value.detail
    assert sorted((tmp_path / "temp").rglob("*")) == before


def test_a_url_is_copied_into_the_store_when_it_is_allowed(root: Path, tmp_path: Path) -> None:
    pack(tmp_path / "m.mar")
    url = f"file://{tmp_path}/m.mar"
    store = Store(root, Limits(), tmp_path, allowed_urls=(f"file://{tmp_path}/.*",))
    downloaded = store.download(url)
    assert downloaded == Download(root / "m.mar", is_new=True)
    stored = store.unpack(url, store.open("m.mar"))
    assert (stored.url, stored.file_name, stored.outside_store) == (url, "m.mar", False)
    store.remove(stored)
    assert downloaded.path.exists()
    store.delete(downloaded.path)
    assert not downloaded.path.exists()
    store.close()


def test_a_download_that_can_not_be_deleted_is_logged(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Origins, target: Path) -> None:
        raise OSError(30, "Read-only file system")

    pack(tmp_path / "m.mar")
    store = Store(root, Limits(), tmp_path, allowed_urls=(f"file://{tmp_path}/.*",))
    with closing(store):
        downloaded = store.download(f"file://{tmp_path}/m.mar").path
        monkeypatch.setattr(Origins, "delete", refuse)
        store.delete(downloaded)
        assert f"{downloaded} can't be deleted, and stays in the store: [Errno 30]" in caplog.text
        assert store.is_of_client(downloaded)


def test_the_store_of_workflows_does_not_take_the_archive_of_another_url_either(
    root: Path, tmp_path: Path
) -> None:
    urls = []
    for name in ("net", "flow"):
        (tmp_path / name).mkdir()
        pack(tmp_path / name / "m.mar")
        urls.append(f"file://{tmp_path}/{name}/m.mar")
    server = ServerSettings(model_store=root, temp_dir=tmp_path)
    models = store_of(server)
    with closing(models), closing(store_of(server, models)) as workflows:
        models.download(urls[0], by_operator=True)
        with pytest.raises(ServingError, match="Model file already exists"):
            workflows.download(urls[1], by_operator=True)
        models.delete(root / "m.mar")
        assert workflows.download(urls[1], by_operator=True).is_new


def test_s3_is_refused_unless_it_is_allowed(store: Store) -> None:
    with pytest.raises(ModelNotFound, match="does not match any allowed URL"):
        store.download("s3://bucket/m.mar")


def test_a_folder_by_its_path_is_for_the_operator_alone(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "ml" / "model"
    folder.mkdir(parents=True)
    (folder / "model.pt").write_bytes(b"weights")
    assert not store.has(str(folder))
    with pytest.raises(ModelNotFound):
        store.open(str(folder))
    stored = store.unpack(str(folder), store.open(str(folder), trusted=True))
    assert (stored.file_name, stored.outside_store, stored.manifest) == ("model", True, {})
    assert (stored.directory / "model.pt").read_bytes() == b"weights"
    assert store.has(str(folder), trusted=True)


def test_a_folder_below_the_store_is_found_by_its_full_path(store: Store, root: Path) -> None:
    (root / "c0ffee" / "model").mkdir(parents=True)
    (root / "c0ffee" / "model" / "model.pt").write_bytes(b"weights")
    url = f"{root}/c0ffee/model/"  # where SageMaker puts the models of an endpoint that has many
    stored = store.unpack(url, store.open(url))
    assert (stored.file_name, stored.outside_store) == ("model", True)
    assert (stored.directory / "model.pt").read_bytes() == b"weights"
    store.remove(stored)
