"""Matrices multiplied by the library or by templates: what is measured, and what decides."""

from __future__ import annotations

import math
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.convert import aotinductor as aoti_candidates
from torchere.archiver.models.convert import aotinductor as to_aoti
from torchere.archiver.models.convert.aotinductor import Timed, multiplies, samples, timed
from torchere.archiver.models.convert.exported_program import to_program
from torchere.archiver.models.inputs.sizes import FreeSize, batch_of

WIN = Timed((2.0, 8.0), (1.0, 4.0))


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 3, bias=False)).eval()


def free(bounds: tuple[int, int]) -> tuple[tuple[torch.Tensor], list[FreeSize]]:
    rows = (torch.rand(2, 24),)
    return rows, [batch_of(rows, bounds)]


@pytest.mark.parametrize(
    ("plain", "templates", "drift", "win"),
    [
        ((2.0, 8.0), (1.0, 4.0), 0.0, True),
        ((2.0, 8.0), (2.04, 6.0), 1e-6, True),
        ((2.0, 8.0), (2.2, 5.0), 0.0, False),
        ((2.0, 8.0), (1.98, 7.95), 0.0, False),
        ((2.0,), (1.5,), 0.0, True),
        ((2.0,), (1.5,), 1e-2, False),
        ((2.0,), (1.5,), math.nan, False),
    ],
    ids=[
        "faster",
        "faster and equal",
        "slower for one row",
        "equal",
        "one size",
        "other answers",
        "no answers",
    ],
)
def test_templates_are_taken_when_they_gain_and_lose_nowhere(
    plain: tuple[float, ...], templates: tuple[float, ...], drift: float, win: bool
) -> None:
    found = Timed(plain, templates, drift)

    assert found.templates_win is win
    assert found.told().endswith("chosen: templates" if win else "chosen: library")


def test_the_user_is_told_both_times() -> None:
    assert WIN.told() == (
        "matrix multiplications: library 2 / 8 ms, Inductor's templates 1 / 4 ms; chosen: templates"
    )


def test_only_linear_layers_in_fp32_are_worth_a_second_build(network: nn.Module) -> None:
    rows, sizes = free((1, 64))

    assert multiplies(to_program(network, rows, sizes))
    assert not multiplies(to_program(network.double(), (rows[0].double(),), sizes))
    assert not multiplies(to_program(nn.Sequential(nn.GELU()), rows, sizes))


@pytest.mark.parametrize(
    ("bounds", "measured"), [((1, 64), [1, 8]), ((1, 4), [1]), ((2, 64), [8]), ((2, 4), [])]
)
def test_it_is_measured_on_the_batches_that_the_program_takes(
    network: nn.Module, bounds: tuple[int, int], measured: list[int]
) -> None:
    program = to_program(network, *free(bounds))

    assert [len(one[0]) for one in samples(program)] == measured


def test_a_program_of_one_size_is_measured_on_that(network: nn.Module) -> None:
    rows, _ = free((1, 64))

    (found,) = samples(to_program(network, rows, []))

    assert torch.equal(found[0], rows[0])


def test_a_program_with_keywords_is_not_measured(network: nn.Module) -> None:
    program = torch.export.export(network, (), {"input": torch.rand(2, 24)})

    assert samples(program) == []


def test_both_are_timed_at_each_size_and_their_answers_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aoti_candidates, "_BUDGET_S", 0.0)
    found = timed(lambda x: x, lambda x: x * 1.5, [(torch.ones(1, 2),), (torch.ones(8, 2),)])

    assert len(found.plain_ms) == len(found.templates_ms) == 2
    assert found.drift == pytest.approx(0.5)


