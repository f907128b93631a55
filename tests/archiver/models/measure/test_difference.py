"""How far two answers lie apart."""

from __future__ import annotations

import math

import pytest
import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.measure.difference import difference, drift_limit, flattened


def test_equal_answers_have_no_drift() -> None:
    rows = torch.randn(4, 10)

    found = difference([((rows,), (rows.clone(),))])

    assert (found.rows, found.largest_abs, found.mean_abs, found.drift) == (4, 0.0, 0.0, 0.0)
    assert found.top1 == 1.0
    assert found.cosine == pytest.approx(1.0)


def test_drift_is_the_root_of_the_mean_squared_difference_over_that_of_the_values() -> None:
    wanted, got = torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 3.5]])

    found = difference([((wanted,), (got,))])

    assert found.drift == pytest.approx(0.5 / 5.0)
    assert found.largest_abs == 0.5
    assert found.mean_abs == 0.25


def test_samples_are_taken_together_not_one_by_one() -> None:
    large, small = torch.tensor([[100.0, 0.0]]), torch.tensor([[0.0, 1.0]])

    found = difference([((large,), (large,)), ((small,), (torch.zeros(1, 2),))])

    assert found.drift == pytest.approx(1 / math.hypot(100, 1))
    assert found.top1 == 0.5


def test_the_worst_output_decides() -> None:
    one, other = torch.ones(2, 2), torch.zeros(2, 2)

    assert difference([((one, one), (one, other))]).drift == pytest.approx(1.0)


def test_whole_numbers_drift_by_the_share_that_differs() -> None:
    labels, others = torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5])

    found = difference([((labels,), (others,))])

    assert found.drift == 0.25
    assert found.cosine is None


def test_not_a_number_where_there_was_one_is_infinitely_far() -> None:
    wanted = torch.ones(1, 3)
    got = torch.tensor([[1.0, float("nan"), 1.0]])

    assert difference([((wanted,), (got,))]).drift == math.inf


def test_not_a_number_in_both_is_equal() -> None:
    rows = torch.tensor([[1.0, float("nan"), float("inf")]])

    assert difference([((rows,), (rows.clone(),))]).drift == 0.0


def test_an_original_that_answers_with_nothing_but_nan_is_nothing_to_compare_with() -> None:
    nothing, some = torch.full((2, 3), math.nan), torch.tensor([[1.0, math.nan]])

    assert difference([((nothing,), (nothing,))]).undefined
    assert not difference([((some,), (some,))]).undefined


def test_answers_of_other_shapes_cannot_be_compared() -> None:
    with pytest.raises(ModelRefused, match=r"\[\(1, 2\)\], the other's \[\(1, 3\)\]"):
        difference([((torch.zeros(1, 2),), (torch.zeros(1, 3),))])


def test_nothing_to_compare_is_refused() -> None:
    with pytest.raises(ModelRefused, match="nothing to compare"):
        difference([])


def test_results_are_flattened_in_order_and_none_is_left_out() -> None:
    one, two, three = torch.zeros(1), torch.ones(1), torch.full((1,), 2.0)

    assert flattened({"a": one, "n": None, "b": (two, [three], None)}) == (one, two, three)


def test_a_result_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(ModelRefused, match="returns a str under 'output_1'"):
        flattened((torch.zeros(1), "label"))


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(torch.float32, 0.001), (torch.bfloat16, 4 * 2**-7), (torch.float16, 4 * 2**-10), (torch.int8, 0.001)],
)
def test_forms_of_coarse_weights_may_drift_by_their_rounding(dtype: torch.dtype, limit: float) -> None:
    module = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=False)])
    assert drift_limit(0.001, module) == limit
    assert drift_limit(0.25, module) == 0.25
