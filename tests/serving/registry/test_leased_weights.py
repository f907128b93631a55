"""Weights that stay in their archive for a while: nobody can change them there, and no answer tells."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from torchere.archiver.request import ArchiveRequest
from torchere.archiver.writer import write_archive
from torchere.handlers.torchscript import load_torchscript
from torchere.serving.errors import InvalidArchive, ServingError
from torchere.serving.registry import leased_weights
from torchere.serving.registry.leased_weights import LeasedWeights
from torchere.serving.registry.store import Store, StoredArchive
from torchere.serving.settings import Limits

_WIDTH = 1024  # one square layer has 4 MiB
ROWS = torch.ones(2, _WIDTH)


class Counting(torch.nn.Module):
    """Changes itself while it answers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(_WIDTH, _WIDTH)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x) * 0 + self.calls


class Prepared(torch.nn.Module):
    """Changes its weights while it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(_WIDTH, _WIDTH))

    @torch.jit.export
    def __getstate__(self) -> tuple[torch.Tensor, bool]:
        return self.weight, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[torch.Tensor, bool]) -> None:
        self.weight, self.training = state
        with torch.no_grad():
            self.weight.mul_(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Place:
    """A model store with archives whose weights may stay in them, and what was unpacked of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "store"
        self.temp = folder / "temp"
        self.folder.mkdir()
        self.temp.mkdir()
        self.store = Store(self.folder, Limits(), self.temp)
        self.weights = folder / "w.pt"

    def pack(self, module: torch.nn.Module | None = None, **options: str) -> Path:
        torch.manual_seed(0)
        scripted = torch.jit.script((module or torch.nn.Linear(_WIDTH, _WIDTH)).eval())
        torch.jit.save(scripted, str(self.weights))  # type: ignore[no-untyped-call]
        request = {"model_name": "m", "version": "1.0", "serialized_file": str(self.weights)}
        request |= {"handler": "base_handler", "export_path": str(self.folder)} | options
        return write_archive(ArchiveRequest(**request))  # type: ignore[arg-type]

    def unpack(self, name: str = "m.mar") -> StoredArchive:
        return self.store.unpack(name, self.store.open(name))

    def late(self, name: str = "m.mar") -> tuple[StoredArchive, LeasedWeights]:
        stored = self.unpack(name)
        assert stored.late_weights is not None
        assert not (stored.directory / "w.pt").exists()
        return stored, stored.late_weights

    def answer(self) -> torch.Tensor:
        """What the model says that was packed last."""
        found: torch.Tensor = torch.jit.load(str(self.weights))(ROWS)  # type: ignore[no-untyped-call]
        return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with (tmp_path / "trial").open("w+b"):
        pass
    with (tmp_path / "trial").open("rb") as trial:
        if not leased_weights._lease(trial):
            pytest.skip("the file system of temporary files gives no leases")
    monkeypatch.setattr(leased_weights, "_WORTH_LEAVING_BYTES", 1 << 20)
    monkeypatch.setattr(leased_weights, "is_in_memory", lambda path: False)
    for name in ("_FIRST_ANSWERS_S", "_LOADED_WITHIN_S"):  # only when a test says so
        monkeypatch.setattr(leased_weights, name, 3600.0)
    place = Place(tmp_path)
    yield place
    place.store.close()
    assert list(place.temp.iterdir()) == []


def load(stored: StoredArchive) -> torch.jit.ScriptModule:
    return load_torchscript(str(stored.directory / "w.pt"), "cpu")


def mapped_files() -> str:
    return Path("/proc/self/maps").read_text()


