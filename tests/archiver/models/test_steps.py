"""What a step that fails is called, and which of its words it keeps."""

from __future__ import annotations

import pytest
import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.steps import refusing


class Squared(torch.nn.Module):
    """Takes seven times seven numbers only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(7, 7)


def test_a_torchscript_that_fails_is_refused_with_its_cause() -> None:
    scripted = torch.jit.script(Squared())
    cause = r"^running failed: .*shape '\[7, 7\]' is invalid for input of size 3"
    with pytest.raises(ModelRefused, match=cause), refusing("running"):
        scripted(torch.zeros(3))


def test_of_other_failures_the_first_line_counts() -> None:
    with pytest.raises(ModelRefused, match=r"^running failed: ValueError: one$"), refusing("running"):
        raise ValueError("\n one\ntwo")
