"""Nested lists become the tensor that PyTorch makes of them."""

import pytest
import torch

from torchere.handlers.base import tensor_of

SAME = [
    [1.0, 2.5],
    [[1.0, 2], [3, 4.5]],
    [1, 2, 3],
    [[[1], [2]]],
    [True, False],
    [True, 2],
    [2, True],
    [1, 2.5],
    [1.5, True],
    [],
    [[]],
    [1e300, -1e300],
    [float("nan"), float("inf")],
    [2**62, -(2**62)],
    3.5,
    7,
    torch.ones(2, 2),
    [torch.ones(()), torch.zeros(())],
]


@pytest.mark.parametrize("data", SAME, ids=repr)
def test_it_is_what_pytorch_makes_of_it(data: object) -> None:
    expected, found = torch.as_tensor(data), tensor_of(data)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("data", [[[1.0], [2.0, 3.0]], [1.0, "2"], ["a"], [1.0, None], [2**63, -1]], ids=repr)
def test_what_pytorch_refuses_is_refused_in_its_words(data: object) -> None:
    with pytest.raises(Exception) as expected:  # whatever it is
        torch.as_tensor(data)
    with pytest.raises(type(expected.value)) as found:
        tensor_of(data)
    assert str(found.value) == str(expected.value)


def test_a_default_type_that_was_changed_counts() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert tensor_of([0.1]).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
