"""What a model gave, as tensors in order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchere.archiver.signature import Signature, TensorSpec
from torchere.handlers.tensors import TensorError
from torchere.handlers.tensors.request import (
    Example,
    array_of,
    flattened,
    grouped,
    layout_of,
    tensors_of,
    whole_group,
)

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


def test_a_result_is_an_array_of_the_same_memory_even_if_it_is_a_weight() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3))
    array = array_of(weight)
    weight.data[1, 2] = 7
    assert array.tolist() == [[1, 1, 1], [1, 1, 7]]
    assert array_of(torch.ones(2, 3).T).shape == (3, 2)


def test_a_result_that_numpy_lacks_the_datatype_of_stays_as_it_is() -> None:
    result = torch.ones(2, dtype=torch.bfloat16)
    assert array_of(result) is result


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # which newer versions of torch call old
def test_tensors_without_plain_numbers_are_refused_with_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"gave a torch.sparse_coo tensor; expected dense .* to_dense"):
        flattened(torch.eye(2).to_sparse())
    with pytest.raises(TypeError, match=r"gave a quantised tensor; .* dequantize"):
        flattened(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))


def test_strides_are_those_of_rows_behind_one_another_whatever_numpy_had() -> None:
    one_row = np.asfortranarray(np.ones((1, 3, 2), np.float32))
    none = np.concatenate([np.empty((0, 3, 2), np.float32)])
    for array in (one_row, none):
        (group,) = grouped([(0, [array])], batched=True)
        assert group.inputs[0].shape == array.shape
        assert group.inputs[0].stride() == (6, 2, 1)
    assert whole_group([one_row]).inputs[0].stride() == (6, 2, 1)
    (scalar,) = grouped([(0, [np.array(2.5)])], batched=False)
    assert scalar.inputs[0].item() == 2.5


def test_numbers_of_64_bits_are_refused_where_bf16_is_expected() -> None:
    layout = layout_of(Signature((TensorSpec("x", "BF16", (-1, 3)),), (TensorSpec("y", "BF16", (-1, 3)),)))
    example = Example((np.zeros((1, 3)),), single=False)  # numpy takes None, BF16's type there, for float64
    with pytest.raises(TensorError, match="found FP64, expected BF16"):
        tensors_of(example, layout)
