"""Runs a model on an example, names its results, watches its operators, and finds hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.inputs.sizes import Tensors
from torchere.archiver.models.steps import refusing
from torchere.archiver.signature import Signature


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode on the CPU, with an example of its inputs and its signature.

    `module` is called with the tensors of `example` as positional arguments, and with others of the same
    signature. Not shared between threads.
    """

    module: torch.nn.Module  # may also be a torch.jit.ScriptModule
    example: Tensors  # on the CPU, one tensor per input; batches use the first dimension
    signature: Signature  # derived by running the model on the example
    source: Path  # the file or folder of the model, for messages


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


def run_on(run: Run, example: Tensors) -> Named:
    """Run the model without gradients; return its results by name, tuples and dicts flattened.

    Inputs and results are copied: the model may write into its inputs, and later into tensors it returned.

    Raises:
        ModelRefused: the model fails, or its result has a value other than a tensor that clients can receive.
    """
    with refusing(f"running the model on {shapes(example)}"), torch.no_grad():
        result = run(*copies(example))
    found = named_results(result)
    for name, tensor in found:
        check_tensor(name, tensor)
    return [(name, tensor.clone()) for name, tensor in found]


def copies(inputs: Sequence[torch.Tensor]) -> Tensors:
    """Return copies of a model's inputs, because the model may write into them (`x.sub_(mean).div_(std)`)."""
    return tuple(tensor.clone() for tensor in inputs)


def run_of_session(session: Any) -> Callable[..., Tensors]:
    """Wrap an onnxruntime session in a function of tensors, one per input; its results are on the CPU.

    The function is thread-safe, as the session is.
    """
    names = [item.name for item in session.get_inputs()]

    def run(*tensors: torch.Tensor) -> Tensors:
        arrays = {name: tensor.cpu().numpy() for name, tensor in zip(names, tensors, strict=True)}
        return tuple(map(tensor_of_result, session.run(None, arrays)))

    return run


def tensor_of_result(array: Any) -> torch.Tensor:
    """Return an array of onnxruntime as a tensor that shares its memory.

    For UINT64 onnxruntime returns NumPy's `ulonglong`, which torch does not accept as `uint64`, though both
    have 8 bytes. A view with the dtype `<u8` has the type that torch accepts.
    """
    return torch.from_numpy(array.view(array.dtype.str))


def seeded(run: Run, example: Tensors) -> Named:
    """Run the model as `run_on` does, with the same torch random seed every time."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return run_on(run, example)


def named_results(result: Any) -> Named:
    """Return the tensors of a model's result by name, tuples and dicts flattened.

    Raises:
        ModelRefused: the result has no tensor, or has values that are not tensors.
    """
    found = list(flat(result))
    if not found:
        raise ModelRefused("the model returns no tensor; expected one, or a tuple or dict of them")
    return [("output" if name == "" else name, tensor) for name, tensor in found]


def flat(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a result in order, each with the path to it; None is skipped.

    Raises:
        ModelRefused: the result has a value that is not a tensor.
    """
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from flat(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (tuple, list)):
        fields = getattr(value, "_fields", None) or [f"output_{index}" for index in range(len(value))]
        named = zip(fields, value, strict=True) if len(value) > 1 else [("", item) for item in value]
        for field, item in named:
            yield from flat(item, f"{path}.{field}" if path and field else path or field)
    elif value is not None:
        where = f" under {path!r}" if path else ""
        raise ModelRefused(
            f"the model returns a {type(value).__name__}{where}; expected tensors, or a tuple or dict of them"
        )


def check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Raise ModelRefused for a tensor that the Open Inference Protocol can't represent."""
    kinds = {
        "nested": tensor.is_nested,
        "quantised": tensor.is_quantized,
        "sparse": tensor.layout is not torch.strided,
        "meta": tensor.is_meta,
    }
    odd = next((kind for kind, holds in kinds.items() if holds), None)
    if odd is not None:
        raise ModelRefused(f"{name!r} is a {odd} tensor; expected a dense one with values")
    if tensor.dtype not in DATATYPES:
        raise ModelRefused(
            f"{name!r} is a tensor of {tensor.dtype}, which the Open Inference Protocol has no name for; "
            f"{_instead(tensor.dtype)}"
        )


def _instead(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "expected real numbers: let the model take and give torch.view_as_real of it, or a part of it"
    return f"expected one of {', '.join(DATATYPES.values())}"


def shapes(example: Tensors) -> str:
    """Return the datatypes and shapes in one line: `FP32[1, 8], INT64[1]`."""
    return ", ".join(f"{DATATYPES.get(tensor.dtype, tensor.dtype)}{list(tensor.shape)}" for tensor in example)


class OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own have no types
    """Sees each operator that runs in a `with` block: a subclass defines `__torch_dispatch__`.

    Enter it in one thread; operators of other threads are not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __init_subclass__(cls) -> None:
        """Skip torch's `__init_subclass__`, whose wrapper imports `torch._dynamo` at the first operator.

        The import takes 2 s, and again in each forked trial. The watch does not need the wrapper, even for a
        model that calls `torch.compile`: it sees the operators without it.
        """


def has_hooks(layer: torch.nn.Module) -> bool:
    """Return whether the layer has hooks, which may change its inputs or its result."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks)
