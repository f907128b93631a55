"""Whether the rows of a batch, which are different clients', leave one another alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.inputs.run import Named, Run, run_on, seeded
from torchere.archiver.models.inputs.sizes import Tensors
from torchere.archiver.models.probe.precision import Precision, differing, precision_of

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


@dataclass(frozen=True, slots=True)
class Trial:
    """A model that is tried on other sizes and values than those of an example."""

    run: Run
    example: Tensors
    base: Named  # what the model answers to the example
    is_random: bool = False
    precision: Precision | None = None  # None: to be found out
    variations: Sequence[Variation] = VARIATIONS

    def answers(self, inputs: Tensors) -> Named:
        """What the model answers, if it is random by the same random numbers each time."""
        return seeded(self.run, inputs) if self.is_random else run_on(self.run, inputs)


def refuse_mixing(trial: Trial, size: int) -> None:
    """Try rows of the example behind and in front of rows of other values.

    Args:
        trial: every input of the example has the batch as its first dimension.
        size: of the batches to try, which the model takes.

    Raises:
        ModelRefused: an answer to a row depends on the other rows. Rows of other values that the model can't
            run on tell nothing.
    """
    now = trial.example[0].shape[0]
    kept = now if size > now else max(size - 1, 1)
    strangers = size - kept
    precision = trial.precision or precision_of(trial.run, trial.example)
    for variation in trial.variations[:1] if precision.scales_by_batch else trial.variations:
        for front in (strangers // 2,) if strangers > 1 else (0, strangers):
            name = _differing(trial, variation, slice(front, front + kept), size, precision)
            if name is not None:
                raise ModelRefused(
                    f"the output {name!r} of a row depends on the other rows of the batch, which are other "
                    "clients'"
                )


def _differing(
    trial: Trial, variation: Variation, kept: slice, size: int, precision: Precision
) -> str | None:
    """The output that is not the same for rows of the example, at `kept`, among strangers."""

    def answers(variation: Variation) -> Named:
        return _rows(trial.answers(_among_strangers(trial.example, variation, kept, size)), kept)

    try:
        found = answers(variation)
    except ModelRefused:
        if variation is not shuffled:
            return None
        found = answers(others)  # columns that mean different things can't be shuffled
    count = kept.stop - kept.start
    wanted = answers(others) if trial.is_random else _rows(trial.base, slice(0, count))
    return differing(wanted, found, precision)


def _among_strangers(example: Tensors, variation: Variation, kept: slice, size: int) -> Tensors:
    count = kept.stop - kept.start
    picked = torch.arange(size - count) % example[0].shape[0]
    made = []
    for tensor in example:
        strangers = variation(tensor)[picked]
        made.append(torch.cat([strangers[: kept.start], tensor[:count], strangers[kept.start :]]))
    return tuple(made)


def _rows(named: Named, rows: slice) -> Named:
    return [(name, tensor[rows] if tensor.dim() else tensor) for name, tensor in named]
