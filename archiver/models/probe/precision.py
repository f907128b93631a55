"""Precision of a model's arithmetic, and whether two of its results are equal within it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torchere.archiver.models.inputs.run import Named, OperatorWatch, Run, copies
from torchere.archiver.models.inputs.sizes import Tensors
from torchere.archiver.models.measure.difference import are_equal, channels_of

_ROUNDED = (torch.float16, torch.bfloat16, torch.quint8, torch.qint8, torch.qint32)
_FLOOR = 1e-3  # lower bound of an output's largest magnitude, so that tiny outputs keep a tolerance
# Magnitudes of at least 1e4 and at least 100 times an output's median are fillers (such as -1e9).
_FILLED, _TIMES = 1e4, 100


@dataclass(frozen=True, slots=True)
class Precision:
    """The tolerance between two results that should be equal.

    `scales_by_batch` marks int8 whose scales are measured at each run, over all rows of a batch: rows of much
    larger values make the others coarser than `absolute`.
    """

    relative: float  # allowed difference, relative to each value
    # The same, relative to the channel's largest value; for whole numbers, the share that may differ.
    absolute: float
    spread: float = 1.0  # lower bound of a channel's largest value, as a share of the output's largest
    scales_by_batch: bool = False

    def differs(self, wanted: torch.Tensor, found: torch.Tensor) -> bool:
        """Return whether the two differ by more than the tolerance; NaN is equal to NaN."""
        if wanted.shape != found.shape or wanted.dtype != found.dtype:
            return True
        one, other = wanted.double(), found.double()
        if not wanted.is_floating_point():
            return int((one != other).sum()) > self.absolute * one.numel()
        limit = self.absolute * self._scale(one) + self.relative * one.abs()
        return not bool((are_equal(one, other) | ((one - other).abs() <= limit)).all())

    def _scale(self, values: torch.Tensor) -> torch.Tensor:
        """Return the largest magnitude of each value's channel: boxes may be large, and scores small."""
        largest = max(largest_magnitude(values), _FLOOR)
        scale = torch.full((1,) * values.dim(), largest, dtype=torch.float64)
        for dimension in channels_of(values.dim()) if values.dim() > 1 and values.numel() else ():
            others = tuple(at for at in range(values.dim()) if at != dimension)
            scale = scale.minimum(values.abs().nan_to_num().amax(others, keepdim=True))
        return scale.clamp(min=self.spread * largest)


def largest_magnitude(values: torch.Tensor) -> float:
    """Return the largest finite magnitude, leaving out fillers such as -1e9; 0 if no value is left."""
    found = torch.unique(values[values.isfinite()].abs())  # many equal fillers count once in the median
    if not found.numel():
        return 0.0
    return float(found[found < max(_FILLED, _TIMES * float(found.median()))].max())


FINE = Precision(1e-3, 1e-4, spread=0.05)  # fp32: sums in another order
COARSE = Precision(0.05, 0.05)  # int8 and bfloat16: a value between two steps may be rounded either way
UNKNOWN = Precision(COARSE.relative, COARSE.absolute, scales_by_batch=True)
# With one scale for a whole batch, a row changes all others.
SHARED = Precision(COARSE.relative, 0.25, scales_by_batch=True)


def differing(wanted: Named, found: Named, precision: Precision) -> str | None:
    """Return the name of an output that differs; None when all are equal."""
    for index, (name, tensor) in enumerate(wanted):
        if index >= len(found) or precision.differs(tensor, found[index][1]):
            return name
    return None


def precision_of(run: Run, example: Tensors) -> Precision:
    """Derive the precision from the operators that run and their dtypes; UNKNOWN if they can't be seen."""
    if type(run).__module__.startswith("torch._inductor"):
        return UNKNOWN  # machine code, which must not be watched from Python
    watch = _Watch()
    try:
        with torch.no_grad(), watch:
            run(*copies(example))
    # Broad, because only torch's watching can fail here: the model has run on this example without it.
    except Exception:
        return UNKNOWN
    if any("dynamic" in name or "choose_qparams" in name for name in watch.operators):
        return SHARED
    quantised = any("quantize" in name for name in watch.operators)
    return COARSE if quantised or watch.rounded else FINE if watch.operators else UNKNOWN


class _Watch(OperatorWatch):
    """Records the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: set[str] = set()
        self.rounded = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.add(func.name())
        result = func(*args, **(kwargs or {}))
        self.rounded |= isinstance(result, torch.Tensor) and result.dtype in _ROUNDED
        return result
