"""A store that requires signatures: it unpacks the bytes that were verified, and leaves nothing behind."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from signers import KeyPair, key_pair, pack

from torchere.archiver.reader import open_archive
from torchere.archiver.request import ArchiveRequest
from torchere.archiver.writer import write_archive
from torchere.serving.config.server_settings import Limits, ServerSettings
from torchere.serving.errors import (
    DownloadFailed,
    InvalidArchive,
    ModelNotFound,
    ServingError,
    UntrustedArchive,
)
from torchere.serving.store import signing
from torchere.serving.store.package import Store, store_of
from torchere.serving.store.signing import MAX_SIGNATURE_BYTES, SigningUnusable, TrustedKeys, read_signature

GOOD = "def handle(data, context): return data\n"
EVIL = "def handle(data, context): return evil\n"  # as long


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyPair:
    return key_pair(tmp_path_factory.mktemp("keys"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A folder that file URLs may name."""
    (tmp_path / "shop").mkdir()
    return tmp_path / "shop"


@pytest.fixture
def temp(tmp_path: Path) -> Path:
    (tmp_path / "temp").mkdir()
    return tmp_path / "temp"


def signed(root: Path, keys: KeyPair, kind: str) -> Path:
    """Put a signed archive into a folder: a file, or a folder."""
    archive = pack(root / "m.mar", GOOD)
    if kind == "folder":
        open_archive(archive).extract(root / "m")
        archive.unlink()
        archive = root / "m"
    keys.sign(archive)
    return archive


def overwrite(archive: Path) -> None:
    """Replace the code of an archive in place, so that file and times look as before."""
    file = archive / "h.py" if archive.is_dir() else archive
    before = file.stat()
    evil = EVIL.encode() if archive.is_dir() else pack(archive.with_name("evil"), EVIL).read_bytes()
    with file.open("r+b") as out:
        out.write(evil)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (
        before.st_ino,
        before.st_size,
        before.st_mtime_ns,
    )


