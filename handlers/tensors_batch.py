"""Joins the examples of several requests into model inputs, and checks the model's results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchere.archiver.signature import Signature


@dataclass(frozen=True, slots=True)
class Member:
    """The rows of one request in a group: `rows` rows from `start`."""

    place: int  # index of the request in the batch
    start: int
    rows: int


@dataclass(frozen=True, slots=True)
class Group:
    """Requests that run through the model together; `inputs` are torch tensors on the CPU."""

    members: tuple[Member, ...]
    inputs: tuple[torch.Tensor, ...]


def grouped(examples: Sequence[tuple[int, list[Any]]], batched: bool) -> list[Group]:
    """Group the examples whose inputs differ only in the number of rows, in order of arrival.

    Args:
        examples: (index of the request, its tensors in the signature's order, batch dimension included).
        batched: whether rows of several requests can go together; otherwise each request is its own group.
    """
    alike: dict[object, list[tuple[int, list[Any]]]] = {}
    for place, tensors in examples:
        key = tuple(tuple(tensor.shape[1:]) for tensor in tensors) if batched else place
        alike.setdefault(key, []).append((place, tensors))
    return [_group(items, batched) for items in alike.values()]


def whole_group(inputs: Sequence[Any]) -> Group:
    """Return the group of requests with one row each, from `inputs` that hold all the rows."""
    members = tuple(Member(place, place, 1) for place in range(len(inputs[0])))
    return Group(members, tuple(_joined([tensor]) for tensor in inputs))


def flattened(result: Any) -> list[torch.Tensor]:
    """Return the tensors of a model's result in order; tuples, lists and dict values are flattened.

    None is left out: models return it for values that they did not compute.

    Raises:
        TypeError: an item is not a tensor, or is a sparse or quantised one.
    """
    if isinstance(result, torch.Tensor):
        if result.layout is not torch.strided or result.is_quantized:
            kind = "quantised" if result.is_quantized else str(result.layout)
            raise TypeError(
                f"the model gave a {kind} tensor; expected dense ones: call dequantize() or to_dense() in it"
            )
        return [result]
    if result is None:
        return []
    if isinstance(result, Mapping):
        result = list(result.values())
    if isinstance(result, (tuple, list)):
        return [tensor for item in result for tensor in flattened(item)]
    raise TypeError(f"the model gave a {type(result).__name__}; expected tensors, or tuples or dicts of them")


def check_results(results: Sequence[torch.Tensor], group: Group, signature: Signature) -> None:
    """Check results against the signature; a mismatch would send answers to the wrong clients.

    Raises:
        ValueError: the number of results, or the number of rows in a result, is wrong.
    """
    if len(results) != len(signature.outputs):
        raise ValueError(
            f"the model gave {len(results)} results; signature.json names {len(signature.outputs)} outputs"
        )
    if not signature.batched:
        return
    rows = sum(member.rows for member in group.members)
    for spec, result in zip(signature.outputs, results, strict=True):
        if result.ndim == 0 or result.shape[0] != rows:
            raise ValueError(
                f"the model gave {spec.name!r} with the shape {list(result.shape)} for {rows} rows; "
                "signature.json says that its first dimension is the batch"
            )


def _group(items: Sequence[tuple[int, list[Any]]], batched: bool) -> Group:
    members = []
    start = 0
    for place, tensors in items:
        rows = len(tensors[0]) if batched else 1
        members.append(Member(place, start, rows))
        start += rows
    columns = zip(*(tensors for _, tensors in items), strict=True)
    return Group(tuple(members), tuple(_joined(column) for column in columns))


def _joined(parts: Sequence[Any]) -> torch.Tensor:
    if isinstance(parts[0], torch.Tensor):
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))
    array = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if not array.flags.writeable or not array.flags.c_contiguous:
        # torch warns about read-only arrays, and rejects negative strides.
        array = np.array(array, order="C")
    # numpy sets arbitrary strides for dimensions of 0 or 1; some operators and compiled code reject them.
    return torch.from_numpy(array.reshape(-1)).view(array.shape)
