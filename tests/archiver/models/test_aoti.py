"""AOTInductor: compiled for all tests here, by library and by templates, with its fallback, and served."""

from __future__ import annotations

import json
import platform
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torchere.archiver import open_archive
from torchere.archiver.commands import pack_model
from torchere.archiver.errors import ModelRefused, PackingError
from torchere.archiver.models.convert import aotinductor as to_aoti
from torchere.archiver.models.convert.aotinductor import Timed, gains_by_freezing
from torchere.archiver.models.convert.exported_program import to_program
from torchere.archiver.models.load.source import aoti_metadata
from torchere.archiver.request import ArchiveRequest, BuildOptions
from torchere.archiver.scan.weights import AOTINDUCTOR, classify_file
from torchere.archiver.signature import parse
from torchere.archiver.writer import Progress

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")


@pytest.fixture(scope="session")
def compiled(forms: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive; the build by templates won, however busy the machine is."""
    folder = tmp_path_factory.mktemp("aoti")
    request = ArchiveRequest(model_name="net", version="1.0", handler="tensor", export_path=folder)
    options = BuildOptions(
        serialized_file=forms.file("program.model"), model_format="aoti", verify=False, dynamic_batch="1:64"
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(to_aoti, "timed", lambda *_: Timed((2.0, 8.0), (1.0, 4.0)))
        return pack_model(request, options, Progress(None), lambda _text: None)


@pytest.fixture(scope="session")
def unpacked(compiled: Path) -> Path:
    return open_archive(compiled).extract(compiled.with_name("unpacked"))


def test_the_archive_says_what_it_was_compiled_for(unpacked: Path) -> None:
    build = json.loads((unpacked / "MAR-INF" / "build.json").read_text())
    isa = build.pop("isa")
    assert isa == isa.lower() and isa
    assert build == {
        "format": "aoti",
        "torch": torch.__version__.partition("+")[0],
        "fallback": "model.exported.pt2",
    }
    assert classify_file(unpacked / "model.pt2").kind == AOTINDUCTOR
    assert parse((unpacked / "signature.json").read_text()).inputs[0].shape == (-1, 8)


def test_the_build_that_won_is_what_is_packed(unpacked: Path) -> None:
    with zipfile.ZipFile(unpacked / "model.pt2") as package:
        sources = [package.read(name) for name in package.namelist() if name.endswith("kernel.cpp")]
    assert any(b"micro_gemm" in source for source in sources)


@pytest.mark.filterwarnings("ignore:The tensor attributes")  # torch's words about exporting its own LSTM
@pytest.mark.parametrize(
    ("network", "shape", "gains"),
    [
        (torch.nn.Linear(4, 4), (2, 4), False),
        (torch.nn.Conv2d(3, 4, 1), (2, 3, 5, 5), True),
        (torch.nn.LSTM(4, 4), (3, 2, 4), True),
    ],
    ids=["linear", "convolution", "lstm"],
)
def test_weights_are_packed_for_layers_that_gain_by_it(
    network: torch.nn.Module, shape: tuple[int, ...], gains: bool
) -> None:
    assert gains_by_freezing(to_program(network.eval(), (torch.rand(shape),), [])) is gains


@pytest.mark.parametrize("size", [1, 3])
def test_it_answers_as_the_model_does_for_any_batch(
    forms: Any, compiled: Path, serve: Callable[..., list[Any]], size: int
) -> None:
    rows = torch.rand(size, 8)
    answers = serve(compiled, [{"body": row.tolist()} for row in rows])
    found = torch.tensor([answer["scores"] for answer in answers])
    torch.testing.assert_close(found, forms.answer(rows)["scores"], atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="levels are those of x86-64")
def test_the_code_is_for_a_level_of_cpus_and_not_for_this_one_alone(unpacked: Path) -> None:
    with zipfile.ZipFile(unpacked / "model.pt2") as package:
        code = b"".join(package.read(name) for name in package.namelist() if name.endswith(".cpp"))
    assert b"march=x86-64-v" in code  # in the compiler's command, which stands below it
    assert b"march=native" not in code


def test_the_fallback_is_an_exported_program_of_the_same_model(forms: Any, unpacked: Path) -> None:
    program = torch.export.load(unpacked / "model.exported.pt2")
    rows = torch.rand(5, 8)
    torch.testing.assert_close(program.module()(rows)["scores"], forms.answer(rows)["scores"])


def test_a_package_that_is_packed_again_is_not_loaded_for_it(
    unpacked: Path, pack: Callable[..., Path]
) -> None:
    given = {"serialized_file": unpacked / "model.pt2"}
    archive = open_archive(pack("base_handler", **given))
    assert json.loads(archive.read_text("MAR-INF/build.json")) == {
        "format": "aoti",
        "isa": aoti_metadata(unpacked / "model.pt2")["AOTI_CPU_ISA"].lower(),
    }
    with pytest.raises(PackingError, match=r"the handler 'tensor', the default, needs signature\.json"):
        pack(**given)


def test_a_signature_is_derived_from_machine_code_only_when_it_is_trusted(
    forms: Any, unpacked: Path, pack: Callable[..., Path]
) -> None:
    given = {"serialized_file": unpacked / "model.pt2", "example": forms.file("example.npy")}
    with pytest.raises(ModelRefused, match="machine code would have to run"):
        pack(**given)
    archive = pack(**given, allow_pickle=True)
    assert parse(open_archive(archive).read_text("signature.json")).batched


def test_a_package_for_another_machine_is_refused(
    unpacked: Path, tmp_path: Path, pack: Callable[..., Path]
) -> None:
    other = tmp_path / "other.pt2"
    with zipfile.ZipFile(unpacked / "model.pt2") as old, zipfile.ZipFile(other, "w") as new:
        for info in old.infolist():
            data = old.read(info)
            new.writestr(info.filename, data.replace(platform.machine().encode(), b"riscv64"))
    with pytest.raises(ModelRefused, match=f"compiled for riscv64, and this machine is {platform.machine()}"):
        pack(serialized_file=other)


def test_machine_code_can_not_become_another_format(
    forms: Any, unpacked: Path, pack: Callable[..., Path]
) -> None:
    with pytest.raises(ModelRefused, match="AOTInductor is packed as it is and can't become export"):
        pack(serialized_file=unpacked / "model.pt2", model_format="export", example=forms.file("example.npy"))


def test_an_instruction_set_that_is_not_here_is_refused(forms: Any, pack: Callable[..., Path]) -> None:
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        pytest.skip("this machine has them all")
    with pytest.raises(ModelRefused, match="--isa is avx512, and this machine has"):
        pack(serialized_file=forms.file("program.model"), model_format="aoti", isa="avx512")
