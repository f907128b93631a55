"""`torchscript.optimize_for_inference`: measured when packing, and said where it gains."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from torchere.archiver import open_archive
from torchere.archiver.errors import ModelRefused
from torchere.archiver.models import build as pipeline
from torchere.archiver.models.convert import optimize_gain
from torchere.archiver.models.convert.files import check_section, config_with, may_say
from torchere.archiver.models.convert.optimize_gain import Gain, may_gain, measured_gain
from torchere.archiver.models.verify import compare as verify
from torchere.archiver.request import BuildOptions
from torchere.archiver.signature import ANY, Signature, TensorSpec
from torchere.archiver.torchscript_options import TorchScriptOptions
from torchere.serving.commands.cli import main

MODEL = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.pad = torch.nn.ZeroPad2d((0, 1, 0, 1))
        self.first = torch.nn.Conv2d(3, 8, 3, stride=2)
        self.second = torch.nn.Conv2d(8, 4, 3)

    def forward(self, x):
        return self.second(torch.relu(self.first(self.pad(x))))
"""
GAINS = Gain({1: 3.0, 8: 20.0}, {1: 2.0, 8: 10.0}, 1e-7)


def saved(module: nn.Module, path: Path) -> Path:
    torch.jit.save(torch.jit.freeze(torch.jit.script(module.eval())), str(path))
    return path


@pytest.mark.parametrize(
    ("plain", "other", "drift", "taken"),
    [
        ((3.0, 20.0), (2.0, 10.0), 1e-7, True),
        ((3.0, 20.0), (2.9, 10.0), 1e-7, False),  # not at a batch of one
        ((3.0, 20.0), (2.0, 20.0), 1e-7, False),  # not at one of eight
        ((3.0, 20.0), (2.0, 10.0), 0.01, False),  # answers something else
        ((3.0, 20.0), (2.0, 10.0), float("nan"), False),
    ],
)
def test_it_is_taken_where_it_gains_throughout_and_answers_the_same(
    plain: tuple[float, float], other: tuple[float, float], drift: float, taken: bool
) -> None:
    gain = Gain(dict(zip((1, 8), plain, strict=True)), dict(zip((1, 8), other, strict=True)), drift)
    assert gain.is_worthwhile is taken
    assert gain.note.endswith("; taken") is taken


@pytest.mark.parametrize(
    ("module", "length", "may"),
    [
        (nn.Conv1d(3, 4, 3), 8, False),
        (nn.Conv2d(3, 4, 3), 8, True),
        (nn.Conv2d(3, 4, 3), ANY, False),  # poolings of oneDNN take fewer sizes
        (nn.Linear(3, 4), ANY, True),
        (nn.ReLU(), 8, False),
    ],
    ids=["another convolution", "convolution", "of any size", "linear layer", "neither"],
)
def test_what_is_tried_has_layers_to_gain_with_and_no_sizes_to_lose(
    module: nn.Module, length: int, may: bool
) -> None:
    rows = TensorSpec("x", "FP32", (ANY, 3, length))
    assert may_gain(torch.jit.script(module.eval()), Signature((rows,), (rows,))) is may


def test_both_ways_are_compared_and_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimize_gain, "_BUDGET_S", 0.01)
    file = saved(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)), tmp_path / "net.pt")
    gain = measured_gain(file, [(torch.rand(1, 3, 12, 12),)], batched=True)
    assert gain is not None
    assert gain.plain_ms.keys() == gain.optimized_ms.keys() == {1, 8}
    assert min(*gain.plain_ms.values(), *gain.optimized_ms.values()) > 0
    assert gain.drift < 1e-5


def test_only_batches_that_the_signature_allows_are_timed(
    tmp_path: Path, fours: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimize_gain, "_BUDGET_S", 0.01)
    file = saved(fours(), tmp_path / "net.pt")
    gain = measured_gain(file, [(torch.rand(4, 8),)], batched=True, sizes=(4, 8))
    assert gain is not None
    assert gain.plain_ms.keys() == gain.optimized_ms.keys() == {4, 8}


