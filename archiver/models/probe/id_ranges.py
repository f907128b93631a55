"""Finds inputs that are row numbers of a table (an embedding), and the numbers that the table has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchere.archiver.models.inputs.run import Run
from torchere.archiver.models.inputs.sizes import Tensors
from torchere.archiver.signature import Signature, Values

_WHOLE = (torch.int32, torch.int64)
_LOOKUPS = ("embedding", "_embedding_bag", "_embedding_bag_forward_only")  # of aten; (table, rows, ...)


def with_id_ranges(signature: Signature, run: Run, example: Tensors) -> Signature:
    """Return the signature with the range of each input that is looked up in a table as it is.

    The model runs once on the example, unless all inputs are of other datatypes. It is left as it is where
    that fails, or where it computes the row numbers: then the server can't know which ids are too large.

    Args:
        signature: its inputs are those of `example`, in order.
        run: the model, in a form whose operators torch dispatches one by one.
        example: one tensor per input.
    """
    if not any(tensor.dtype in _WHOLE for tensor in example):
        return signature
    copies = tuple(tensor.clone() for tensor in example)
    lookups = _Lookups(copies)
    try:
        with torch.no_grad(), lookups:
            run(*copies)
    except Exception:  # a model may refuse to be watched; it has run before, so that nothing is hidden
        return signature
    inputs = [
        replace(spec, values=Values(0, rows - 1)) if (rows := lookups.rows.get(index)) else spec
        for index, spec in enumerate(signature.inputs)
    ]
    return replace(signature, inputs=tuple(inputs))


class _Lookups(TorchDispatchMode):
    """Records the rows of the smallest table that each input is looked up in."""

    def __init__(self, inputs: Tensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: dict[int, int] = {}
        self._places = {(one.data_ptr(), one.numel()): place for place, one in enumerate(inputs)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in _LOOKUPS and len(args) > 1:
            table, rows = args[:2]
            place = self._places.get((rows.data_ptr(), rows.numel()))
            if place is not None:
                self.rows[place] = min(len(table), self.rows.get(place, len(table)))
        return func(*args, **(kwargs or {}))
