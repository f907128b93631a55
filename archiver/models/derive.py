"""Derives a signature from runs of the model: on the example, and on examples of other sizes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.dynamic import BATCH, FreeSize, Tensors, batch_of, resized
from torchere.archiver.models.steps import refusing
from torchere.archiver.signature import ANY, Signature, TensorSpec

Run = Callable[..., Any]
Named = list[tuple[str, torch.Tensor]]
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
_ROW_TOLERANCE = 0.05  # of an output's largest value; int8 rounds by scales that depend on the whole batch


def input_names(module: Any, count: int) -> tuple[str, ...]:
    """Names of the first `count` inputs: the parameters of `forward`, or `input_0`, ... without such.

    `module` None is a model that keeps no names.
    """
    found: list[str] = []
    if isinstance(module, torch.jit.ScriptModule):
        schema: Any = module.forward
        found = [argument.name for argument in schema.schema.arguments[1:]]
    elif module is not None:
        parameters = inspect.signature(module.forward).parameters.values()
        plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        found = [parameter.name for parameter in parameters if parameter.kind in plain]
    if len(found) < count:
        return ("input",) if count == 1 else tuple(f"input_{index}" for index in range(count))
    return tuple(found[:count])


def run_on(run: Run, example: Tensors) -> Named:
    """Run the model without gradients; its results by name, tuples and dicts flattened.

    Raises:
        ModelRefused: it raises, or returns something other than tensors.
    """
    with refusing(f"running the model on {_shapes(example)}"), torch.no_grad():
        result = run(*example)
    found = list(_flat(result, ""))
    if not found:
        raise ModelRefused("the model returns no tensor; expected one, or a tuple or dict of them")
    return [("output" if name == "" else name, tensor) for name, tensor in found]


def signature_of(
    run: Run, example: Tensors, names: Sequence[str], sizes: Sequence[FreeSize], *, probe_batch: bool
) -> Signature:
    """The signature of what is packed; every free size in it was tried.

    Args:
        run: the model as it will be served.
        example: one tensor per input.
        names: of the inputs.
        sizes: what may vary; the model is refused when it does not follow.
        probe_batch: when `sizes` has no batch, try whether the model takes another one.

    Raises:
        ModelRefused: the model fails, or mixes rows that would come from different clients.
    """
    given = list(sizes)
    base = run_on(run, example)
    if probe_batch and not any(free.name == BATCH for free in given):
        given += _found_batch(run, example, base)
    inputs = [list(tensor.shape) for tensor in example]
    outputs = [list(tensor.shape) for _, tensor in base]
    for free in given:
        for index, dimension in free.places:
            inputs[index][dimension] = ANY
        for index, dimension in _varying(run, example, base, free):
            outputs[index][dimension] = ANY
    return Signature(
        tuple(_spec(name, t, shape) for name, t, shape in zip(names, example, inputs, strict=True)),
        tuple(_spec(name, t, shape) for (name, t), shape in zip(base, outputs, strict=True)),
    )


def _found_batch(run: Run, example: Tensors, base: Named) -> list[FreeSize]:
    """The batch, if all inputs have one and the model follows another size of it; else nothing."""
    try:
        free = batch_of(example, (1, 2**31))
        _varying(run, example, base, free)
    except ModelRefused:
        return []
    return [free]


def _varying(run: Run, example: Tensors, base: Named, free: FreeSize) -> list[tuple[int, int]]:
    """Which dimensions of the outputs go with `free`."""
    size = free.other_size(example)
    now = free.size_in(example)
    other = run_on(run, resized(example, free, size))
    found = []
    for index, ((name, small), (_, large)) in enumerate(zip(base, other, strict=True)):
        if small.dim() != large.dim():
            raise ModelRefused(
                f"the output {name!r} has another number of dimensions when {free.name} is {size}"
            )
        found += [
            (index, at) for at, (a, b) in enumerate(zip(small.shape, large.shape, strict=True)) if a != b
        ]
        if free.name == BATCH and size != now:
            _check_rows(name, small, large, now, size)
    if size == now:  # a range of one size: the batch is what it is
        found = [(index, 0) for index, (_, t) in enumerate(base) if free.name == BATCH and t.dim()]
    return found


def _check_rows(name: str, small: torch.Tensor, large: torch.Tensor, now: int, size: int) -> None:
    """The output must have a row per row of the input, and the first rows must not notice the others."""
    if small.dim() == 0 or (small.shape[0], large.shape[0]) != (now, size):
        raise ModelRefused(
            f"the output {name!r} has the shape {tuple(large.shape)} for {size} rows; expected as many rows"
        )
    rows = min(now, size)
    one, other = small[:rows].double(), large[:rows].double()
    limit = _ROW_TOLERANCE * max(float(one.abs().nan_to_num().max()), 1e-3) if one.numel() else 0.0
    if not torch.allclose(one, other, rtol=0.0, atol=limit, equal_nan=True):
        raise ModelRefused(
            f"the output {name!r} of a row depends on the other rows of the batch, which are other clients'"
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
