"""Whether the rows of a batch, which are different clients', leave one another alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.dynamic import Tensors
from torchere.archiver.models.precision import EXACT, Precision
from torchere.archiver.models.variations import VARIATIONS, Variation

Named = list[tuple[str, torch.Tensor]]
Runs = Callable[[Tensors], Named]  # raises ModelRefused where the model fails


@dataclass(frozen=True, slots=True)
class _Mixed:
    """A batch of rows of the example and of strangers, and where its rows of the example are."""

    batch: Tensors
    here: slice  # in the batch
    there: slice  # in the example


def refuse_unsteady(runs: Runs, example: Tensors, base: Named) -> None:
    """Raise ModelRefused when a second run on the same example answers something other than `base`."""
    if _differing(base, runs(example), EXACT) is not None:
        raise ModelRefused(
            "two runs on the same example differ: the model is random, or keeps state from one run to the "
            "next, and what one client sends may reach another"
        )


def refuse_mixing(runs: Runs, example: Tensors, base: Named, size: int, precision: Precision) -> None:
    """Try rows of the example behind and in front of rows of other values.

    Args:
        runs: the model.
        example: every input has the batch as its first dimension.
        base: what the model answers to the example.
        size: of the batches to try, which the model takes.
        precision: of the model.

    Raises:
        ModelRefused: an answer to a row depends on the other rows; or the model does not run on rows that
            hold the values of the example in another order. Rows of other values that it can't run on tell
            nothing.
    """
    for variation in VARIATIONS[:1] if precision.scales_by_batch else VARIATIONS:
        for mixed in _batches(example, variation, size):
            try:
                found = runs(mixed.batch)
            except ModelRefused:
                if variation is VARIATIONS[0]:
                    raise
                continue
            name = _differing(_rows(base, mixed.there), _rows(found, mixed.here), precision)
            if name is not None:
                raise ModelRefused(
                    f"the output {name!r} of a row depends on the other rows of the batch, which are other "
                    "clients'"
                )


def _batches(example: Tensors, variation: Variation, size: int) -> Iterator[_Mixed]:
    now = example[0].shape[0]
    kept = now if size > now else max(size - 1, 1)
    others = size - kept
    strangers = [variation(tensor)[torch.arange(others) % now] for tensor in example]
    first = [tensor[:kept] for tensor in example]
    last = [tensor[now - kept :] for tensor in example]
    yield _Mixed(_joined(first, strangers), slice(0, kept), slice(0, kept))
    yield _Mixed(_joined(strangers, last), slice(others, size), slice(now - kept, now))


def _joined(front: list[torch.Tensor], back: list[torch.Tensor]) -> Tensors:
    return tuple(torch.cat(pair) for pair in zip(front, back, strict=True))


def _rows(named: Named, rows: slice) -> Named:
    return [(name, tensor[rows] if tensor.dim() else tensor) for name, tensor in named]


def _differing(wanted: Named, found: Named, precision: Precision) -> str | None:
    """The name of an output that is not the same; None when all are."""
    for index, (name, tensor) in enumerate(wanted):
        if index >= len(found) or precision.differs(tensor, found[index][1]):
            return name
    return None
