"""Mapped TorchScript answers as `torch.jit.load` does, and what it can't map it leaves alone."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torchere.archiver.container.zip import read_local
from torchere.archiver.models.load.torchscript import load_mapped
from torchere.handlers.loading.torchscript import load_torchscript

Save = Callable[[torch.nn.Module], str]


class Varied(torch.nn.Module):
    """Parameters of several types, a buffer, one tensor under two names, a view, an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = torch.nn.Parameter(torch.randn(512, 512))
        self.same = self.wide
        self.halves: torch.Tensor
        self.register_buffer("halves", torch.randn(512).half())
        self.mask: torch.Tensor
        self.register_buffer("mask", torch.arange(512) % 2 == 0)
        self.column: torch.Tensor
        self.register_buffer("column", self.wide.detach()[:, 3])
        self.empty: torch.Tensor
        self.register_buffer("empty", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.wide + (x @ self.same).relu() + self.halves.float()
        found: torch.Tensor = torch.where(self.mask, y, self.column) + self.empty.sum()
        return found


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def write(module: torch.nn.Module) -> str:
        path = str(tmp_path / "module.pt")
        torch.jit.save(module, path)
        return path

    return write


def rows(width: int) -> torch.Tensor:
    return torch.randn(5, width, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_mapped_module_equals_the_loaded_one(save: Save, frozen: bool) -> None:
    scripted = torch.jit.script(Varied().eval())
    path = save(torch.jit.freeze(scripted) if frozen else scripted)
    mapped = load_mapped(path)
    loaded = torch.jit.load(path)
    assert mapped is not None
    assert torch.equal(mapped(rows(512)), loaded(rows(512)))
    assert mapped.original_name == loaded.original_name
    assert [name for name, _ in mapped.named_parameters()] == [name for name, _ in loaded.named_parameters()]
    for (name, one), (_, other) in zip(mapped.named_buffers(), loaded.named_buffers(), strict=True):
        assert torch.equal(one, other), name
        assert (one.dtype, one.stride()) == (other.dtype, other.stride()), name


def test_the_weights_lie_in_a_mapping_of_the_file(save: Save) -> None:
    path = save(torch.jit.script(Varied().eval()))
    mapped = load_mapped(path)
    assert mapped is not None
    address = next(mapped.parameters()).data_ptr()
    spans = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(path)]
    bounds = [[int(bound, 16) for bound in span[0].split("-")] for span in spans]
    assert any(low <= address < high for low, high in bounds)
    assert address % 64 == 0


def test_writing_to_a_weight_leaves_the_file_as_it_is(save: Save) -> None:
    path = save(torch.jit.script(Varied().eval()))
    before = Path(path).read_bytes()
    mapped = load_mapped(path)
    assert mapped is not None
    with torch.no_grad():
        next(mapped.parameters()).zero_()
    assert Path(path).read_bytes() == before


def test_a_module_outlives_the_name_of_its_file(save: Save) -> None:
    path = save(torch.jit.script(Varied().eval()))
    expected = torch.jit.load(path)(rows(512))
    mapped = load_mapped(path)
    Path(path).unlink()
    assert mapped is not None
    assert torch.equal(mapped(rows(512)), expected)


def test_tensors_in_attributes_and_in_code_at_once_are_left_to_torch(save: Save) -> None:
    scripted = torch.jit.script(Varied().eval())
    path = save(torch.jit.freeze(scripted, preserved_attrs=["wide"]))
    folders = {name.split("/")[1] for name in zipfile.ZipFile(path).namelist()}
    assert {"data", "constants"} <= folders
    assert load_mapped(path) is None
    assert torch.equal(load_torchscript(path, "cpu")(rows(512)), scripted(rows(512)))


def test_a_small_file_is_left_to_torch(save: Save) -> None:
    path = save(torch.jit.script(torch.nn.Linear(2, 2)))
    module = load_torchscript(path, "cpu")
    assert module(rows(2)).shape == (5, 2)
    assert path not in Path("/proc/self/maps").read_text()


def repack(path: str, change: Callable[[str, bytes], tuple[str, bytes, int]]) -> None:
    with zipfile.ZipFile(path) as old:
        entries = [change(name, old.read(name)) for name in old.namelist()]
    with zipfile.ZipFile(path, "w") as new:
        for name, data, method in entries:
            new.writestr(name, data, method)


@pytest.mark.parametrize("what", ["compressed weights", "other byte order", "no longer aligned"])
def test_what_can_not_be_mapped_is_left_to_torch(save: Save, what: str) -> None:
    path = save(torch.jit.script(Varied().eval()))

    def change(name: str, data: bytes) -> tuple[str, bytes, int]:
        deflate = what == "compressed weights" and "/data/" in name
        if what == "other byte order" and name.endswith("/byteorder"):
            data = b"big"
        return name, data, zipfile.ZIP_DEFLATED if deflate else zipfile.ZIP_STORED

    repack(path, change)
    assert load_mapped(path) is None


def test_what_does_not_unpack_is_left_to_torch(save: Save) -> None:
    path = Path(save(torch.jit.script(Varied().eval())))
    with zipfile.ZipFile(path) as archive:
        entry = next(one for one in archive.infolist() if one.compress_type == zipfile.ZIP_DEFLATED)
    whole = bytearray(path.read_bytes())
    with path.open("rb") as file:
        start = read_local(file, entry.header_offset).data_offset
    whole[start : start + entry.compress_size] = b"\xff" * entry.compress_size  # no deflate
    path.write_bytes(whole)
    assert load_mapped(str(path)) is None


def test_what_is_no_zip_is_left_to_torch(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_bytes(b"text" * (1 << 19))
    assert load_mapped(str(tmp_path / "text.pt")) is None


def test_a_torch_without_the_private_door_loads_as_ever(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(torch.jit.script(Varied().eval()))
    monkeypatch.delattr(torch._C, "_import_ir_module_from_package")
    assert load_mapped(path) is None
    assert load_torchscript(path, "cpu")(rows(512)).shape == (5, 512)


def test_the_common_loader_maps(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(torch.jit.script(Varied().eval()))
    monkeypatch.setattr(torch.jit, "load", None)
    module = load_torchscript(path, "cpu")
    assert not next(module.parameters()).requires_grad