def is_held(path: Path) -> bool:
    """Whether somebody who wants to write to the file would have to wait."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except BlockingIOError:
        return True
    return False


def test_a_model_answers_the_same_before_and_after_its_weights_are_copied(place: Place) -> None:
    archive = place.pack()
    stored, late = place.late()
    module = load(stored)
    assert torch.equal(module(ROWS), place.answer())
    assert str(archive) in mapped_files()
    late.wait()
    assert (stored.directory / "w.pt").read_bytes() == place.weights.read_bytes()
    late.close()  # waits until the mapping is moved
    assert str(archive) not in mapped_files()
    assert str(stored.directory / "w.pt") in mapped_files()
    assert torch.equal(module(ROWS), place.answer())
    assert torch.equal(load(stored)(ROWS), place.answer())
    place.store.remove(stored)


def test_who_wants_to_write_to_the_archive_waits_for_the_copy(place: Place) -> None:
    archive = place.pack()
    stored, late = place.late()
    module = load(stored)
    assert is_held(archive)
    writer = threading.Thread(target=archive.write_bytes, args=(b"something else",))
    writer.start()
    late.wait()
    writer.join(60)
    assert archive.read_bytes() == b"something else"
    assert torch.equal(module(ROWS), place.answer())
    place.store.remove(stored)


def test_several_modules_are_moved_also_while_they_answer(place: Place) -> None:
    place.pack()
    stored, late = place.late()
    modules, expected, over = [load(stored) for _ in range(3)], place.answer(), threading.Event()
    wrong: list[int] = []

    def ask(number: int) -> None:
        while not over.is_set():
            with torch.inference_mode():
                wrong.extend([number] * (not torch.equal(modules[number](ROWS), expected)))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    late.close()
    over.set()
    for thread in threads:
        thread.join()
    assert not wrong
    place.store.remove(stored)


def test_it_is_copied_by_itself_after_it_was_loaded(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leased_weights, "_FIRST_ANSWERS_S", 0.0)
    archive = place.pack()
    stored, late = place.late()
    module = load(stored)
    late._thread.join(60)
    assert not is_held(archive)
    assert str(stored.directory / "w.pt") in mapped_files()
    assert torch.equal(module(ROWS), place.answer())
    place.store.remove(stored)


def test_what_is_never_loaded_is_copied_too(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leased_weights, "_LOADED_WITHIN_S", 0.0)
    monkeypatch.setattr(leased_weights, "_FIRST_ANSWERS_S", 0.0)
    place.pack()
    stored = place.unpack()
    assert stored.late_weights is not None
    stored.late_weights._thread.join(60)
    assert (stored.directory / "w.pt").read_bytes() == place.weights.read_bytes()
    place.store.remove(stored)


def test_what_nobody_loaded_is_given_up_at_once_when_it_is_removed(place: Place) -> None:
    archive = place.pack()
    stored, late = place.late()
    waiting = threading.Thread(target=place.store.remove, args=(stored,))
    waiting.start()
    waiting.join(60)
    assert not is_held(archive)
    with pytest.raises(OSError, match="given up"):
        late.wait()


@pytest.mark.parametrize("module", [Counting(), Prepared()], ids=lambda module: type(module).__name__)
def test_a_module_that_writes_to_its_weights_waits_for_a_file_of_its_own(
    place: Place, module: torch.nn.Module
) -> None:
    archive = place.pack(module)
    stored, _ = place.late()
    loaded = load(stored)
    assert (stored.directory / "w.pt").exists()
    place.store.remove(stored)
    assert str(archive) not in mapped_files()
    assert torch.equal(loaded(ROWS), place.answer())


def test_what_can_not_be_mapped_waits_for_the_file(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.pack()
    stored, _ = place.late()
    monkeypatch.setattr("torchere.handlers.torchscript_mapped._is_ordinary", lambda archive: False)
    assert torch.equal(load(stored)(ROWS), place.answer())
    assert (stored.directory / "w.pt").exists()
    place.store.remove(stored)


def test_versions_with_the_same_weights_share_them_once_they_are_written(place: Place) -> None:
    place.pack(model_name="one")
    place.pack(model_name="two")
    versions = [place.late(f"{name}.mar") for name in ("one", "two")]
    modules = []
    for stored, _ in versions:
        opened = place.store.open(stored.url)
        place.store.share_weights(opened, stored, "base_handler")
        modules.append(load(stored))
    for _, late in versions:
        late.close()
    files = {(stored.directory / "w.pt").stat().st_ino for stored, _ in versions}
    assert len(files) == 1
    assert all(torch.equal(module(ROWS), place.answer()) for module in modules)
    for stored, _ in versions:
        place.store.remove(stored)


def test_a_handler_that_is_not_ours_finds_the_file(place: Place) -> None:
    place.pack()
    stored, _ = place.late()
    place.store.share_weights(place.store.open("m.mar"), stored, "installed_handler")
    assert (stored.directory / "w.pt").exists()
    place.store.remove(stored)


def in_use(place: Place, archive: Path) -> StoredArchive:
    with archive.open("r+b"):
        return place.unpack()


def with_code(place: Place, archive: Path) -> StoredArchive:
    handler = place.folder.parent / "own.py"
    handler.write_text("def handle(data, context): ...\n")
    place.pack(handler=str(handler), force=True)  # type: ignore[arg-type]
    return place.unpack()


def for_workers(place: Place, archive: Path) -> StoredArchive:
    config = place.folder.parent / "c.yaml"
    config.write_text("isolation: process\n")
    place.pack(config_file=str(config), force=True)  # type: ignore[arg-type]
    return place.unpack()


def as_folder(place: Place, archive: Path) -> StoredArchive:
    place.pack(model_name="f", archive_format="no-archive")
    return place.unpack("f")


@pytest.mark.parametrize("unpacked", [in_use, with_code, for_workers, as_folder])
def test_other_archives_are_unpacked_whole(
    place: Place, unpacked: Callable[[Place, Path], StoredArchive]
) -> None:
    stored = unpacked(place, place.pack())
    assert stored.late_weights is None
    assert (stored.directory / "w.pt").read_bytes() == place.weights.read_bytes()
    place.store.remove(stored)


def test_damaged_weights_are_refused_before_anything_is_loaded(place: Place) -> None:
    archive = place.pack()
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 1
    archive.write_bytes(data)
    with pytest.raises(InvalidArchive, match=r"CRC|SHA-256"):
        place.unpack()
    assert not is_held(archive)


def test_a_disk_without_room_for_the_weights_says_so_at_once(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: int) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    archive = place.pack()
    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(ServingError, match="Failed to save model"):
        place.unpack()
    assert not is_held(archive)


def test_weights_that_can_not_be_copied_are_told_of_and_go_on_from_the_archive(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: int) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    archive = place.pack()
    stored, late = place.late()
    module = load(stored)
    monkeypatch.setattr("os.sendfile", broken)
    with pytest.raises(OSError, match="Input/output error"):
        late.wait()
    assert "can't be unpacked" in caplog.text
    assert is_held(archive)
    assert torch.equal(module(ROWS), place.answer())
    del module
    place.store.remove(stored)
    assert not is_held(archive)
