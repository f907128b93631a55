"""What a model gave, as tensors in order."""

from __future__ import annotations

import pytest
import torch

from torchere.handlers.tensors_batch import flattened

ONE, TWO = torch.zeros(1), torch.ones(1)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (ONE, [ONE]),
        ((ONE, None), [ONE]),
        ({"a": [ONE], "loss": None, "b": TWO}, [ONE, TWO]),
        (None, []),
    ],
)
def test_results_are_taken_apart_and_none_is_left_out(result: object, expected: list[torch.Tensor]) -> None:
    assert flattened(result) == expected


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match="gave a str"):
        flattened((ONE, "label"))
