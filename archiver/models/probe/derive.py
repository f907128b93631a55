"""Derives a signature from runs of the model: on the example, and on examples of other sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.inputs.run import DATATYPES, Named, Run, check_tensor, run_on, seeded
from torchere.archiver.models.inputs.sizes import FreeSize, Tensors, batch_of, resized
from torchere.archiver.models.probe.precision import FINE, Precision, differing
from torchere.archiver.models.probe.row_independence import VARIATIONS, Trial, Variation, refuse_mixing
from torchere.archiver.models.steps import Say, silent
from torchere.archiver.signature import ANY, Signature, TensorSpec

_ANY_BATCH = (1, 2**31)
_Places = list[tuple[int, int]]  # (output, dimension)


def signature_of(
    run: Run,
    example: Tensors,
    names: Sequence[str],
    sizes: Sequence[FreeSize],
    *,
    probe_batch: bool,
    say: Say = silent,
    variations: Sequence[Variation] = VARIATIONS,
) -> Signature:
    """Return the signature of the packed model; every free size in it was tried.

    Args:
        run: the model as it will be served.
        example: one tensor per input.
        names: names of the inputs.
        sizes: the free sizes; the model is refused when it does not support one.
        probe_batch: when `sizes` has no batch, try whether the model takes another one.
        say: takes a line when that fails, and when the model is random.
        variations: functions that make the other rows of a batch.

    Raises:
        ModelRefused: the model fails, or mixes rows that would come from different clients.
    """
    for name, tensor in zip(names, example, strict=True):
        check_tensor(name, tensor)
    is_asked = any(free.is_batch(example) for free in sizes)
    trial, is_steady = _trial(run, example, is_asked, say, variations)
    found = [(free, _varying(trial, free)) for free in sizes]
    if probe_batch and is_steady and not is_asked:
        found += _found_batch(trial, say)
    made = _signature(trial, names, found)
    if made.batched and not any(free.is_batch(example) for free, _ in found):
        _varying(trial, batch_of(example, _common(sizes)))
    return made


def _trial(
    run: Run, example: Tensors, is_asked: bool, say: Say, variations: Sequence[Variation]
) -> tuple[Trial, bool]:
    """Return the trial to run, and whether it makes sense to look for a batch."""
    base = run_on(run, example)
    try:
        random = is_random(run, example, base)
    except ModelRefused as reason:
        if is_asked:
            raise ModelRefused(
                f"{reason}; leave --dynamic-batch out to have requests go through it one by one"
            ) from reason
        say(f"not batched: {reason}")
        return Trial(run, example, base, variations=variations), False
    if random:
        say(
            "two runs on the same example differ: the model is random, and is tried with fixed random numbers"
        )
        base = seeded(run, example)
    return Trial(run, example, base, random, variations=variations), True


def _signature(trial: Trial, names: Sequence[str], found: Sequence[tuple[FreeSize, _Places]]) -> Signature:
    inputs = [list(tensor.shape) for tensor in trial.example]
    outputs = [list(tensor.shape) for _, tensor in trial.base]
    for free, places in found:
        for index, dimension in free.places:
            inputs[index][dimension] = ANY
        for index, dimension in places:
            outputs[index][dimension] = ANY
    return Signature(
        tuple(_spec(name, t, shape) for name, t, shape in zip(names, trial.example, inputs, strict=True)),
        tuple(_spec(name, t, shape) for (name, t), shape in zip(trial.base, outputs, strict=True)),
    )


def _common(sizes: Sequence[FreeSize]) -> tuple[int, int]:
    """Return the bounds common to all sizes of first dimensions: a server takes these for one batch."""
    first = [free for free in sizes if any(dimension == 0 for _, dimension in free.places)]
    return max(free.low for free in first), min(free.high for free in first)


def _found_batch(trial: Trial, say: Say) -> list[tuple[FreeSize, _Places]]:
    """Return the batch if all inputs have one and the model supports another size of it; else say why."""
    try:
        free = batch_of(trial.example, _ANY_BATCH)
        return [(free, _varying(trial, free))]
    except ModelRefused as reason:
        say(f"not batched, requests go through the model one by one: {reason}")
        return []


def batch_refusal(run: Run, example: Tensors, precision: Precision) -> ModelRefused | None:
    """Return why the model takes no other batch than the example's; None if it takes others."""
    try:
        base = run_on(run, example)
        trial = Trial(run, example, base, is_random(run, example, base), precision)
        _varying(trial, batch_of(example, _ANY_BATCH))
    except ModelRefused as reason:
        return reason
    return None


def _varying(trial: Trial, free: FreeSize) -> _Places:
    """Return the dimensions of the outputs that vary with `free`."""
    base, now, size = trial.base, free.size_in(trial.example), free.other_size(trial.example)
    other = base if size == now else trial.answers(resized(trial.example, free, size))
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
        if free.is_batch(trial.example):
            _check_row_count(name, small, large, now, size)
    if free.is_batch(trial.example):
        refuse_mixing(trial, size)
        if size == now:  # a range of one size: no second size shows which dimension is the batch
            found = [(index, 0) for index, (_, tensor) in enumerate(base) if tensor.dim()]
    return found


def _check_row_count(name: str, small: torch.Tensor, large: torch.Tensor, now: int, size: int) -> None:
    if small.dim() == 0 or (small.shape[0], large.shape[0]) != (now, size):
        raise ModelRefused(
            f"the output {name!r} has the shape {tuple(large.shape)} for {size} rows; expected as many rows"
        )


def _spec(name: str, tensor: torch.Tensor, shape: Sequence[int]) -> TensorSpec:
    return TensorSpec(name, DATATYPES[tensor.dtype], tuple(shape))


def is_random(run: Run, example: Tensors, base: Named) -> bool:
    """Return whether two runs on one example agree only with the same seed.

    Args:
        run: the model.
        example: inputs to run it on.
        base: the results of an earlier run on them.

    Raises:
        ModelRefused: the runs differ with the same seed, too, because the model keeps state.
    """
    if differing(base, run_on(run, example), FINE) is None:
        return False
    if differing(seeded(run, example), seeded(run, example), FINE) is None:
        return True
    raise ModelRefused(
        "two runs on the same example differ, also with the same random numbers: the model keeps state from "
        "one run to the next, and what one client sends may reach another"
    )
