"""Derives a signature from runs of the model: on the example, and on examples of other sizes.

onnxruntime runs an ONNX model to try whether its first dimension is a batch: dimension names do not show it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.inputs.examples import check_against, example_of
from torchere.archiver.models.inputs.run import (
    DATATYPES,
    Named,
    Run,
    check_tensor,
    run_of_session,
    run_on,
    seeded,
    shapes,
)
from torchere.archiver.models.inputs.sizes import BATCH, LARGEST, FreeSize, Tensors, batch_of, resized
from torchere.archiver.models.load.onnx import OnnxForm
from torchere.archiver.models.probe.free_sizes import Places, differing_dimensions, varying_dimensions
from torchere.archiver.models.probe.isolation import ModelEndedProcess, isolated
from torchere.archiver.models.probe.precision import FINE, SHARED, differing
from torchere.archiver.models.probe.row_independence import VARIATIONS, Trial, Variation, refuse_mixing
from torchere.archiver.models.steps import Say, refusing, silent
from torchere.archiver.signature import ANY, Limit, Signature, TensorSpec, parse

_ANY_BATCH = (1, LARGEST)
_NOT_BATCHED = "not batched, requests go through the model one by one"
_NO_BATCH = "the first dimensions are free and no batch, requests go through the model one by one"
_ONE_BY_ONE = "leave --dynamic-batch out to have requests go through it one by one"
_LIKE_REQUESTS = "give an --example with the shapes and datatypes that the model takes"


def signature_of(
    run: Run,
    example: Tensors,
    names: Sequence[str],
    sizes: Sequence[FreeSize],
    *,
    probe_batch: bool,
    say: Say = silent,
    variations: Sequence[Variation] = VARIATIONS,
    scales_by_batch: bool = False,
) -> Signature:
    """Return the signature of the packed model; every free size in it was tried, in a child process.

    Args:
        run: the model as it will be served.
        example: one tensor per input.
        names: names of the inputs.
        sizes: the free sizes; the model is refused when it does not support one.
        probe_batch: when `sizes` has no batch, try whether the model takes batches of another size.
        say: takes a line when that fails, and when the model is random.
        variations: functions that make the other rows of a batch.
        scales_by_batch: the model is int8 with scales measured over all rows of a batch. Otherwise this is
            derived from its operators, which machine code hides.

    Raises:
        ModelRefused: the model fails, or mixes rows that would come from different clients.
        ModelEndedProcess: the model ends its process.
    """
    for name, tensor in zip(names, example, strict=True):
        check_tensor(name, tensor)

    def tried(looks_for_batch: bool) -> Signature:
        def work(tell: Say, say: Say) -> str:
            precision = SHARED if scales_by_batch else None
            trial = Trial(run, example, tell=tell, variations=variations, precision=precision)
            return _tried(trial, names, sizes, looks_for_batch, say).to_json()

        return parse(isolated(work, say))

    try:
        return tried(probe_batch)
    except ModelEndedProcess as end:
        if any(free.is_batch(example) for free in sizes):
            raise ModelEndedProcess(f"{end}; {_ONE_BY_ONE}") from end
        if not probe_batch:
            raise
        refusal = end
    found = tried(False)  # if the example itself ends the process, this raises the error again
    say(f"{_NOT_BATCHED}: {refusal}")
    return found


def _tried(
    trial: Trial, names: Sequence[str], sizes: Sequence[FreeSize], probe_batch: bool, say: Say
) -> Signature:
    example = trial.example
    is_asked = any(free.is_batch(example) for free in sizes)
    trial, is_steady = _ready(trial, is_asked, say)
    found, one_by_one = [], False
    for free in sizes:
        places, is_batch = _asked(trial, free, names, say)
        found.append((free, places))
        one_by_one |= free.is_batch(example) and not is_batch
    if probe_batch and is_steady and not is_asked:
        found += _found_batch(trial, say)
    made = _signature(trial, names, found, one_by_one)
    if made.batched and not any(free.is_batch(example) for free, _ in found):
        try:
            _varying(trial, batch_of(example, _common(sizes)))
        except ModelRefused as reason:
            say(f"{_NO_BATCH}: {reason}")
            one_by_one = True
    return replace(made, one_by_one=one_by_one and made.batched)


def _ready(trial: Trial, is_asked: bool, say: Say) -> tuple[Trial, bool]:
    """Run the example; return the trial with its results, and whether it makes sense to look for a batch."""
    try:
        base = trial.answers(trial.example)
    except ModelRefused as reason:
        raise ModelRefused(f"{reason}; {_other_example(trial)}") from reason
    try:
        random = is_random(trial.run, trial.example, base)
    except ModelRefused as reason:
        if is_asked:
            raise ModelRefused(f"{reason}; {_ONE_BY_ONE}") from reason
        say(f"not batched: {reason}")
        return replace(trial, base=base), False
    if random:
        say(
            "two runs on the same example differ: the model is random, and is tried with fixed random numbers"
        )
        base = seeded(trial.run, trial.example)
    return replace(trial, base=base, is_random=random), True


def _other_example(trial: Trial) -> str:
    """Return advice on an example that the model fails on: most often the example lacks a batch dimension."""
    rows = tuple(tensor[None] for tensor in trial.example)
    try:
        trial.answers(rows)
    except ModelRefused:
        is_whole = any(not tensor.is_floating_point() for tensor in trial.example)
        return f"{_LIKE_REQUESTS}; in JSON, write 1.0 for a float" if is_whole else _LIKE_REQUESTS
    return f"it runs on {shapes(rows)}: give the example this batch dimension"


def _signature(
    trial: Trial, names: Sequence[str], found: Sequence[tuple[FreeSize, Places]], one_by_one: bool
) -> Signature:
    inputs = [list(tensor.shape) for tensor in trial.example]
    outputs = [list(tensor.shape) for _, tensor in trial.base]
    limits: list[list[Limit]] = [[] for _ in inputs]
    for free, places in found:
        is_batch = free.is_batch(trial.example) and not one_by_one
        for index, dimension in free.places:
            inputs[index][dimension] = ANY
            limits[index] += _limits(free, dimension, is_batch)
        for index, dimension in places:
            outputs[index][dimension] = ANY
    return Signature(
        tuple(
            replace(_spec(name, tensor, shape), limits=tuple(its))
            for name, tensor, shape, its in zip(names, trial.example, inputs, limits, strict=True)
        ),
        tuple(_spec(name, t, shape) for (name, t), shape in zip(trial.base, outputs, strict=True)),
    )


def _limits(free: FreeSize, dimension: int, is_batch: bool) -> list[Limit]:
    """Return a list with the limit of a free size; empty if every size is allowed.

    A size in several places always has a limit, whose `name` says that they are equal; only the batch needs
    no limit for that. A minimum of 2 counts as 1: torch.export records 2 for every size, and its programs run
    with 1, too. A batch has no minimum, because a server assembles it from single rows.
    """
    low = 1 if free.low <= 2 or is_batch else free.low
    shared = "" if is_batch or len(free.places) == 1 else free.name
    limit = Limit(dimension, low, free.high if free.high < LARGEST else None, free.multiple, shared)
    return [] if limit == Limit(dimension) else [limit]


def _asked(trial: Trial, free: FreeSize, names: Sequence[str], say: Say) -> tuple[Places, bool]:
    """Return the dimensions of the outputs that vary with a size, and whether the size is a batch.

    The first dimension of all inputs is the batch if rows are independent, even if it has another name.
    """
    refusal = None
    if free.is_batch(trial.example):
        try:
            return _varying(trial, free), True
        except ModelRefused as reason:
            if free.name == BATCH:
                raise ModelRefused(
                    f"{reason}; {_ONE_BY_ONE}, or, where the first dimension is no batch, say --dynamic "
                    f"{','.join(names)}.0=1: instead"
                ) from reason
            refusal = reason
    places = varying_dimensions(trial, free, free.option(names), say)
    if refusal is not None:
        say(f"{_NO_BATCH}: {refusal}")
    return places, False


def _common(sizes: Sequence[FreeSize]) -> tuple[int, int]:
    """Return the range that all free first dimensions allow: a server treats them as one batch."""
    first = [free for free in sizes if any(dimension == 0 for _, dimension in free.places)]
    return max(free.low for free in first), min(free.high for free in first)


def _found_batch(trial: Trial, say: Say) -> list[tuple[FreeSize, Places]]:
    """Return the batch if the model takes another size of it; else say why it does not, and return []."""
    try:
        free = batch_of(trial.example, _ANY_BATCH)
        return [(free, _varying(trial, free))]
    except ModelRefused as reason:
        say(f"{_NOT_BATCHED}: {reason}")
        return []


def batch_refusal(trial: Trial) -> ModelRefused | None:
    """Return why the model takes no other batch than the example's; None if it takes others."""
    try:
        base = trial.answers(trial.example)
        trial = replace(trial, base=base, is_random=is_random(trial.run, trial.example, base))
        _varying(trial, batch_of(trial.example, _ANY_BATCH))
    except ModelRefused as reason:
        return reason
    return None