def test_a_model_that_cannot_be_optimised_gains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(module: object) -> None:
        raise RuntimeError("INTERNAL ASSERT FAILED")  # torch 2.13 does so for torch.clamp(x, 0, 6)

    monkeypatch.setattr(torch.jit, "optimize_for_inference", fail)
    file = saved(nn.Conv2d(3, 4, 3), tmp_path / "net.pt")
    assert measured_gain(file, [(torch.rand(1, 3, 12, 12),)], batched=True) is None


def test_a_model_that_cannot_be_optimised_is_loaded_as_it_is(tmp_path: Path) -> None:
    class Clamped(nn.Module):  # torch's optimiser asks for limits of floating point
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.clamp(x, 0, 6)

    net, x = nn.Sequential(nn.Conv2d(3, 4, 3), Clamped()), torch.rand(1, 3, 12, 12)
    file = saved(net, tmp_path / "net.pt")
    found = optimize_gain.loaded(file, TorchScriptOptions(optimize_for_inference=True))
    assert torch.allclose(found(x), net(x), atol=1e-5)
    assert measured_gain(file, [(x,)], batched=True) is None


@pytest.fixture
def pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Pack the model with more arguments; returns the archive. What is measured always gains."""
    monkeypatch.setattr(verify, "_BUDGET_S", 0.01)
    monkeypatch.setattr(pipeline, "measured_gain", lambda file, samples, batched, sizes: GAINS)
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(MODEL)
    torch.manual_seed(0)
    torch.save(torch.rand(2, 3, 13, 12), "example.pt")

    def packed(*arguments: str) -> Any:
        command = ["archive", "--model-name", "net", "--model-file", "net.py", "--example", "example.pt"]
        assert main([*command, "--force", *arguments]) == 0
        return open_archive(tmp_path / "net.mar")

    return packed


def test_an_archive_says_that_it_gains_and_the_report_is_of_it_so_loaded(
    pack: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    archive = pack("--format", "torchscript")
    config = yaml.safe_load(archive.read_text("model-config.yaml"))
    assert config == {"torchscript": {"optimize_for_inference": True}}
    report = json.loads(archive.read_text("MAR-INF/report.json"))
    assert report["optimized"] is True
    assert report["accepted"] is True
    said = capsys.readouterr()
    assert GAINS.note in said.out + said.err
    assert "folded into convolutions: 1 paddings" in said.out + said.err
    (tmp_path / "data").mkdir()
    torch.save(torch.rand(2, 3, 13, 12), tmp_path / "data" / "one.pt")
    with caplog.at_level(logging.WARNING, "torchere.handlers"):  # which the command changes for good
        assert main(["compare", "net.mar", "net.mar", "--data", "data"]) == 0


@pytest.mark.usefixtures("pack")
def test_paddings_of_an_exported_program_are_folded_into_torchscript(
    capsys: pytest.CaptureFixture[str],
) -> None:
    scope: dict[str, Any] = {}
    exec(MODEL, scope)
    program = torch.export.export(scope["Net"]().eval(), (torch.load("example.pt"),))
    torch.export.save(program, "net.pt2")
    command = ["archive", "--model-name", "net", "--serialized-file", "net.pt2", "--force"]
    for target, is_folded in (("export", False), ("torchscript", True)):
        assert main([*command, "--format", target]) == 0
        said = capsys.readouterr()
        assert ("folded into convolutions: 1 paddings" in said.out + said.err) is is_folded


@pytest.mark.parametrize(
    "arguments",
    [
        ("--format", "export"),
        ("--format", "torchscript", "--no-verify"),
        ("--format", "torchscript", "--dynamic-size", "x:2=9:20"),  # poolings of oneDNN take fewer sizes
    ],
)
def test_nothing_is_said_where_nothing_is_measured(
    pack: Callable[..., Any], arguments: tuple[str, ...]
) -> None:
    assert pack(*arguments).manifest.config_file is None


@pytest.mark.parametrize(
    ("text", "optimized"),
    [
        ("torchscript:\n  optimize_for_inference: false\n", False),
        ("torchscript:\n  optimize_for_inference: true\n", True),
        ("torchscript:\n  optimize_for_inference: yes\n", True),
        ("{}\n", False),  # to which no section can be added
        ("minWorkers: 2\nautocast: bfloat16\n", False),
    ],
)
def test_a_configuration_that_says_so_or_takes_no_more_stands_and_is_what_the_report_is_of(
    pack: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, text: str, optimized: bool
) -> None:
    optimizations = []
    real = torch.jit.optimize_for_inference

    def counted(module: torch.jit.ScriptModule) -> Any:
        optimizations.append(module)
        return real(module)

    monkeypatch.setattr(torch.jit, "optimize_for_inference", counted)
    Path("config.yaml").write_text(text)
    archive = pack("--format", "torchscript", "--config-file", "config.yaml")
    assert archive.read_text("config.yaml") == text
    assert json.loads(archive.read_text("MAR-INF/report.json"))["optimized"] is optimized
    assert len(optimizations) == optimized


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("optimize_for_inference: sometimes", "optimize_for_inference is sometimes; expected true or false"),
        ("optimize_for_inference: 1", "optimize_for_inference is 1; expected true or false"),
        ("quantized_engine: vnni", "quantized_engine is vnni; expected one of "),
    ],
)
def test_a_section_that_a_server_would_refuse_is_refused(tmp_path: Path, said: str, line: str) -> None:
    own = tmp_path / "own.yaml"
    for text in (f"torchscript:\n  {said}\n", f"torchscript: {{{said}}}\n"):
        own.write_text(text)
        with pytest.raises(ModelRefused, match=line):
            pipeline.build(
                BuildOptions(model_file=Path("net.py"), config_file=own), tmp_path, lambda _line: None
            )
    own.write_text("torchscript:\n  optimize_for_inference: yes\n  quantized_engine: 'x86'\n")
    check_section(own)


@pytest.mark.parametrize("text", ["autocast: null\n", "autocast: ~  # later\n", "autocast:\n"])
def test_autocast_without_a_value_is_no_wish(tmp_path: Path, text: str) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(text)
    assert may_say(own)
    own.write_text("autocast: bfloat16\n")
    assert not may_say(own)


def test_a_configuration_is_added_to(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("minWorkers: 2")
    (tmp_path / "work").mkdir()
    made = config_with(own, TorchScriptOptions("onednn", optimize_for_inference=True), tmp_path / "work")
    assert made is not None
    found = yaml.safe_load(made.read_text())
    assert found["minWorkers"] == 2
    assert TorchScriptOptions.read(found) == TorchScriptOptions("onednn", optimize_for_inference=True)


@pytest.mark.parametrize(
    "text",
    [
        "{minWorkers: 2}\n",
        "torchscript:\n  other: 1\n",
        "torchscript:\n  # quantized_engine: x86\n",
        "torchscript:\n  quantized_engine: x86_64\n",
        "other:\n  quantized_engine: x86\ntorchscript:\n",
    ],
)
def test_a_configuration_that_lacks_the_engine_and_cannot_be_added_to_is_refused(
    tmp_path: Path, text: str
) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(text)
    with pytest.raises(
        ModelRefused, match=r"own\.yaml .*lacks what measured best; add .*quantized_engine: x86"
    ):
        config_with(own, TorchScriptOptions("x86"), tmp_path)
    for said in (
        "torchscript: {other: 1, quantized_engine: x86}",
        "torchscript:\n  quantized_engine: x86  # so",
    ):
        own.write_text(said)
        assert config_with(own, TorchScriptOptions("x86"), tmp_path) == own


def test_compare_refuses_an_archive_whose_section_says_nonsense(
    pack: Callable[..., Any], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    Path("config.yaml").write_text("torchscript:\n  optimize_for_inference: perhaps\n")
    pack("--format", "torchscript").extract(Path("unpacked"))
    Path("unpacked/model.pt").rename("model.pt")
    plain = ["archive", "--model-name", "net", "--serialized-file", "model.pt", "--handler", "base_handler"]
    assert main([*plain, "--config-file", "config.yaml", "--force"]) == 0  # no PyTorch looks at it
    Path("data").mkdir()
    torch.save(torch.rand(2, 3, 13, 12), "data/one.pt")
    with caplog.at_level(logging.WARNING, "torchere.handlers"):
        assert main(["compare", "net.mar", "net.mar", "--data", "data"]) == 2
    said = capsys.readouterr().err
    assert "torchscript.optimize_for_inference is perhaps; expected true or false; unpack the archive" in said
