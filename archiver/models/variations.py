"""Other values for the inputs of an example: what other clients might send, and what other branches take.

Whole numbers are never made up, so that indices stay indices: they are those of the example, or 0, which is
no larger than any index and the usual padding. Padding stays behind what it pads, where clients put it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Variation = Callable[[torch.Tensor], torch.Tensor]


def shuffled(tensor: torch.Tensor) -> torch.Tensor:
    """Its values moved by one along the last dimension, but for padding; sums over the tensor stay the same.

    Padding is what is 0, or the same as the last of its row; masks are nothing else and stay.
    """
    if tensor.is_floating_point() and tensor.dim():
        return tensor.roll(1, -1)
    if tensor.dtype == torch.bool or not tensor.dim() or not tensor.numel():
        return tensor.clone()
    moved = tensor.reshape(-1, tensor.shape[-1]).to(torch.int64, copy=True)  # types that torch can pick from
    for row in moved:
        places = ((row != 0) & (row != row[-1])).nonzero().flatten()
        row[places] = row[places].roll(1)
    return moved.to(tensor.dtype).reshape(tensor.shape)


def others(tensor: torch.Tensor) -> torch.Tensor:
    """Its rows in another order; a single one stays."""
    return tensor.roll(1, 0)


def larger(tensor: torch.Tensor) -> torch.Tensor:
    """Scaled and shifted; whole numbers all become the largest of them, as in a text without padding."""
    if tensor.is_floating_point():
        return tensor * 3 + 1
    if tensor.dtype == torch.bool or not tensor.numel():
        return torch.ones_like(tensor)
    return tensor.clone().fill_(_largest(tensor))


def opposite(tensor: torch.Tensor) -> torch.Tensor:
    """Negated and scaled; of whole numbers the second half becomes 0, as in a padded text."""
    if tensor.is_floating_point():
        return tensor * -2
    emptied = tensor.clone()
    if tensor.dim() < 2:
        return emptied.fill_(0)
    emptied[..., tensor.shape[-1] // 2 :] = 0
    return emptied


def _largest(tensor: torch.Tensor) -> int:
    return int(tensor.to(torch.int64).max())  # torch has no maximum of larger unsigned types


# The first takes values that were seen and no others.
VARIATIONS: tuple[Variation, ...] = (shuffled, larger, opposite)
