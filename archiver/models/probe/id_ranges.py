"""Finds inputs that are row numbers of a table (an embedding), and the numbers that the table has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.inputs.run import Run, shapes
from torchere.archiver.models.inputs.sizes import Tensors
from torchere.archiver.models.operators import OperatorWatch
from torchere.archiver.models.probe.isolation import ModelEndedProcess, isolated
from torchere.archiver.models.steps import Say, silent
from torchere.archiver.signature import ANY, Signature, TensorSpec, Values

_WHOLE = (torch.int32, torch.int64)
_LOOKUPS = ("embedding", "_embedding_bag", "_embedding_bag_forward_only")  # of aten; (table, rows, ...)
_FAILED = "failed"


def with_id_ranges(signature: Signature, run: Run, example: Tensors) -> Signature:
    """Return the signature with the range of each input that is looked up in a table as it is.

    The model runs once on the example, and on numbers outside of each range, which it has to refuse; the
    latter in a child process. It does not run if all inputs are of other datatypes. An input has no range
    where the model computes the row numbers, takes a number outside of the table, or fails while it is
    watched: then the server can't know which ids are too large.

    Args:
        signature: its inputs are those of `example`, in order.
        run: the model, in a form whose operators torch dispatches one by one.
        example: one tensor per input.
    """
    if not any(tensor.dtype in _WHOLE for tensor in example):
        return signature
    given = tuple(map(_without_ones, example, signature.inputs))
    found = {place: rows for place, rows in _rows_of(run, given).items() if _refuses(run, given, place, rows)}
    inputs = [
        replace(spec, values=Values(0, found[place] - 1)) if place in found else spec
        for place, spec in enumerate(signature.inputs)
    ]
    return replace(signature, inputs=tuple(inputs))


def _without_ones(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return a copy whose free dimensions of size 1 have size 2: a part of the input is then no whole one."""
    for dimension, wanted in enumerate(spec.shape):
        if wanted == ANY and tensor.shape[dimension] == 1:
            tensor = tensor.repeat_interleave(2, dimension)
    return tensor.clone()


def _rows_of(run: Run, given: Tensors) -> dict[int, int]:
    """Return the rows of the smallest table that each input is looked up in, by the input's place."""
    lookups = _Lookups(given)
    try:
        with torch.no_grad(), lookups:
            run(*given)
    except Exception:  # a model may refuse to be watched; it has run before, so that nothing is hidden
        return {}
    return lookups.rows


def _refuses(run: Run, given: Tensors, place: int, rows: int) -> bool:
    """Return whether the model fails on numbers outside of the table.

    It does not if it limits the numbers in place, or takes another branch for large ones.
    """
    outside = (rows, -1, torch.iinfo(given[place].dtype).max)

    def work(tell: Say, _say: Say) -> str:
        for number in outside:
            tensors = [tensor.clone() for tensor in given]
            tensors[place].view(-1)[-1:] = number
            tell(shapes(given))
            try:
                with torch.no_grad():
                    run(*tensors)
            except Exception:  # what is looked for
                continue
            return f"takes {number}"
        return _FAILED

    try:
        return isolated(work, silent) == _FAILED
    except ModelEndedProcess:  # worse than an error
        return True
    except ModelRefused:
        return False


class _Lookups(OperatorWatch):
    """Records the rows of the smallest table that each input is looked up in."""

    def __init__(self, inputs: Tensors) -> None:
        super().__init__()
        self.rows: dict[int, int] = {}
        self._places = {(one.data_ptr(), one.numel()): place for place, one in enumerate(inputs)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in _LOOKUPS and len(args) > 1:
            table, rows = args[:2]
            place = self._places.get((rows.data_ptr(), rows.numel()))
            if place is not None:
                self.rows[place] = min(len(table), self.rows.get(place, len(table)))
        return func(*args, **(kwargs or {}))