def _varying(trial: Trial, free: FreeSize) -> Places:
    """Return the dimensions of the outputs that vary with a batch; raise if its rows are not independent."""
    now, size = free.size_in(trial.example), free.other_size(trial.example)
    other = trial.base if size == now else trial.answers(resized(trial.example, free, size))
    places = differing_dimensions(trial.base, other, free, size)
    _check_row_count(other, size)
    _check_row_count(trial.base, now)
    takes_one = free.low <= 2 and free.multiple == 1  # 2 counts as 1, see `_limits`
    if takes_one and 1 not in (now, size):
        _check_row_count(trial.answers(resized(trial.example, free, 1)), 1)
    refuse_mixing(trial, size, takes_one)
    if size == now:  # a range of one size: no second size shows which dimension is the batch
        return [(index, 0) for index, (_, tensor) in enumerate(trial.base) if tensor.dim()]
    return places


def _check_row_count(results: Named, rows: int) -> None:
    for name, tensor in results:
        if not tensor.dim() or tensor.shape[0] != rows:
            count, advice = f"{rows} rows", ""
            if rows == 1:
                count, advice = "one row", " (squeeze() removes this dimension, squeeze(-1) keeps it)"
            raise ModelRefused(
                f"the output {name!r} has the shape {tuple(tensor.shape)} for {count}; expected as many rows"
                f"{advice}"
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


def tried_signature(path: Path, form: OnnxForm, example: Tensors | None, say: Say) -> Signature:
    """Return the signature of an ONNX model after trying whether it has a batch.

    If all first dimensions are free, and the rows of an example do not affect one another, these dimensions
    are the batch. If that can't be tried, because onnxruntime is missing or does not run the model, they are
    the batch if they share a name.

    Args:
        path: the file.
        form: the result of `read_onnx` for the file.
        example: if it is None, one is made up from the inputs of the graph.
        say: takes a line when the model is packed without batches, or when nothing could be tried.

    Raises:
        ModelRefused: the example does not fit the model; or the model does not say how many dimensions an
            input or output has, and can't be run to find out.
    """
    try:
        return parse(isolated(lambda tell, say: _tried_form(path, form, example, tell, say).to_json(), say))
    except ModelEndedProcess as end:
        if form.unshaped or not form.signature.batched:
            raise
        return _fixed(form, example, str(end), say)


def _tried_form(path: Path, form: OnnxForm, example: Tensors | None, tell: Say, say: Say) -> Signature:
    load = functools.cache(functools.partial(_loaded, path))  # creates at most one session
    if form.unshaped:
        form = _ranked(path, form, example, load)
    if example is not None:
        check_against(example, form.signature)
    if not form.signature.batched:
        return form.signature
    try:
        refusal = _refusal(form, example, load, tell)
    except ModelRefused as failure:
        reason = f"rows were not tried together: {failure}"
        if form.names_batch:
            say(f"taken for batched, because the first dimensions share a name; {reason}")
            return form.signature
        return _fixed(form, example, f"the first dimensions do not share a name; {reason}", say)
    return form.signature if refusal is None else _fixed(form, example, str(refusal), say)


def _ranked(path: Path, form: OnnxForm, example: Tensors | None, load: Callable[[], Run]) -> OnnxForm:
    """Return the form with the number of dimensions that each unshaped input and output has in a run."""
    inputs = [spec.name for spec in form.signature.inputs]
    outputs = [spec.name for spec in form.signature.outputs]
    silent = next(name for name in (*inputs, *outputs) if name in form.unshaped)
    if example is None and silent in inputs:
        raise ModelRefused(f"{path}: it does not say which dimensions {silent!r} has; give --example")
    try:
        given = _made_up(form.signature) if example is None else example
        run = load()
        with refusing("running the model on the example"):
            found = run(*given)
    except ModelRefused as reason:
        raise ModelRefused(
            f"{path}: it does not say which dimensions {silent!r} has, and running it tells nothing: {reason}"
        ) from reason
    ranks = {name: one.dim() for name, one in zip((*inputs, *outputs), (*given, *found), strict=True)}
    return form.with_ranks({name: rank for name, rank in ranks.items() if name in form.unshaped})


def _refusal(
    form: OnnxForm, example: Tensors | None, load: Callable[[], Run], tell: Say
) -> ModelRefused | None:
    """Return why the model takes no batches, or None; raise ModelRefused when that can't be tried."""
    given = _made_up(form.signature) if example is None else example
    run = load()
    tell(shapes(given))
    with refusing("running the model on the example"):
        run(*given)
    precision = SHARED if form.is_quantised else FINE
    return batch_refusal(Trial(run, given, precision=precision, tell=tell))


def _made_up(signature: Signature) -> Tensors:
    made = example_of(signature).tensors
    if not any(tensor.is_floating_point() for tensor in made):
        raise ModelRefused("which whole numbers it takes is not known; give --example")
    return made


def _loaded(path: Path) -> Run:
    if importlib.util.find_spec("onnxruntime") is None:
        raise ModelRefused("onnxruntime is not installed (pip install torchere[onnx])")
    runtime: Any = importlib.import_module("onnxruntime")
    with refusing(f"{path}: loading by onnxruntime"):
        return run_of_session(runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"]))


def _fixed(form: OnnxForm, example: Tensors | None, reason: str, say: Say) -> Signature:
    rows = 1 if example is None else example[0].shape[0]
    say(f"not batched, a request has {rows} in its first dimension as --example has, or 1: {reason}")
    return form.with_rows(rows)
