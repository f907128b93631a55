"""Running models, of torch and of onnxruntime."""

import numpy as np
import pytest

from torchere.archiver.models.inputs.run import tensor_of_result


@pytest.mark.parametrize("dtype", ["ulonglong", "longlong", "bool", "float16", "uint8"])
@pytest.mark.parametrize("shape", [(), (0, 2), (2, 3)])
def test_arrays_of_every_type_become_tensors(dtype: str, shape: tuple[int, ...]) -> None:
    """onnxruntime returns UINT64 as `ulonglong`, which torch refuses."""
    array = np.ones(shape, dtype)
    found = tensor_of_result(array)
    assert tuple(found.shape) == shape
    assert found.numpy().tolist() == array.tolist()
