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
from torchere.archiver.errors import ModelRefused
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


class Remembering(nn.Module):
    """Keeps state in plain attributes, and a table that grows with its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.last: torch.Tensor | None = None
        self.runs = 0
        self.table = torch.zeros(0, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        if len(self.table) < x.shape[1]:
            self.table = torch.arange(x.shape[1])[:, None].expand(-1, 4).sin()
        before = x if self.last is None else self.last
        self.last = x + self.table[: x.shape[1]]
        return before + self.last


def test_plain_attributes_are_as_before() -> None:
    module = Remembering()
    with unchanged_buffers(module):
        module(torch.rand(2, 3, 4))
    assert module.last is None
    assert module.runs == 0
    assert len(module.table) == 0


def test_a_tuple_is_the_one_before() -> None:
    module: Any = nn.Identity()
    module.state = state = (torch.zeros(2), torch.zeros(2))
    with unchanged_buffers(module):
        module.state = (torch.ones(2), torch.ones(2))
    assert module.state is state


def test_lists_dicts_and_sets_have_the_content_of_before() -> None:
    module: Any = nn.Identity()
    module.held = held = [{"a": 1}, {2}, []]
    module.named = named = {"inner": held}
    with unchanged_buffers(module):
        module.held[0]["b"] = 2
        module.held[1].add(3)
        module.held.append([])
        module.held, module.named["added"], module.added = None, 1, torch.zeros(2)
        named["inner"] = []
    assert module.held is held and module.named is named
    assert held == [{"a": 1}, {2}, []] and named == {"inner": held}
    assert not hasattr(module, "added")


def test_a_tensor_in_the_place_of_a_parameter_stays() -> None:
    layer: Any = nn.Linear(2, 2)
    with unchanged_buffers(layer):
        weight = layer.weight.detach()
        del layer.weight
        layer.weight = weight
    assert layer.weight is weight


class Assigning(nn.Module):
    """Assigns the mean of its inputs to a buffer, so slowly that no comparison of answers shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9999 * self.mean + 0.0001 * x.mean(0)
        return x - self.mean


class Unscriptable(Assigning):
    """The same in code that does not compile."""

    def forward(self, *inputs: torch.Tensor, **_: object) -> torch.Tensor:
        return super().forward(inputs[0])


def test_state_that_a_trace_would_lose_is_kept_by_compiling_the_source_or_refused() -> None:
    said: list[str] = []
    example = (torch.rand(2, 4) + 1,)
    found = to_torchscript(Assigning().eval(), example, say=said.append)
    assert "the model keeps state from one run to the next in 'mean'" in said[-1]
    assert not torch.equal(found(*example), found(*example))
    with pytest.raises(ModelRefused, match=r"change it in place \(self\.mean\.copy_\(\.\.\.\)\)"):
        to_torchscript(Unscriptable().eval(), example)


class Caching(nn.Module):
    """Assigns a table that it makes anew with each run, and a counter that no answer depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.runs = torch.zeros(0), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table, self.runs = torch.arange(x.shape[1]), self.runs + 1
        return x + self.table


def test_what_is_assigned_and_changes_no_answer_is_traced() -> None:
    said: list[str] = []
    found = to_torchscript(Caching().eval(), (torch.rand(2, 4),), say=said.append)
    assert torch.equal(found(torch.ones(1, 6)), torch.ones(1, 6) + torch.arange(6))
    assert said == []


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
