"""How exactly a model computes, and when two of its results are the same within that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchere.archiver.models.dynamic import Tensors

_ROUNDED = (torch.float16, torch.bfloat16, torch.quint8, torch.qint8, torch.qint32)
_FLOOR = 1e-3  # outputs are not looked at more closely than if their largest value were this


@dataclass(frozen=True, slots=True)
class Precision:
    """What is allowed between two results that should be equal.

    `scales_by_batch` is said of int8 whose scales are measured at each run, over all rows of a batch: rows of
    much larger values make the others coarser than `absolute`.
    """

    relative: float  # of each value
    absolute: float  # of an output's largest value
    scales_by_batch: bool = False

    def differs(self, wanted: torch.Tensor, found: torch.Tensor) -> bool:
        """Whether the two are not the same; NaN is the same as NaN."""
        if wanted.shape != found.shape or wanted.dtype != found.dtype:
            return True
        one, other = wanted.double(), found.double()
        if self is EXACT and not wanted.is_floating_point():
            return not torch.equal(one, other)
        finite = one[one.isfinite()].abs()
        limit = self.absolute * max(float(finite.max()) if finite.numel() else 0.0, _FLOOR)
        return not torch.allclose(one, other, rtol=self.relative, atol=limit, equal_nan=True)


EXACT = Precision(1e-3, 1e-4)  # fp32: sums in another order
COARSE = Precision(0.0, 0.05)  # int8 and bfloat16: a value just beside a step goes to the other side
UNSEEN = Precision(COARSE.relative, COARSE.absolute, scales_by_batch=True)


def precision_of(run: Callable[..., Any], example: Tensors) -> Precision:
    """Tell from the operators that run, and from their types; UNSEEN where they can't be seen."""
    if type(run).__module__.startswith("torch._inductor"):
        return UNSEEN  # machine code, which must not be watched from Python
    watch = _Watch()
    try:
        with torch.no_grad(), watch:
            run(*(tensor.clone() for tensor in example))
    # Broad, because watching is torch's business; the model has run on this example without.
    except Exception:
        return UNSEEN
    if any("dynamic" in name or "choose_qparams" in name for name in watch.operators):
        return UNSEEN
    quantised = any("quantize" in name for name in watch.operators)
    return COARSE if quantised or watch.rounded else EXACT if watch.operators else UNSEEN


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own have no types
    """Notes which operators run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: set[str] = set()
        self.rounded = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.add(func.name())
        result = func(*args, **(kwargs or {}))
        self.rounded |= isinstance(result, torch.Tensor) and result.dtype in _ROUNDED
        return result
