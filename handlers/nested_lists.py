"""Convert nested lists of numbers to a tensor like `torch.as_tensor`, six times as fast.

The lists are as JSON has them. `torch.as_tensor` checks the type of each number in turn; NumPy does it in one
tight loop (for 32 rows of 64 floats, 460 us and 75 us).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def tensor_of(data: Any, device: torch.device | str | None = None) -> torch.Tensor:
    """Return `torch.as_tensor(data, device=device)`, errors included, for any `data`.

    Floats get PyTorch's default type, whole numbers int64.
    """
    numbers = _numbers(data) if type(data) is list else None
    if numbers is None:
        return torch.as_tensor(data, device=device)
    tensor = torch.from_numpy(numbers)
    if numbers.dtype == np.float64:
        return tensor.to(device=device, dtype=torch.get_default_dtype())
    return tensor if device is None else tensor.to(device)


def _numbers(data: list[Any]) -> np.ndarray[Any, np.dtype[Any]] | None:
    """Return the lists as a NumPy array; None where PyTorch might find another kind of number."""
    first: Any = data
    while type(first) is list and first:
        first = first[0]
    if type(first) not in (float, int):
        return None  # booleans, text, tensors, empty lists
    try:
        numbers = np.array(data)
    except (ValueError, OverflowError):  # rows of different lengths: PyTorch raises its own error
        return None
    # Whole numbers that are too large for int64 become floats in NumPy, and an error in PyTorch.
    wanted = np.float64 if type(first) is float else np.int64
    return numbers if numbers.dtype == wanted else None
