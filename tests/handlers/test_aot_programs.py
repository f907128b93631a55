"""Exported programs are let in only where they can't run code of their own."""

import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from torchere.handlers.compiled import load as aot


class Double(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "double.pt2"
    torch.export.save(torch.export.export(Double(), (torch.ones(2, 3),)), path)
    return path


def rewritten(source: Path, target: Path, old: bytes, new: bytes) -> None:
    """A copy of a package, with other bytes in its program."""
    with zipfile.ZipFile(source) as read, zipfile.ZipFile(target, "w") as written:
        for info in read.infolist():
            content = read.read(info)
            written.writestr(info.filename, content.replace(old, new))


def test_what_torch_writes_is_loaded(program: Path) -> None:
    run = aot.load_package(str(program), str(program.parent), "cpu")
    assert torch.equal(run(torch.ones(2, 3)), torch.full((2, 3), 2.0))


def test_several_programs_are_loaded_at_once_as_executors_of_several_models_do(program: Path) -> None:
    def loaded(_: int) -> torch.Tensor:
        result: torch.Tensor = aot.load_package(str(program), str(program.parent), "cpu")(torch.ones(2, 3))
        return result

    with ThreadPoolExecutor(8) as threads:
        for result in threads.map(loaded, range(32)):
            assert torch.equal(result, torch.full((2, 3), 2.0))


class Ramp(torch.nn.Module):
    """Makes a tensor of its own, on the device it was exported on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + torch.arange(3)


def test_a_program_moves_to_another_device_with_what_it_makes_there(tmp_path: Path) -> None:
    path = str(tmp_path / "ramp.pt2")
    torch.export.save(torch.export.export(Ramp(), (torch.ones(2, 3),)), path)
    run = aot.load_package(path, str(tmp_path), "meta")
    assert run(torch.ones(2, 3, device="meta")).device.type == "meta"


def test_an_operator_that_is_none_of_torchs_is_refused_before_anything_is_loaded(
    program: Path, tmp_path: Path
) -> None:
    hostile = tmp_path / "hostile.pt2"
    rewritten(program, hostile, b"torch.ops.aten.mul.Tensor", b"torch.serialization.os.getcwd")
    with pytest.raises(RuntimeError, match=r"hostile\.pt2 is not loaded, for it could run code of its own"):
        aot.load_package(str(hostile), str(tmp_path), "cpu")


def test_native_code_beside_a_program_is_not_loaded_with_it(program: Path, tmp_path: Path) -> None:
    hostile = tmp_path / "hostile.pt2"
    rewritten(program, hostile, b"", b"")
    with zipfile.ZipFile(hostile, "a") as package:
        package.writestr("double/data/aotinductor/other/a.wrapper.cpp", b"")
    with pytest.raises(RuntimeError, match=r"it holds double/data/aotinductor/other/a\.wrapper\.cpp, which"):
        aot.load_package(str(hostile), str(tmp_path), "cpu")
