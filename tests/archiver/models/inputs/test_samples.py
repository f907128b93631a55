"""Samples that the model fails on: their file is named, whichever step meets them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.inputs.examples import Samples
from torchere.serving.commands.cli import main

TOKENS = Samples([(torch.tensor([[1, 2]]),), (torch.tensor([[1, 9]]),)], [Path("a.pt"), Path("b.pt")])


def test_the_first_sample_that_the_model_fails_on_is_named() -> None:
    embed = nn.Embedding(4, 2)
    named = r"^b\.pt: running the model on INT64\[1, 2\] failed: IndexError"
    with pytest.raises(ModelRefused, match=named), TOKENS.named(embed):
        embed(TOKENS.tensors[1][0])


def test_an_error_that_no_sample_causes_stays_as_it_is() -> None:
    with pytest.raises(ValueError, match="an engine"), TOKENS.named(nn.Embedding(10, 2)):
        raise ValueError("an engine")


def test_a_refusal_of_a_method_runs_no_sample() -> None:
    def run(*_inputs: torch.Tensor) -> torch.Tensor:
        raise AssertionError

    with pytest.raises(ModelRefused, match="no layers"), TOKENS.named(run):
        raise ModelRefused("no layers")


@pytest.mark.parametrize("flags", [("--quantize", "int8-static"), ("--format", "torchscript")])
def test_packing_names_the_sample(
    flags: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Sequential):\n    def __init__(self):\n"
        "        super().__init__(torch.nn.Linear(4, 2))\n"
    )
    Path("samples").mkdir()
    for name, columns in (("0.pt", 4), ("1.pt", 3)):
        torch.save(torch.rand(2, columns), Path("samples", name))
    archive = ("archive", "--model-name", "net", "--model-file", "net.py", "--samples", "samples")
    assert main([*archive, *flags]) == 2
    assert "samples/1.pt: running the model on FP32[2, 3] failed" in capsys.readouterr().err.splitlines()[-1]
