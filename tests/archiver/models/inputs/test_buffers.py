"""Runs of the packer leave the buffers of a model as they were."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchere.archiver import open_archive
from torchere.archiver.models.convert.torchscript import to_torchscript
from torchere.archiver.models.inputs.buffers import unchanged_buffers

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
COUNTING = """\
import torch


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.count += 1
        self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return self.one(x) - self.mean, self.count.clone()
"""


class Replacing(nn.Module):
    """Changes one buffer in place, and replaces the other by a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.changed: torch.Tensor  # not in the class: torch.jit.script reads its annotations
        self.replaced: torch.Tensor
        self.register_buffer("changed", torch.zeros(3))
        self.register_buffer("replaced", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.changed += 1
        self.replaced = self.replaced + 1
        if bool(x.sum() > 1e9):
            return x + self.replaced
        return x * self.changed.sum()


@pytest.mark.parametrize("made", [lambda module: module, torch.jit.script], ids=["eager", "scripted"])
def test_buffers_are_as_before(made: Callable[[nn.Module], Any]) -> None:
    module = made(Replacing().eval())
    changed, replaced = module.changed, module.replaced
    with unchanged_buffers(module):
        module(torch.rand(2))
        module(torch.rand(2))
        assert module.replaced == 2
    assert module.changed is changed and not changed.any()
    assert module.replaced is replaced and replaced == 0


def test_a_script_begins_with_the_buffers_of_its_source() -> None:
    module = Replacing().eval()
    found = to_torchscript(module, (torch.rand(2),))
    assert all(not buffer.any() for buffer in (*module.buffers(), *found.buffers()))


@pytest.mark.parametrize("model_format", ["torchscript", "export"])
def test_a_packed_model_begins_with_the_buffers_of_its_checkpoint(
    pack: Callable[..., Path], tmp_path: Path, model_format: str
) -> None:
    (tmp_path / "counting.py").write_text(COUNTING)
    torch.save(torch.rand(2, 4), tmp_path / "x.pt")
    given: dict[str, Any] = {"model_file": tmp_path / "counting.py", "example": tmp_path / "x.pt"}
    archive = open_archive(pack(**given, model_format=model_format, accept_drift=True))
    name = {"torchscript": "model.pt", "export": "model.pt2"}[model_format]
    data = io.BytesIO(archive.read_bytes(name, 2**20))
    model = torch.jit.load(data) if name == "model.pt" else torch.export.load(data).module()
    assert [model(torch.rand(2, 4))[1].item() for _ in range(2)] == [1, 2]
