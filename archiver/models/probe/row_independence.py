"""Checks that the rows of a batch, which may be different clients', do not affect one another."""

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
    values only, and stay as they are.
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
    """Return the rows in another order; a single row stays as it is."""
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


# The first variation uses only values of the example.
VARIATIONS: tuple[Variation, ...] = (shuffled, larger, opposite)
_MOST_ALONE = 3  # rows of the example that are run without the others


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


def refuse_mixing(trial: Trial, size: int, takes_one: bool = False) -> None:
    """Raise ModelRefused when a row's result depends on the other rows of the batch.

    Rows of the example are run after and before rows of other values, which are also run alone: if a model
    crops texts to the longest row, or takes a maximum of the batch, only these may get another result.

    Args:
        trial: every input of the example has the batch as its first dimension.
        size: size of the batches to try, which the model takes.
        takes_one: the model takes a batch of one, too, so rows of the example are also run alone.

    Raises:
        ModelRefused: a result depends on the other rows. Other values on which the model fails are skipped.
    """
    now = trial.example[0].shape[0]
    kept = now if size > now else max(size - 1, 1)
    strangers = size - kept
    precision = trial.precision or precision_of(trial.run, trial.example)
    is_exact = not (trial.is_random or precision.scales_by_batch)
    if is_exact and takes_one and now > 1:
        _refuse_mixing_in_example(trial, precision)
    for variation in trial.variations[:1] if precision.scales_by_batch else trial.variations:
        alone = _alone(trial, variation, strangers) if is_exact else None
        for front in (strangers // 2,) if strangers > 1 else (0, strangers):
            name = _differing(trial, variation, slice(front, front + kept), size, precision, alone=alone)
            if name is not None:
                raise _mixing(name)


def _refuse_mixing_in_example(trial: Trial, precision: Precision) -> None:
    """Raise ModelRefused when one of the example's first rows has another result without the other rows."""
    for row in range(min(trial.example[0].shape[0], _MOST_ALONE)):
        found = trial.answers(tuple(tensor[row : row + 1] for tensor in trial.example))
        if name := differing(_rows(trial.base, slice(row, row + 1)), found, precision):
            raise _mixing(name)


def _mixing(output: str) -> ModelRefused:
    return ModelRefused(
        f"the output {output!r} of a row depends on the other rows of the batch, which are other clients'"
    )


def _alone(trial: Trial, variation: Variation, count: int) -> Named | None:
    """Run `count` rows of other values without the example's; None if that fails or `count` is 0."""
    try:
        return trial.answers(_strangers(trial.example, variation, count)) if count else None
    except ModelRefused:
        return None


def _differing(
    trial: Trial, variation: Variation, kept: slice, size: int, precision: Precision, *, alone: Named | None
) -> str | None:
    """Return the output that rows of another client change, or None.

    Rows of the example are at `kept`; `alone` has the results of the other rows when run without them.
    """

    def answers(variation: Variation) -> Named:
        return trial.answers(_among_strangers(trial.example, variation, kept, size))

    try:
        found = answers(variation)
    except ModelRefused:
        if variation is not shuffled:
            return None
        found, alone = answers(others), None  # columns that mean different things can't be shuffled
    count = kept.stop - kept.start
    wanted = _rows(answers(others), kept) if trial.is_random else _rows(trial.base, slice(0, count))
    name = differing(wanted, _rows(found, kept), precision)
    if name is None and alone is not None:
        name = differing(alone, _without(found, kept), precision)
    return name


def _strangers(example: Tensors, variation: Variation, count: int) -> Tensors:
    picked = torch.arange(count) % example[0].shape[0]
    return tuple(variation(tensor)[picked] for tensor in example)


def _among_strangers(example: Tensors, variation: Variation, kept: slice, size: int) -> Tensors:
    count = kept.stop - kept.start
    made = []
    for tensor, strangers in zip(example, _strangers(example, variation, size - count), strict=True):
        made.append(torch.cat([strangers[: kept.start], tensor[:count], strangers[kept.start :]]))
    return tuple(made)


def _rows(named: Named, rows: slice) -> Named:
    return [(name, tensor[rows] if tensor.dim() else tensor) for name, tensor in named]


def _without(named: Named, rows: slice) -> Named:
    return [
        (name, torch.cat([tensor[: rows.start], tensor[rows.stop :]]) if tensor.dim() else tensor)
        for name, tensor in named
    ]