def test_what_templates_can_not_do_stays_with_the_library(
    network: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiler(_program: Any, path: Path, settings: dict[str, Any]) -> None:
        if "max_autotune_gemm" in settings:
            raise RuntimeError("no choices exist for backend")
        with zipfile.ZipFile(path, "w") as package:
            package.writestr("model/wrapper_metadata.json", '{"AOTI_CPU_ISA": "AVX2"}')

    monkeypatch.setattr(to_aoti, "_compile", compiler)
    path, said = tmp_path / "model.pt2", list[str]()

    made = to_aoti.compile_aoti(to_program(network, *free((1, 64))), path, None, said.append)

    assert made == to_aoti.Compiled("avx2", frozen=False)
    assert said[-1] == "that can't be compiled (RuntimeError); the library's multiplication stays"
    assert list(tmp_path.iterdir()) == [path]


def test_a_program_that_can_not_be_frozen_is_compiled_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tried: list[bool] = []

    def compile_it(program: Any, path: Path, settings: dict[str, Any]) -> None:
        tried.append(settings["freezing"])
        if settings["freezing"]:
            raise RuntimeError("a pass of freezing failed\nin a long trace")

    monkeypatch.setattr(to_aoti, "_compile", compile_it)
    monkeypatch.setattr(to_aoti, "aoti_metadata", lambda path: {"AOTI_CPU_ISA": "AVX2"})
    pictures = (torch.rand(2, 3, 8, 8),)
    program = to_program(nn.Conv2d(3, 4, 3).eval(), pictures, [])
    said: list[str] = []
    found = to_aoti.compile_aoti(program, tmp_path / "model.pt2", None, said.append)
    assert tried == [True, False]
    assert not found.frozen and found.isa == "avx2"
    assert said == [
        "with weights packed for oneDNN it can't be compiled (a pass of freezing failed); compiling again "
        "without, which may be slower ..."
    ]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of the compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
@pytest.mark.parametrize(
    ("layer", "side", "free_size"),
    [
        # Torch compares the batch with 16 to choose how it is run, and the number of pixels with 4096.
        (nn.Conv2d(3, 4, 3), 8, FreeSize("batch", ((0, 0),), 1, 64)),
        (nn.AdaptiveAvgPool2d(1), 64, FreeSize("height", ((0, 2),), 8, 1024)),
    ],
    ids=["convolution", "sum"],
)
def test_another_way_to_compute_leaves_a_size_free(
    layer: nn.Module, side: int, free_size: FreeSize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The convolution is compiled twice: frozen, and without."""

    def compiler(*_args: Any, **_named: Any) -> None:
        raise RuntimeError("enough is known")

    monkeypatch.setattr("torch._inductor.codecache.AotCodeCompiler.compile", compiler)
    program = to_program(layer.eval(), (torch.rand(2, 3, side, side),), [free_size])

    with pytest.raises(RuntimeError, match="enough is known"):
        to_aoti.compile_aoti(program, tmp_path / "model.pt2", None, lambda _line: None)

    size = size_of(program, free_size.places[0][1]).node
    assert size.shape_env.bound_sympy(size.expr).upper == free_size.high


class Scaled(nn.Module):
    """Arithmetic behind convolutions: a normalisation, scales of channels, and scales of columns."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed, self.norm = nn.ConvTranspose2d(8, 8, 3), nn.BatchNorm2d(8)
        self.grouped, self.channels = nn.ConvTranspose1d(8, 8, 3, groups=2), nn.Buffer(torch.rand(8, 1))
        self.plain, self.columns = nn.Conv2d(8, 8, 1), nn.Buffer(torch.rand(1, 8))
        nn.init.uniform_(self.norm.weight, 0.5, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        grouped = self.grouped(x.flatten(2))
        return self.norm(self.transposed(x)), grouped / self.channels, self.plain(x) * self.columns


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of the compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
def test_arithmetic_behind_convolutions_stays_right_when_frozen(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network, pictures = Scaled().eval(), (torch.rand(2, 8, 8, 8),)
    program = to_program(network, pictures, [batch_of(pictures, (1, 8))])

    assert to_aoti.compile_aoti(program, tmp_path / "model.pt2", None, lambda _line: None).frozen

    with torch.inference_mode():
        found = to_aoti.load_aoti(tmp_path / "model.pt2")(*pictures)
        torch.testing.assert_close(tuple(found), network(*pictures))


class In8Bits(nn.Module):
    """Two layers in bfloat16 with weights of 8 bits, as torchao makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Buffer(torch.randint(-9, 9, size).char()) for size in [(64, 300), (8, 64)]
        )
        self.scales = nn.Buffer(torch.rand(64).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.linear(x, self.first.bfloat16()) * self.scales
        return functional.linear(hidden, self.second.bfloat16()) * self.scales[:8]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of the compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
def test_weights_of_8_bits_are_not_read_beyond_their_end(tmp_path: Path) -> None:
    """Torch's kernel steps by 16 inputs; the layer with 300 does without, and the one with 64 has it."""
    network, rows = In8Bits().eval(), (torch.rand(2, 3, 300).bfloat16(),)
    path = tmp_path / "model.pt2"
    to_aoti.compile_aoti(to_program(network, rows, []), path, None, lambda _line: None)

    with zipfile.ZipFile(path) as package:
        sources = [package.read(name) for name in package.namelist() if name.endswith("wrapper.cpp")]
    assert b"".join(sources).count(b"_weight_int8pack_mm(") == 1
    with torch.inference_mode():
        found = to_aoti.load_aoti(path)(*rows)
        torch.testing.assert_close(found, network(*rows), atol=0.1, rtol=0.05)


@pytest.mark.parametrize(
    ("bounds", "multiple", "limit"),
    # The last one ends beyond the sizes that are tried.
    [((1, 64), 1, 15), ((1, 2**31), 1, 15), ((64, 1024), 32, 480), ((1, 8192), 1, 4096)],
)
def test_a_size_that_the_compiler_has_narrowed_is_refused(
    bounds: tuple[int, int], multiple: int, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dimension, limits = 0 if multiple == 1 else 1, [bounds[1] + multiple, limit + multiple]

    def compiler(program: Any, _path: Path, _settings: dict[str, Any]) -> None:
        assert size_of(program, dimension) < limits.pop(0)  # torch notes this as a condition

    monkeypatch.setattr(to_aoti, "_compile", compiler)
    monkeypatch.setattr(to_aoti, "aoti_metadata", lambda path: {})
    rows = (torch.rand(2, 64),)
    program = to_program(nn.ReLU().eval(), rows, [FreeSize("size", ((0, dimension),), *bounds, multiple)])
    to_aoti.compile_aoti(program, tmp_path / "model.pt2", None, lambda _line: None)

    with pytest.raises(ModelRefused, match=rf"takes {bounds[0]} to {limit} for dimension \d of input"):
        to_aoti.compile_aoti(program, tmp_path / "model.pt2", None, lambda _line: None)


def test_a_size_that_the_compiler_has_fixed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiler(program: Any, _path: Path, _settings: dict[str, Any]) -> None:
        assert size_of(program, 0) == 2

    monkeypatch.setattr(to_aoti, "_compile", compiler)
    program = to_program(nn.ReLU().eval(), *free((1, 64)))

    with pytest.raises(ModelRefused, match="takes 1 to 2 for dimension 0 of input; expected 1:64;"):
        to_aoti.compile_aoti(program, tmp_path / "model.pt2", None, lambda _line: None)


def size_of(program: Any, dimension: int) -> Any:
    """Return a free size of the only input."""
    (name,) = program.graph_signature.user_inputs
    return next(node for node in program.graph.nodes if node.name == name).meta["val"].shape[dimension]
