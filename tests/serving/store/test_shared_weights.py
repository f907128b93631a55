"""Versions with the same weights map one file, and no handler can reach another version's."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from torchere.handlers.loading.torchscript import load_torchscript
from torchere.handlers.loading.weights import file_to_map
from torchere.serving.config.server_settings import Limits
from torchere.serving.store import shared_weights as weight_sharing
from torchere.serving.store.package import Store, StoredArchive

HANDLER = "from torchere.handlers import BaseHandler\nclass Own(BaseHandler): pass\n"
BUILT_IN, OWN = "base_handler", "own.py"
BOTH = pytest.mark.parametrize("handler", [BUILT_IN, OWN])
_SIZE = 2 << 20
_WIDTH = 1024  # one square layer has 4 MiB


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    (tmp_path / "store").mkdir()
    (tmp_path / "temp").mkdir()
    store = Store(tmp_path / "store", Limits(), tmp_path / "temp")
    yield store
    store.close()
    assert list((tmp_path / "temp").iterdir()) == []


class Versions:
    """Packs and unpacks versions into one store, each with its weights."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store = store
        self._folder = folder
        self._count = 0

    def add(self, weights: bytes, handler: str = BUILT_IN, file: str = "w.pt") -> StoredArchive:
        self._count += 1
        name = f"v{self._count}.mar"
        model = {"modelName": "m", "modelVersion": f"{self._count}.0", "serializedFile": file}
        if file != "w.pt":
            model["modelFile"] = "model.py"
        with zipfile.ZipFile(self._folder / name, "w") as archive:
            archive.writestr(file, weights)
            if file != "w.pt":
                archive.writestr("model.py", "")
            if handler == OWN:
                archive.writestr(OWN, HANDLER)
            manifest = {"runtime": "python", "model": {**model, "handler": handler}}
            archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        opened = self.store.open(name)
        stored = self.store.unpack(name, opened)
        self.store.share_weights(opened, stored, handler)
        return stored


