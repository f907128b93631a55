"""What a name means in the folder of the model store, and that a client's words never lead out of it."""

from pathlib import Path

import pytest

from torchere.serving.errors import DownloadFailed, ModelNotFound, ServingError
from torchere.serving.store.package import StoreFolder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


@pytest.mark.parametrize(
    ("url", "error", "text"),
    [
        ("", ModelNotFound, "empty url"),
        ("missing.mar", ModelNotFound, "Model not found at: missing.mar"),
        ("../m.mar", ModelNotFound, "Relative path is not allowed in url: ../m.mar"),
        ("a/../../m.mar", ModelNotFound, "Relative path is not allowed"),
        ("\0", ModelNotFound, "Model not found at"),
        ("/", ModelNotFound, "Model not found at"),
        ("a" * 300 + ".mar", ModelNotFound, "Model not found at: aaa"),
        ("loop.mar", ModelNotFound, "Model not found at: loop.mar"),
        ("ftp://127.0.0.1/x.mar", ModelNotFound, "Model not found at: ftp://127.0.0.1/x.mar"),
        (
            "http://127.0.0.1:1/x.mar",
            DownloadFailed,
            "Failed to download archive from: http://127.0.0.1:1/x.mar",
        ),
        ("FILE:///etc/passwd", DownloadFailed, "Failed to download archive"),
    ],
)
def test_what_is_not_in_the_folder_is_refused_in_the_contracts_words(
    root: Path, url: str, error: type[ServingError], text: str
) -> None:
    (root / "loop.mar").symlink_to("loop.mar")
    with pytest.raises(error) as caught:
        StoreFolder(root).find(url, trusted=False)
    assert text in caught.value.message


def test_a_full_path_means_the_file_of_that_name_in_the_folder(root: Path) -> None:
    (root / "m.mar").touch()
    assert StoreFolder(root).find("/somewhere/else/m.mar", trusted=False) == root / "m.mar"


def test_a_server_without_a_store_lists_nothing_and_finds_nothing() -> None:
    folder = StoreFolder(None)
    assert folder.names() == []
    with pytest.raises(ModelNotFound, match="Model store has not been configured"):
        folder.find("m.mar", trusted=False)


def test_a_folder_that_cannot_be_listed_is_named(root: Path) -> None:
    root.rmdir()
    with pytest.raises(ServingError) as caught:
        StoreFolder(root).names()
    assert f"{root}: No such file or directory; expected" in caught.value.detail
    with pytest.raises(ServingError, match="The workflow store can't be read"):
        StoreFolder(root).workflow_names()


def test_archives_and_folders_of_models_are_listed_and_nothing_else(root: Path) -> None:
    (root / "b.mar").touch()
    (root / "a" / "MAR-INF").mkdir(parents=True)
    (root / "a" / "MAR-INF" / "MANIFEST.json").touch()
    (root / "lost+found").mkdir()
    (root / "notes.txt").touch()
    (root / ".hidden.mar").touch()
    for name in ("w.war", ".hidden.war"):
        (root / name).touch()
    (root / "v" / "WAR-INF").mkdir(parents=True)
    (root / "v" / "WAR-INF" / "MANIFEST.json").touch()
    assert StoreFolder(root).names() == ["a", "b.mar"]
    assert StoreFolder(root).workflow_names() == ["v", "w.war"]


def test_a_full_path_does_not_lead_a_client_out_of_the_folder(root: Path, tmp_path: Path) -> None:
    (tmp_path / "ml" / "model").mkdir(parents=True)
    (root / "way").symlink_to(tmp_path / "ml")
    for url in (f"{root}/way/model", f"{root}/", f"{root}"):
        with pytest.raises(ModelNotFound, match="Model not found at"):
            StoreFolder(root).find(url, trusted=False)


def test_a_store_that_is_the_whole_disk_is_no_model() -> None:
    with pytest.raises(ModelNotFound, match="Model not found at: /"):
        StoreFolder(Path("/")).find("/", trusted=False)


def test_a_store_behind_a_link_that_leads_to_another_container_is_read_by_the_link(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "m.mar").touch()
    (root / "out").symlink_to(tmp_path)
    link, target = tmp_path / "link", tmp_path / "of-another-container"
    link.symlink_to(root)
    with monkeypatch.context() as patched:
        # As a link through /proc/PID/root, whose text is a path of the other container.
        patched.setattr(Path, "resolve", lambda path: Path(str(path).replace(str(link), str(target))))
        folder = StoreFolder(link)

        assert folder.names() == ["m.mar"]
        assert folder.find("m.mar", trusted=False) == link / "m.mar"
        for outside in (".", f"{link}/out/store"):
            with pytest.raises(ModelNotFound):
                folder.find(outside, trusted=False)
