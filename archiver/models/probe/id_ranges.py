"""Finds inputs that are indices into an embedding table, and the number of rows of the table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.inputs.run import OperatorWatch, Run, copies, shapes
from torchere.archiver.models.inputs.sizes import Tensors, without_ones
from torchere.archiver.models.probe.isolation import ModelEndedProcess, isolated
from torchere.archiver.models.steps import Say, silent
from torchere.archiver.signature import Signature, Values

_WHOLE = (torch.int32, torch.int64)
# Operators of `aten`; their first arguments are the table and the rows to look up.
_LOOKUPS = ("embedding", "_embedding_bag", "_embedding_bag_forward_only")
_FAILED = "failed"


def with_id_ranges(signature: Signature, run: Run, example: Tensors) -> Signature:
    """Return the signature with the range of each input whose values index an embedding table unchanged.

    The model runs once on the example and, in a child process, on ids outside of each range, which it has to
    refuse. It does not run if no input is int32 or int64. An input gets no range, so that the server does not
    check its ids, if the model computes the indices, takes an id outside of the table, or fails while it is
    watched.

    Args:
        signature: its inputs are those of `example`, in order.
        run: the model, in a form whose operators torch dispatches one by one.
        example: one tensor per input.
    """
    if not any(tensor.dtype in _WHOLE for tensor in example):
        return signature
    # Free sizes of 1 are doubled, so that a slice of an input is smaller than the input.
    given = copies(tuple(map(without_ones, example, signature.inputs)))
    found = {place: rows for place, rows in _rows_of(run, given).items() if _refuses(run, given, place, rows)}
    inputs = [
        replace(spec, values=Values(0, found[place] - 1)) if place in found else spec
        for place, spec in enumerate(signature.inputs)
    ]
    return replace(signature, inputs=tuple(inputs))


def _rows_of(run: Run, given: Tensors) -> dict[int, int]:
    """Return the number of rows of the smallest table that each input indexes, by the input's place."""
    lookups = _Lookups(given)
    try:
        with torch.no_grad(), lookups:
            run(*given)
    except Exception:  # watching may break a model; its own errors showed in earlier runs
        return {}
    return lookups.rows


def _refuses(run: Run, given: Tensors, place: int, rows: int) -> bool:
    """Return whether the model fails on ids outside of the table.

    A model that clamps ids in place, or takes another branch for large ones, does not fail.
    """
    outside = (rows, -1, torch.iinfo(given[place].dtype).max)

    def work(tell: Say, _say: Say) -> str:
        for number in outside:
            tensors = copies(given)
            tensors[place].view(-1)[-1:] = number
            tell(shapes(given))
            try:
                with torch.no_grad():
                    run(*tensors)
            except Exception:  # the model refuses the id
                continue
            return f"takes {number}"
        return _FAILED

    try:
        return isolated(work, silent) == _FAILED
    except ModelEndedProcess:  # a crash counts as a failure, too
        return True
    except ModelRefused:
        return False


class _Lookups(OperatorWatch):
    """Records the number of rows of the smallest table that each input indexes."""

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
