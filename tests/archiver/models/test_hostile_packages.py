"""Packages with more in them than torch writes, and TorchScript that writes files: not loaded."""

from __future__ import annotations

import io
import json
import os
import pickle
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.load.source import read_source
from torchere.archiver.scan.weights import AOTINDUCTOR, classify_file

REFUSED = r"could run code: "


class Trap:
    """Unpickled, it would make a file."""

    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.sign),)


class Labelled(torch.nn.Module):
    def forward(self, metadata: torch.Tensor, target: torch.Tensor, name: torch.Tensor) -> torch.Tensor:
        return metadata + target + name


@pytest.fixture
def sign(tmp_path: Path) -> Path:
    return tmp_path / "code-ran"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Its inputs are called as fields of the format are."""
    free = {0: torch.export.Dim("batch", min=1, max=64)}
    rows = torch.ones(2, 3)
    exported = torch.export.export(Labelled(), (rows, rows, rows), dynamic_shapes=(free, free, free))
    torch.export.save(exported, tmp_path / "program.pt2")
    return tmp_path / "program.pt2"


def changed(
    source: Path, program: dict[str, Any] | None = None, more: dict[str, bytes] | None = None
) -> Path:
    """A copy of a package with another program, and with entries more."""
    target = source.with_name("changed.pt2")
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for info in old.infolist():
            is_program = program is not None and info.filename.endswith("models/model.json")
            new.writestr(info.filename, json.dumps(program) if is_program else old.read(info))
        for name, data in (more or {}).items():
            new.writestr(f"program/{name}", data)
    return target


def json_of(source: Path) -> dict[str, Any]:
    with zipfile.ZipFile(source) as package:
        found: dict[str, Any] = json.loads(package.read("program/models/model.json"))
    return found


def refused(path: Path, match: str) -> None:
    with pytest.raises(ModelRefused, match=match) as caught:
        read_source(path, None, None, False)
    assert "\n" not in str(caught.value)


def test_inputs_may_be_called_as_fields_of_the_format(program: Path) -> None:
    source = read_source(program, None, None, False)
    assert source.names == ("metadata", "target", "name")


@pytest.mark.parametrize("name", ["metadata", "target", "name"])
def test_sizes_of_such_inputs_are_checked(program: Path, sign: Path, name: str) -> None:
    changes = json_of(program)
    sizes = changes["graph_module"]["graph"]["tensor_values"][name]["sizes"]
    sizes[0]["as_expr"]["expr_str"] = f"__import__('os').mkdir({str(sign)!r})"
    refused(changed(program, changes), REFUSED + "a size")
    assert not sign.exists()


def test_sizes_that_take_for_ever_are_refused(program: Path) -> None:
    changes = json_of(program)
    changes["range_constraints"] = {}
    sizes = changes["graph_module"]["graph"]["tensor_values"]["target"]["sizes"]
    sizes[0]["as_expr"]["expr_str"] = "9**9**9**9"
    refused(changed(program, changes), "a size in it is '9\\*\\*9\\*\\*9\\*\\*9'; expected powers")


@pytest.mark.parametrize(
    "name",
    [
        "models/evil.jsox",  # torch takes all of models/ for programs
        "models/second.json",
        "Models/model.json2",
        "data/executorch/a.pte",
        "data/weights/evil.pt",
        "data/weights/sub/weight_0",
        "data/constants/..weight_0",
        "xl_model_weights/model_param_config",
        "code/__torch__.py",
    ],
)
def test_what_torch_does_not_write_is_refused(program: Path, name: str) -> None:
    refused(changed(program, more={name: b"{}"}), "which torch.export.save does not write|damaged")


def test_extra_files_are_let_be(program: Path) -> None:
    exported = torch.export.load(program)
    torch.export.save(exported, program, extra_files={"notes.txt": "hello", "a/b.json": "{}"})
    assert read_source(program, None, None, False).program is not None


def test_native_code_beside_a_program_makes_it_a_compiled_package(program: Path) -> None:
    path = changed(program, more={"data/aotinductor/other/a.wrapper.cpp": b"int main;"})
    found = classify_file(path)
    assert found.kind == AOTINDUCTOR
    assert "is compiled from C++ and runs as native code in a worker process" in found.risk
    assert read_source(path, None, None, False).module is None  # looked at, not loaded


def old_form(path: Path, program: bytes, **more: bytes) -> Path:
    """As torch before 2.7 wrote it."""
    with zipfile.ZipFile(path, "w") as package:
        package.writestr("version", "8.19")
        package.writestr("serialized_exported_program.json", program)
        for name, data in more.items():
            package.writestr(name, data)
    return path


@pytest.mark.parametrize("name", ["serialized_state_dict.json", "serialized_constants.json"])
def test_pickles_of_the_old_form_are_read_whatever_they_are_called(
    tmp_path: Path, sign: Path, name: str
) -> None:
    data = pickle.dumps(Trap(sign))
    program = old_form(tmp_path / "old.pt2", b"{}", **{name: data})
    with zipfile.ZipFile(program) as package:
        assert "archive_format" not in package.namelist()
    found = classify_old(program)
    assert any("mkdir" in reason for reason in found)
    other = old_form(tmp_path / "other.pt2", b"{}", **{"a/models/model.json": b"{}"})
    assert any("a/models/model.json" in reason for reason in classify_old(other))
    assert not sign.exists()


def classify_old(path: Path) -> tuple[str, ...]:
    from torchere.archiver.scan import UnsafeModel
    from torchere.archiver.scan.exported_program import check_program

    with open(path, "rb") as file:
        try:
            check_program(file, path.stat().st_size)
        except UnsafeModel as error:
            return (str(error),)
    return ()


def test_example_inputs_that_torch_would_read_in_another_way_are_refused(program: Path, sign: Path) -> None:
    disguised = io.BytesIO()
    with tarfile.open(fileobj=disguised, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("N.N.N.N.N."))  # five pickles of None, for who reads no tar
        evil = pickle.dumps(Trap(sign))
        info = tarfile.TarInfo("pickle")
        info.size = len(evil)
        archive.addfile(info, io.BytesIO(evil))
    refused(with_example(program, disguised.getvalue()), "its pickle imports a name that can't be told")
    script = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.ReLU()), script)
    refused(with_example(program, script.getvalue()), "its pickle imports .*TorchScript")
    assert not sign.exists()


def with_example(source: Path, data: bytes) -> Path:
    target = source.with_name("changed.pt2")
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for info in old.infolist():
            is_example = info.filename.endswith("sample_inputs/model.pt")
            new.writestr(info.filename, data if is_example else old.read(info))
    return target


class Writing(torch.nn.Module):
    """Writes a file while it is loaded."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return self.path, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.path = state[0]
        self.training = state[1]
        torch.save(torch.ones(1), self.path)


def test_torchscript_that_writes_files_is_loaded_only_if_it_is_trusted(tmp_path: Path, sign: Path) -> None:
    path = tmp_path / "writes.pt"
    torch.jit.script(Writing(str(sign))).save(str(path))
    refused(path, r"could read or write any file: torch\.save in code/.*--allow-pickle")
    assert not sign.exists()
    assert read_source(path, None, None, True).module is not None
    assert sign.exists()
