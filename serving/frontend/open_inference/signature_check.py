"""Validation of a request's tensors against the model's signature. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from torchere.archiver.signature import ANY, Signature, TensorSpec
from torchere.handlers.tensors import shown
from torchere.serving.errors import InvalidRequest
from torchere.serving.frontend.open_inference.tensor_request import InputTensor, TensorRequest


def check_signature(request: TensorRequest, signature: Signature) -> None:
    """Refuse a request that does not match the signature, before it takes a place in a batch.

    Raises:
        InvalidRequest: an input is missing, unknown, or of another datatype or shape; or a requested output
            does not exist. The text names the field.
    """
    specs = {spec.name: spec for spec in signature.inputs}
    for index, tensor in enumerate(request.inputs):
        _check_input(f"inputs[{index}]", tensor, specs)
    given = {tensor.name for tensor in request.inputs}
    missing = [name for name in specs if name not in given]
    if missing:
        found = ", ".join(map(shown, sorted(given))) or "none"
        raise InvalidRequest(f"inputs: found {found}, expected {', '.join(map(shown, missing))} too")
    _check_batches(request, signature)
    known = [spec.name for spec in signature.outputs]
    for index, output in enumerate(request.outputs):
        if output.name not in known:
            raise InvalidRequest(
                f"outputs[{index}].name: found {shown(output.name)}, expected {_one_of(known)}"
            )


def _check_input(where: str, tensor: InputTensor, specs: dict[str, TensorSpec]) -> None:
    spec = specs.get(tensor.name)
    if spec is None:
        raise InvalidRequest(f"{where}.name: found {shown(tensor.name)}, expected {_one_of(list(specs))}")
    if tensor.datatype.name != spec.datatype:
        raise InvalidRequest(f"{where}.datatype: found {tensor.datatype.name}, expected {spec.datatype}")
    if len(tensor.shape) != len(spec.shape) or any(
        wanted not in (ANY, size) for size, wanted in zip(tensor.shape, spec.shape, strict=True)
    ):
        raise InvalidRequest(
            f"{where}.shape: found {shown(tensor.shape)}, expected {shown(spec.shape)} (-1 is any size)"
        )


def _check_batches(request: TensorRequest, signature: Signature) -> None:
    """Check that all inputs have the same number of rows, if the model has a batch dimension."""
    if not signature.batched:
        return
    rows = [tensor.shape[0] for tensor in request.inputs]
    for index, count in enumerate(rows):
        if count != rows[0]:
            raise InvalidRequest(
                f"inputs[{index}].shape[0]: found {count}, expected {rows[0]} rows as inputs[0] has"
            )


def _one_of(names: Sequence[str]) -> str:
    return f"one of {', '.join(map(shown, names[:20]))}"