def then_overwritten(archive: Path, call: Callable[..., object]) -> Callable[..., object]:
    """Return a function that does as `call` does, after which another process overwrites the archive."""

    def both(*arguments: object) -> object:
        result = call(*arguments)
        overwrite(archive)
        return result

    return both


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_an_archive_that_is_changed_after_its_verification_is_unpacked_as_it_was(
    kind: str, root: Path, temp: Path, keys: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = signed(root, keys, kind)
    trust = TrustedKeys([keys.public])
    monkeypatch.setattr(trust, "verify", then_overwritten(archive, trust.verify))
    store = Store(root, Limits(), temp, trust=trust)
    opened = store.open(archive.name)
    stored = store.unpack(archive.name, opened)
    opened.close()
    assert (stored.directory / "h.py").read_text() == GOOD
    assert (stored.file_name, stored.outside_store) == (archive.name, False)
    assert stored.signer.startswith("key sha256:")
    store.remove(stored)
    store.close()
    assert list(temp.iterdir()) == []


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_an_archive_that_is_changed_while_it_is_verified_is_refused(
    kind: str, root: Path, temp: Path, keys: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = signed(root, keys, kind)
    then = then_overwritten(archive, read_signature)
    monkeypatch.setattr(signing, "read_signature", then)
    store = Store(root, Limits(), temp, trust=TrustedKeys([keys.public]))
    before = sorted(temp.rglob("*"))
    with pytest.raises(ServingError) as caught:
        store.open(archive.name)
    if kind == "file":  # the digests in its manifest refuse the folder before
        assert isinstance(caught.value, UntrustedArchive)
    assert sorted(temp.rglob("*")) == before
    store.close()


def test_an_archive_that_is_another_one_only_while_it_is_copied_is_refused(
    root: Path, temp: Path, keys: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = signed(root, keys, "file").read_bytes()
    copy_file = signing._copy_file

    def exchanged(source: Path, target: Path) -> None:
        overwrite(source)
        copy_file(source, target)
        source.write_bytes(good)

    monkeypatch.setattr(signing, "_copy_file", exchanged)
    store = Store(root, Limits(), temp, trust=TrustedKeys([keys.public]))
    with pytest.raises(UntrustedArchive) as caught:
        store.open("m.mar")
    assert "Signature mismatch" in caught.value.detail
    store.close()


@pytest.mark.parametrize("change", ["edited", "added"])
def test_an_archive_that_was_changed_before_it_was_signed_is_refused(
    change: str, root: Path, temp: Path, tmp_path: Path, keys: KeyPair
) -> None:
    (tmp_path / "h.py").write_text(GOOD)
    request = ArchiveRequest(model_name="m", version="1.0", handler=str(tmp_path / "h.py"), export_path=root)
    folder = open_archive(write_archive(request)).extract(root / "m")
    (folder / ("h.py" if change == "edited" else "more.py")).write_text(EVIL)
    store = Store(root, Limits(), temp, trust=TrustedKeys([keys.public]))
    keys.sign(folder)
    with pytest.raises(InvalidArchive, match="digest" if change == "added" else "SHA-256"):
        store.open("m")
    store.close()


def test_a_copy_is_deleted_with_the_archive_that_was_opened(root: Path, temp: Path, keys: KeyPair) -> None:
    archive = signed(root, keys, "file")
    store = Store(root, Limits(), temp, trust=TrustedKeys([keys.public]))
    before = sorted(temp.rglob("*"))
    opened = store.open(archive.name)
    assert opened.archive.path != archive
    opened.close()
    opened.close()
    assert sorted(temp.rglob("*")) == before
    store.close()


def test_a_store_that_requires_no_signatures_reads_none(root: Path, temp: Path) -> None:
    pack(root / "m.mar")
    (root / "m.mar.sig").write_text("nothing")
    store = Store(root, Limits(), temp)
    opened = store.open("m.mar")
    assert (opened.signer, opened.archive.path) == ("", root / "m.mar")
    assert store.unpack("m.mar", opened).signer == ""
    assert store.names() == ["m.mar"]
    store.close()


def test_a_disk_without_room_for_the_copy_is_not_the_archives_fault(
    root: Path, temp: Path, keys: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    signed(root, keys, "file")
    monkeypatch.setattr(signing, "_copy_file", full)
    store = Store(root, Limits(), temp, trust=TrustedKeys([keys.public]))
    with pytest.raises(ServingError) as caught:
        store.open("m.mar")
    assert (type(caught.value), caught.value.message) == (ServingError, "Failed to save model: m.mar")
    store.close()


def test_required_signatures_without_a_usable_key_stop_the_start(root: Path, temp: Path) -> None:
    settings = ServerSettings(model_store=root, temp_dir=temp, require_signed=True)
    for files in ((), (root / "missing.pem",)):
        with pytest.raises(SigningUnusable):
            store_of(replace(settings, trusted_signing_keys=files))
        assert list(temp.iterdir()) == []


def shopping(root: Path, temp: Path, shop: Path, keys: KeyPair, pattern: str = ".*") -> Store:
    allowed = (f"file://{shop}/{pattern}",)
    return Store(root, Limits(), temp, allowed_urls=allowed, trust=TrustedKeys([keys.public]))


def test_the_signature_of_a_download_comes_and_goes_with_it(
    root: Path, temp: Path, shop: Path, keys: KeyPair
) -> None:
    signed(shop, keys, "file")
    store = shopping(root, temp, shop, keys)
    url = f"file://{shop}/m.mar"
    downloaded = store.download(url)
    assert sorted(path.name for path in root.iterdir()) == ["m.mar", "m.mar.sig"]
    opened = store.open("m.mar")
    stored = store.unpack(url, opened)
    opened.close()
    (shop / "m.mar.sig").unlink()
    assert not store.download(url, by_operator=True).is_new  # a start after this one
    store.remove(stored)
    assert sorted(path.name for path in root.iterdir()) == ["m.mar", "m.mar.sig"]
    store.delete(downloaded.path)
    assert list(root.iterdir()) == []
    store.close()


@pytest.mark.parametrize("case", ["missing", "too large", "not allowed", "there already"])
def test_an_archive_whose_signature_can_not_be_downloaded_is_not_kept(
    case: str, root: Path, temp: Path, shop: Path, keys: KeyPair
) -> None:
    signature = signed(shop, keys, "file").with_name("m.mar.sig")
    if case == "missing":
        signature.unlink()
    elif case == "too large":
        signature.write_bytes(bytes(MAX_SIGNATURE_BYTES + 1))
    elif case == "there already":
        (root / "m.mar.sig").touch()
    store = shopping(root, temp, shop, keys, r".*\.mar" if case == "not allowed" else ".*")
    kind, reason = {
        "missing": (DownloadFailed, "No such file or directory"),
        "too large": (DownloadFailed, f"it is larger than {MAX_SIGNATURE_BYTES}"),
        "not allowed": (ModelNotFound, "no pattern of allowed_urls matches it"),
        "there already": (ServingError, "delete it from the model store"),
    }[case]
    with pytest.raises(kind, match=r"m\.mar\.sig") as caught:
        store.download(f"file://{shop}/m.mar")
    assert reason in caught.value.detail
    assert ("require_signed=true needs the signature" in caught.value.detail) == (case != "there already")
    assert not (root / "m.mar").exists()
    store.close()
