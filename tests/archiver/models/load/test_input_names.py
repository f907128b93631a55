"""Names of a model's inputs, and the line for inputs that a server could not give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.load.source import input_names, inputs_up_to


class Masked(nn.Module):
    """Two of its inputs are optional."""

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        return x


class ByKeyword(nn.Module):
    """One input has to be named."""

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
        return x * mask


def test_names_are_the_first_parameters() -> None:
    assert input_names(Masked(), 2) == ("x", "mask")
    assert input_names(ByKeyword(), 1) == ("x",)


def test_models_without_names_have_numbered_inputs() -> None:
    assert input_names(None, 1) == ("input",)
    assert input_names(None, 2) == ("input_0", "input_1")


def test_inputs_by_keyword_only_are_refused() -> None:
    with pytest.raises(ModelRefused, match="forward takes mask by keyword only"):
        input_names(ByKeyword(), 2)


def test_inputs_count_up_to_the_last_that_is_named() -> None:
    assert inputs_up_to(Masked(), ("x", "scale"), 2) == 3
    assert inputs_up_to(Masked(), ("x", "other"), 2) == 2
    assert inputs_up_to(Masked(), None, 1) == 1


def test_an_example_that_leaves_one_out_is_refused_with_all_names(
    pack: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "masked.py").write_text(
        "import torch\n\n\nclass Masked(torch.nn.Module):\n"
        "    def forward(self, x, mask=None, scale=None):\n        return x * scale\n"
    )
    torch.save({"x": torch.rand(2, 4), "scale": torch.rand(2, 1)}, tmp_path / "x.pt")
    with pytest.raises(ModelRefused, match="has x, scale, and not the inputs before: x, mask, scale"):
        pack(model_file=tmp_path / "masked.py", model_format="torchscript", example=tmp_path / "x.pt")