@pytest.fixture(autouse=True)
def on_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The temporary folder counts as one on a disk, whatever it is on."""
    (tmp_path / "mountinfo").touch()
    monkeypatch.setattr(weight_sharing, "_MOUNTS", tmp_path / "mountinfo")


@pytest.fixture
def versions(store: Store, tmp_path: Path) -> Versions:
    return Versions(store, tmp_path / "store")


def own(stored: StoredArchive) -> Path:
    """The weights as a handler finds them in its folder."""
    return stored.directory / "w.pt"


def mapped(stored: StoredArchive) -> Path:
    """The file that loaders map."""
    return Path(file_to_map(str(own(stored))))


def share_one_file(*stored: StoredArchive) -> bool:
    return len({mapped(each).stat().st_ino for each in stored}) == 1


@pytest.mark.parametrize("first", [BUILT_IN, OWN])
@pytest.mark.parametrize("second", [BUILT_IN, OWN])
def test_versions_with_the_same_weights_map_one_file(versions: Versions, first: str, second: str) -> None:
    weights = os.urandom(_SIZE)
    one = versions.add(weights, first)
    inode = own(one).stat().st_ino  # what executors of the first may have mapped by now
    other = versions.add(weights, second)
    third = versions.add(weights, first)
    assert share_one_file(one, other, third)
    assert mapped(one).stat().st_ino == inode
    assert all(own(each).read_bytes() == weights for each in (one, other, third))


@pytest.mark.parametrize("file", ["w.pth", "w.safetensors"])
def test_state_dicts_are_shared_in_every_format_that_is_mapped(versions: Versions, file: str) -> None:
    weights = os.urandom(_SIZE)
    stored = [versions.add(weights, file=file) for _ in range(2)]
    files = {Path(file_to_map(str(each.directory / file))) for each in stored}
    assert len({path.stat().st_ino for path in files}) == 1


@BOTH
def test_either_may_go_and_the_other_keeps_its_weights(versions: Versions, handler: str) -> None:
    weights = os.urandom(_SIZE)
    one, other, third = (versions.add(weights, handler) for _ in range(3))
    versions.store.remove(one)
    assert mapped(other).read_bytes() == own(other).read_bytes() == weights
    versions.store.remove(third)
    assert share_one_file(other, versions.add(weights, handler))
    assert mapped(other).read_bytes() == weights


@BOTH
def test_weights_that_differ_in_one_bit_are_not_shared(versions: Versions, handler: str) -> None:
    weights = bytearray(os.urandom(_SIZE))
    one = versions.add(bytes(weights), handler)
    weights[-1] ^= 1
    assert not share_one_file(one, versions.add(bytes(weights), handler))


def with_crc(data: bytes, crc: int) -> bytes:
    """The data with its last four bytes chosen so that the CRC-32 is `crc`."""
    start = zlib.crc32(data[:-4])
    base = zlib.crc32(bytes(4), start)
    # The CRC is linear in the bits: solve for those that make up the difference.
    rows: list[tuple[int, int]] = []  # (what the bits in the second number change in the CRC, those bits)
    for bit in range(32):
        change, bits = zlib.crc32((1 << bit).to_bytes(4, "little"), start) ^ base, 1 << bit
        for other, other_bits in rows:
            if change ^ other < change:
                change, bits = change ^ other, bits ^ other_bits
        rows.append((change, bits))
    wanted, chosen = base ^ crc, 0
    for change, bits in sorted(rows, reverse=True):
        if wanted ^ change < wanted:
            wanted, chosen = wanted ^ change, chosen ^ bits
    return data[:-4] + chosen.to_bytes(4, "little")


@BOTH
def test_a_forged_crc_shares_nothing(versions: Versions, handler: str) -> None:
    weights = os.urandom(_SIZE)
    forged = with_crc(os.urandom(_SIZE), zlib.crc32(weights))
    assert zlib.crc32(forged) == zlib.crc32(weights)
    one, other = versions.add(weights, handler), versions.add(forged, handler)
    assert not share_one_file(one, other)
    assert (mapped(one).read_bytes(), mapped(other).read_bytes()) == (weights, forged)


@pytest.mark.parametrize("other_handler", [BUILT_IN, OWN])
@pytest.mark.parametrize("writer", [0, 1])
def test_a_handler_that_overwrites_its_weights_changes_its_own_only(
    versions: Versions, other_handler: str, writer: int
) -> None:
    weights = os.urandom(_SIZE)
    handlers = [other_handler, other_handler]
    handlers[writer] = OWN
    both = [versions.add(weights, handler) for handler in handlers]
    with own(both[writer]).open("r+b") as file:
        file.truncate(10)
    other = both[1 - writer]
    assert mapped(other).read_bytes() == own(other).read_bytes() == weights
    assert mapped(both[writer]).stat().st_size == 10


def test_weights_with_a_second_name_in_their_folder_are_not_shared(
    versions: Versions, tmp_path: Path
) -> None:
    weights = os.urandom(_SIZE)
    folder = tmp_path / "store" / "download"
    versions.store.remove(versions.add(weights, OWN))
    with zipfile.ZipFile(tmp_path / "store" / "v1.mar") as packed:
        packed.extractall(folder)
    (folder / "blobs").mkdir()
    (folder / "w.pt").rename(folder / "blobs" / "b1")
    (folder / "w.pt").symlink_to("blobs/b1")  # as huggingface_hub downloads
    opened = versions.store.open("download")
    stored = versions.store.unpack("download", opened)
    versions.store.share_weights(opened, stored, OWN)
    other = versions.add(weights, OWN)
    in_use = mapped(other)  # by a running executor
    with (stored.directory / "blobs" / "b1").open("r+b") as file:
        file.truncate(10)
    assert in_use.read_bytes() == weights


def test_weights_that_a_handler_has_changed_are_not_given_to_others(versions: Versions) -> None:
    weights = os.urandom(_SIZE)
    one = versions.add(weights, OWN)
    own(one).write_bytes(bytes(_SIZE))
    other = versions.add(weights, OWN)
    assert mapped(other).read_bytes() == weights
    assert mapped(one).read_bytes() == bytes(_SIZE)


def test_a_full_disk_shares_nothing_and_harms_nothing(
    versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, target: Path) -> NoReturn:
        target.write_bytes(b"begun")
        raise OSError(errno.ENOSPC, "No space left on device")

    weights = os.urandom(_SIZE)
    one = versions.add(weights, OWN)
    monkeypatch.setattr(shutil, "copyfile", full)
    other = versions.add(weights, OWN)
    assert not share_one_file(one, other)
    assert [path.name for path in one.directory.parent.iterdir()] == ["model"]
    assert mapped(one).read_bytes() == mapped(other).read_bytes() == weights


def test_no_copy_is_made_where_the_disk_is_memory(versions: Versions, tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    mount = f"22 1 {os.major(device)}:{os.minor(device)} / /tmp rw shared:1 - tmpfs tmpfs rw\n"
    (tmp_path / "mountinfo").write_text(mount)
    weights = os.urandom(_SIZE)
    assert not share_one_file(versions.add(weights, OWN), versions.add(weights, OWN))
    others = os.urandom(_SIZE)
    assert share_one_file(versions.add(others, BUILT_IN), versions.add(others, BUILT_IN))


def test_a_version_alone_is_not_read(versions: Versions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sharing, "_same_bytes", None)
    one, other = versions.add(os.urandom(_SIZE), OWN), versions.add(os.urandom(_SIZE), OWN)
    assert not share_one_file(one, other)


def module_bytes() -> bytes:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(_WIDTH, _WIDTH, bias=False).eval()), buffer)
    return buffer.getvalue()


def weights_pss_bytes(module: torch.jit.ScriptModule) -> int:
    """The share of this process in the mapping that the weights of a module lie in."""
    address = module.weight.data_ptr()
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()
        if not head[0].endswith(":"):
            low, high = (int(bound, 16) for bound in head[0].split("-"))
            inside = low <= address < high
        elif inside and head[0] == "Pss:":
            return int(head[1]) * 1024
    raise AssertionError("the weights are nowhere")


@BOTH
def test_two_loaded_versions_take_the_memory_of_one(versions: Versions, handler: str) -> None:
    data = module_bytes()
    row = torch.ones(1, _WIDTH)
    first = versions.add(data, handler)
    one = load_torchscript(str(own(first)), "cpu")
    expected = one(row)
    alone = weights_pss_bytes(one)
    other = load_torchscript(str(own(versions.add(data, handler))), "cpu")
    assert torch.equal(other(row), expected)
    assert alone > len(data) * 0.9
    assert weights_pss_bytes(one) + weights_pss_bytes(other) < alone * 1.1
    with torch.no_grad():
        other.weight.zero_()
    assert torch.equal(one(row), expected)
    versions.store.remove(first)
    assert torch.equal(one(row), expected)
