"""Tries a model on the sizes that one of its dimensions may have, and finds those that it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.inputs.buffers import unchanged_buffers
from torchere.archiver.models.inputs.run import Named, run_on
from torchere.archiver.models.inputs.sizes import DECODER_TOKENS, TOKENS, FreeSize, Tensors, resized
from torchere.archiver.models.probe.row_independence import Trial
from torchere.archiver.models.steps import Say

_MOST_STEPS = 40  # divisors of the example's size that are tried as steps
_FURTHER = (1, 2, 3)  # a step is right if the model takes the sizes that are this many steps from the example
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc")

Places = list[tuple[int, int]]
"""(output, dimension) of each dimension that varies."""


def varying_dimensions(trial: Trial, free: FreeSize, option: str, say: Say) -> Places:
    """Return the dimensions of the outputs that vary with `free`, over near and far sizes.

    Args:
        trial: the model and its results on the example.
        free: a size other than the batch.
        option: the inputs and the dimension as the user names them: `ids,mask.1`.
        say: takes a line when a size could not be tried.

    Raises:
        ModelRefused: the model does not take a size of the range; the text has a range that it takes, if one
            was found.
    """
    found: dict[tuple[int, int], None] = {}
    for size in free.sizes_to_try(trial.example):
        try:
            found |= dict.fromkeys(_places(trial, free, size))
        except ModelRefused as reason:
            if any(text in str(reason) for text in _NO_MEMORY):
                say(f"{option} was not tried with {size}, which takes more memory than there is")
                continue
            raise ModelRefused(f"{reason}; {_advice(trial, free, option)}") from reason
    return list(found)


def differing_dimensions(base: Named, other: Named, free: FreeSize, size: int) -> Places:
    """Return the dimensions in which two results of the model differ.

    Raises:
        ModelRefused: the results differ in the number of outputs, or of an output's dimensions.
    """
    if len(base) != len(other):
        raise ModelRefused(f"the model gives {len(other)} outputs instead of {len(base)} for other sizes")
    found = []
    for index, ((name, small), (_, large)) in enumerate(zip(base, other, strict=True)):
        if small.dim() != large.dim():
            raise ModelRefused(
                f"the output {name!r} has another number of dimensions when {free.name} is {size}"
            )
        found += [
            (index, at) for at, (a, b) in enumerate(zip(small.shape, large.shape, strict=True)) if a != b
        ]
    return found


def _places(trial: Trial, free: FreeSize, size: int) -> Places:
    refusal = None
    for given in examples_of_size(trial.example, free, size):
        try:
            other = trial.answers(given)
        except ModelRefused as reason:
            refusal = reason
        else:
            return differing_dimensions(trial.base, other, free, size)
    assert refusal is not None  # `examples_of_size` yields at least once
    raise refusal


def examples_of_size(example: Tensors, free: FreeSize, size: int) -> Iterator[Tensors]:
    """Yield the example in another size, with integers that may be valid for it, the likeliest first.

    The example's integers may be indices below its own size, such as edges between nodes. Beyond a smaller
    size, such an index can crash the process of a compiled model, so the first attempt clamps the integers to
    valid indices.
    """
    given, now = resized(example, free, size), free.size_in(example)

    def counts(tensor: torch.Tensor) -> bool:
        whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
        return whole and tensor.numel() > 0 and 1 < tensor.to(torch.int64).max().item() < now

    def clamped(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.int64).clamp(max=size - 1).to(tensor.dtype)

    # Through INT64, because torch has neither maximum nor clamp for unsigned types of more than 8 bits.
    if any(counts(tensor) for tensor in given) and size < now:
        yield tuple(clamped(tensor) if counts(tensor) else tensor for tensor in given)
    yield given
    if not all(tensor.is_floating_point() for tensor in given):
        yield tuple(tensor if tensor.is_floating_point() else torch.zeros_like(tensor) for tensor in given)


def with_other_sizes(
    samples: Sequence[Tensors], sizes: Sequence[FreeSize], module: torch.nn.Module
) -> list[Tensors]:
    """Return the samples; if sizes may vary and all samples have the same, add the first in other sizes.

    Some layers are fast only for the first size that they run on, which times of one size would not show. If
    the module fails on the new sample, it is left out, because the other size may need other integers.
    """
    first = other = samples[0]
    shapes = {tuple(tensor.shape[1:] for tensor in one) for one in samples}
    for free in sizes:
        if not free.is_batch(first):
            other = next(examples_of_size(other, free, free.other_size(first)))
    if len(shapes) > 1 or tuple(tensor.shape[1:] for tensor in other) in shapes:
        return list(samples)
    try:
        with unchanged_buffers(module):
            run_on(module, other)
    except ModelRefused:
        return list(samples)
    return [*samples, other]


def _advice(trial: Trial, free: FreeSize, option: str) -> str:
    """Find a narrower range of sizes that the model takes; return the advice to declare it by `option`."""

    def runs(size: int) -> bool:
        try:
            _places(trial, free, size)
        except ModelRefused:
            return False
        return True

    now = free.size_in(trial.example)
    narrower = _narrower(free, now, free.far_sizes(trial.example), runs)
    has_option = len({dimension for _, dimension in free.places}) == 1
    together = ", or name all inputs of this size in one --dynamic" if _is_shared(free, trial.example) else ""
    if narrower is not None and has_option:
        return f"it was found to run with --dynamic {option}={narrower.text}{together}"
    only = f"it was found to run with {now if narrower is None else narrower.text} only"
    if free.name in (TOKENS, DECODER_TOKENS):  # they vary without an option
        return f"{only}: give --example, which fixes the length"
    leave = f"leave --dynamic {option} out{together}, or, " if has_option else ""
    return (
        f"{only}: {leave}if an exported program lets this size vary, export it with a fixed one; if an "
        "archive's signature does, give --example, which fixes it"
    )


def _is_shared(free: FreeSize, example: Tensors) -> bool:
    """Return whether another input of the example has the same size in the same dimension."""
    index, dimension = free.places[0]
    size = example[index].shape[dimension : dimension + 1]
    alike = {at for at, tensor in enumerate(example) if tensor.shape[dimension : dimension + 1] == size}
    return bool(alike - {at for at, _ in free.places})


def _narrower(free: FreeSize, now: int, far: list[int], runs: Callable[[int], bool]) -> FreeSize | None:
    """Return the part of the range that the model takes, with a larger step or closer bounds, or None."""
    step = _step(free, now, runs)
    if step is None:
        return None
    low, high = min((*far, now)), max((*far, now))
    low = _last_that_runs(now // step, -(-low // step), step, runs)
    most = _last_that_runs(now // step, high // step, step, runs)
    high = free.high if most == high // step * step else most
    return replace(free, low=low, high=high, multiple=step)


def _step(free: FreeSize, now: int, runs: Callable[[int], bool]) -> int | None:
    """Return the smallest divisor of the example's size that the model takes as a step; None if none."""
    divisors = [step for step in range(free.multiple, now + 1, free.multiple) if now % step == 0]
    for step in divisors[:_MOST_STEPS]:
        above = [now + count * step for count in _FURTHER if now + count * step <= free.high]
        below = [now - count * step for count in _FURTHER if now - count * step >= free.low]
        if any(sizes and all(map(runs, sizes)) for sizes in (above, below)):
            return step
    return None


def _last_that_runs(good: int, end: int, step: int, runs: Callable[[int], bool]) -> int:
    """Return the size nearest to `end * step` that runs, by bisection from `good * step`, which runs."""
    if runs(end * step):
        return end * step
    while abs(end - good) > 1:
        middle = (good + end) // 2
        good, end = (middle, end) if runs(middle * step) else (good, middle)
    return good * step
