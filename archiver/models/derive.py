"""Derives a signature from runs of the model: on the example, and on examples of other sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.dynamic import FreeSize, Tensors, batch_of, resized
from torchere.archiver.models.precision import Precision, precision_of
from torchere.archiver.models.rows import Named, refuse_mixing, refuse_unsteady
from torchere.archiver.models.steps import Say, refusing, silent
from torchere.archiver.signature import ANY, Signature, TensorSpec

Run = Callable[..., Any]
DATATYPES = {
    torch.bool: "BOOL",
    torch.uint8: "UINT8",
    torch.uint16: "UINT16",
    torch.uint32: "UINT32",
    torch.uint64: "UINT64",
    torch.int8: "INT8",
    torch.int16: "INT16",
    torch.int32: "INT32",
    torch.int64: "INT64",
    torch.float16: "FP16",
    torch.bfloat16: "BF16",
    torch.float32: "FP32",
    torch.float64: "FP64",
}
_ANY_BATCH = (1, 2**31)


def run_on(run: Run, example: Tensors) -> Named:
    """Run the model without gradients; its results by name, tuples and dicts flattened.

    It gets copies, and copies are what it gave: it may change its inputs, and later what it returned.

    Raises:
        ModelRefused: it raises, or returns something other than tensors.
    """
    with refusing(f"running the model on {_shapes(example)}"), torch.no_grad():
        result = run(*(tensor.clone() for tensor in example))
    return [(name, tensor.clone()) for name, tensor in named_results(result)]


def named_results(result: Any) -> Named:
    """The tensors of a model's result by name, tuples and dicts flattened.

    Raises:
        ModelRefused: there is none, or something other than tensors.
    """
    found = list(_flat(result, ""))
    if not found:
        raise ModelRefused("the model returns no tensor; expected one, or a tuple or dict of them")
    return [("output" if name == "" else name, tensor) for name, tensor in found]


def signature_of(
    run: Run,
    example: Tensors,
    names: Sequence[str],
    sizes: Sequence[FreeSize],
    *,
    probe_batch: bool,
    say: Say = silent,
) -> Signature:
    """The signature of what is packed; every free size in it was tried.

    Args:
        run: the model as it will be served.
        example: one tensor per input.
        names: of the inputs.
        sizes: what may vary; the model is refused when it does not follow.
        probe_batch: when `sizes` has no batch, try whether the model takes another one.
        say: takes a line when that fails, and when the model answers by more than its inputs.

    Raises:
        ModelRefused: the model fails, or mixes rows that would come from different clients.
    """
    given = list(sizes)
    base = run_on(run, example)
    is_batched = any(free.is_batch(example) for free in given)
    if _is_steady(run, example, base, None if is_batched else say) and probe_batch and not is_batched:
        given += _found_batch(run, example, base, say)
    inputs = [list(tensor.shape) for tensor in example]
    outputs = [list(tensor.shape) for _, tensor in base]
    for free in given:
        for index, dimension in free.places:
            inputs[index][dimension] = ANY
        for index, dimension in _varying(run, example, base, free):
            outputs[index][dimension] = ANY
    found = Signature(
        tuple(_spec(name, t, shape) for name, t, shape in zip(names, example, inputs, strict=True)),
        tuple(_spec(name, t, shape) for (name, t), shape in zip(base, outputs, strict=True)),
    )
    if found.batched and not any(free.is_batch(example) for free in given):
        _varying(run, example, base, batch_of(example, _common(given)))
    return found


def _is_steady(run: Run, example: Tensors, base: Named, say: Say | None) -> bool:
    """Whether the model answers the same twice; `say` None is for a batch that was asked for."""
    try:
        refuse_unsteady(partial(run_on, run), example, base)
    except ModelRefused as reason:
        if say is None:
            raise
        say(f"not batched: {reason}")
        return False
    return True


def _common(sizes: Sequence[FreeSize]) -> tuple[int, int]:
    """The bounds that sizes share which all are first dimensions: a server takes these for one batch."""
    first = [free for free in sizes if any(dimension == 0 for _, dimension in free.places)]
    return max(free.low for free in first), min(free.high for free in first)


def _found_batch(run: Run, example: Tensors, base: Named, say: Say) -> list[FreeSize]:
    """The batch, if all inputs have one and the model follows another size of it; else a line says why."""
    try:
        free = batch_of(example, _ANY_BATCH)
        _varying(run, example, base, free)
    except ModelRefused as reason:
        say(f"not batched, requests go through the model one by one: {reason}")
        return []
    return [free]


def batch_refusal(run: Run, example: Tensors, precision: Precision) -> ModelRefused | None:
    """Why rows of different clients can't go through the model together; None if they can."""
    try:
        base = run_on(run, example)
        refuse_unsteady(partial(run_on, run), example, base)
        _varying(run, example, base, batch_of(example, _ANY_BATCH), precision)
    except ModelRefused as reason:
        return reason
    return None


def _varying(
    run: Run, example: Tensors, base: Named, free: FreeSize, precision: Precision | None = None
) -> list[tuple[int, int]]:
    """Which dimensions of the outputs go with `free`; `precision` None is found out."""
    size = free.other_size(example)
    now = free.size_in(example)
    other = run_on(run, resized(example, free, size))
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
        if free.is_batch(example):
            _check_row_count(name, small, large, now, size)
    if free.is_batch(example):
        refuse_mixing(partial(run_on, run), example, base, size, precision or precision_of(run, example))
        if size == now:  # a range of one size: the batch is what it is
            found = [(index, 0) for index, (_, tensor) in enumerate(base) if tensor.dim()]
    return found


def _check_row_count(name: str, small: torch.Tensor, large: torch.Tensor, now: int, size: int) -> None:
    if small.dim() == 0 or (small.shape[0], large.shape[0]) != (now, size):
        raise ModelRefused(
            f"the output {name!r} has the shape {tuple(large.shape)} for {size} rows; expected as many rows"
        )


def _flat(value: Any, path: str) -> Any:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (tuple, list)):
        fields = getattr(value, "_fields", None) or [f"output_{index}" for index in range(len(value))]
        named = zip(fields, value, strict=True) if len(value) > 1 else [("", item) for item in value]
        for field, item in named:
            yield from _flat(item, f"{path}.{field}" if path and field else path or field)
    elif value is not None:
        where = f" under {path!r}" if path else ""
        raise ModelRefused(
            f"the model returns a {type(value).__name__}{where}; expected tensors, or a tuple or dict of them"
        )


def _spec(name: str, tensor: torch.Tensor, shape: Sequence[int]) -> TensorSpec:
    datatype = DATATYPES.get(tensor.dtype)
    if datatype is None:
        raise ModelRefused(
            f"{name!r} is a tensor of {tensor.dtype}, which the Open Inference Protocol has no name for"
        )
    return TensorSpec(name, datatype, tuple(shape))


def _shapes(example: Tensors) -> str:
    return ", ".join(f"{DATATYPES.get(tensor.dtype, tensor.dtype)}{list(tensor.shape)}" for tensor in example)
