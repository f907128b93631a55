from __future__ import annotations

import math

import pytest
import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.convert.ranks import largest_difference

FILLER = torch.finfo(torch.float32).min


@pytest.mark.parametrize("filler", [-math.inf, -1e9, FILLER, math.nan])
@pytest.mark.parametrize("found", [[0.0, 9.0], [0.0, math.inf], [0.0, math.nan]])
def test_another_answer_over_ranks_is_found_beside_values_that_fill_a_mask(
    filler: float, found: list[float]
) -> None:
    wanted = torch.tensor([0.0, 1.0, filler])
    with pytest.raises(ModelRefused, match="the output 'y' differs by"):
        largest_difference([("y", wanted)], [("y", torch.tensor([*found, filler]))])


@pytest.mark.parametrize("filler", [-math.inf, math.nan])
def test_a_mask_with_another_value_is_another_answer(filler: float) -> None:
    wanted, found = torch.tensor([1.0, filler]), torch.tensor([1.0, 2.0])
    for one, other in ((wanted, found), (found, wanted)):
        with pytest.raises(ModelRefused):
            largest_difference([("y", one)], [("y", other)])


@pytest.mark.parametrize(
    "output",
    [
        torch.empty(0, 4),
        torch.tensor([math.nan, -math.inf, math.inf, 1.0]),
        torch.tensor([1, 2]),
        torch.tensor([True, False]),
    ],
)
def test_equal_answers_do_not_differ(output: torch.Tensor) -> None:
    assert largest_difference([("y", output)], [("y", output.clone())]) == 0.0


def test_a_value_that_fills_a_mask_may_differ_by_its_own_rounding() -> None:
    wanted, found = torch.tensor([3.0, -1e9]), torch.tensor([3.0, -1e9 + 64])
    assert largest_difference([("y", wanted)], [("y", found)]) == 64.0
