"""Tensors that a class makes at random and that its state dict lacks are told."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from torchere.archiver.models.load.source import read_source

Made = Callable[[], nn.Module]


class Net(nn.Module):
    """A layer, and what a test adds."""

    def __init__(self, add: Callable[[Net], None]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        add(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)
        return found


def listed(net: Net) -> None:
    net.layers = [nn.Linear(4, 4)]  # type: ignore[assignment]


def plain(net: Net) -> None:
    net.projection = torch.randn(4, 4)


def not_persistent(net: Net) -> None:
    net.register_buffer("projection", torch.randn(4, 4), persistent=False)


def fixed(net: Net) -> None:
    net.positions = torch.arange(4)
    net.register_buffer("table", torch.full((4,), torch.nan), persistent=False)


def shared(net: Net) -> None:
    net.layers = [net.layer, net.layer.weight]  # type: ignore[assignment]


def normalised(net: Net) -> None:
    net.layer = nn.utils.weight_norm(net.layer)


def notes_of(add: Callable[[Net], None], folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    module = types.ModuleType("net_of_a_test")
    module.net = lambda: Net(add)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "net_of_a_test", module)
    torch.save(Net(add).state_dict(), folder / "net.pth")
    return " ".join(read_source(folder / "net.pth", None, "net_of_a_test:net", False).notes)


@pytest.mark.parametrize(
    ("add", "name"),
    [(listed, "layers[0].weight"), (plain, "projection"), (not_persistent, "projection")],
)
def test_what_the_class_makes_at_random_is_told(
    add: Callable[[Net], None], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f"the state dict lacks '{name}'" in notes_of(add, tmp_path, monkeypatch)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("add", [fixed, shared, normalised])
def test_nothing_is_told_of_what_each_making_has(
    add: Callable[[Net], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert notes_of(add, tmp_path, monkeypatch) == ""
