"""Checks that the rows of a batch, which are of different clients, do not affect one another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.inputs.run import Named, Run, run_on, seeded, shapes
from torchere.archiver.models.inputs.sizes import Tensors
from torchere.archiver.models.probe.precision import Precision, differing, precision_of
from torchere.archiver.models.steps import Say, silent

# Variations of an example's inputs: values that other clients might send, or that take other branches.
#
# Integers are never made up, so that indices stay valid: they are those of the example, or 0, which is a
# valid index and the usual padding. Padding stays after the values that it pads, where clients put it.

Variation = Callable[[torch.Tensor], torch.Tensor]


def shuffled(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values rolled by one along the last dimension, except padding; sums stay the same.

    In integers, padding is every 0 and every value equal to the last one of its row; masks consist of such
    values only, and stay.
    """
    if tensor.is_floating_point() and tensor.dim():
        return tensor.roll(1, -1)
    if tensor.dtype == torch.bool or not tensor.dim() or not tensor.numel():
        return tensor.clone()
    moved = tensor.reshape(-1, tensor.shape[-1]).to(torch.int64, copy=True)  # a type that torch can index
    for row in moved:
        places = ((row != 0) & (row != row[-1])).nonzero().flatten()
        row[places] = row[places].roll(1)
    return moved.to(tensor.dtype).reshape(tensor.shape)


def others(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows in another order; a single row stays."""
    return tensor.roll(1, 0)


def larger(tensor: torch.Tensor) -> torch.Tensor:
    """Scale and shift floats; set all integers to the largest of them, as in a text without padding."""
    if tensor.is_floating_point():
        return tensor * 3 + 1
    if tensor.dtype == torch.bool or not tensor.numel():
        return torch.ones_like(tensor)
    return tensor.clone().fill_(_largest(tensor))


def opposite(tensor: torch.Tensor) -> torch.Tensor:
    """Negate and scale floats; set the second half of each row of integers to 0, as in a padded text."""
    if tensor.is_floating_point():
        return tensor * -2
    emptied = tensor.clone()
    if tensor.dim() < 2:
        return emptied.fill_(0)
    emptied[..., tensor.shape[-1] // 2 :] = 0
    return emptied


def _largest(tensor: torch.Tensor) -> int:
    return int(tensor.to(torch.int64).max())  # torch has no maximum of larger unsigned types


# The first uses only values of the example.
VARIATIONS: tuple[Variation, ...] = (shuffled, larger, opposite)


@dataclass(frozen=True, slots=True)
class Trial:
    """A model to run on other sizes and values than those of an example."""

    run: Run
    example: Tensors
    base: Named = field(default_factory=list)  # the model's results on the example
    is_random: bool = False
    precision: Precision | None = None  # None: found by `precision_of`
    variations: Sequence[Variation] = VARIATIONS
    tell: Say = silent  # takes the inputs of each run before it begins

    def answers(self, inputs: Tensors) -> Named:
        """Run the model; a random one gets the same random numbers each time."""
        self.tell(shapes(inputs))
        return seeded(self.run, inputs) if self.is_random else run_on(self.run, inputs)


def refuse_mixing(trial: Trial, size: int) -> None:
    """Raise ModelRefused when a row's result depends on the other rows of the batch.

    Rows of the example are run after and before rows of other values.

    Args:
        trial: every input of the example has the batch as its first dimension.
        size: size of the batches to try, which the model takes.

    Raises:
        ModelRefused: a result depends on the other rows. Other values on which the model fails are skipped.
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
    """Return the output that other rows change for rows of the example, which are at `kept`; or None."""

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
