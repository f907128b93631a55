"""Measures which int8 engine a model runs best on, and chooses one by a pure function.

PyTorch's default engine is not the fastest for every model; for one with depthwise convolutions it was
fifteen times slower than fp32. So each engine of this build is tried with exactly the bytes that go into the
archive, loaded as the server loads them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.load.torchscript import load_script, supported

# A multiple of the least drift of all engines. Some engines use one bit less of activations, which doubles
# the drift; an engine whose sums overflow is further off.
_AGREES_WITHIN = 3.0


class NoUsableEngine(ModelRefused):
    """No int8 engine of this machine runs the model and agrees with fp32."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurement of one way to run the int8 model."""

    method: str  # "int8-static", "int8-dynamic"
    engine: str
    latency_ms: float  # one sample on one thread, median; 0 when it failed
    drift: float  # of its outputs from fp32 ones, see Difference.drift; infinite when it failed
    failure: str = ""  # why it does not run

    @property
    def note(self) -> str:
        """One line for people: `onednn 7.1 ms`."""
        return f"{self.engine} {self.failure}" if self.failure else f"{self.engine} {self.latency_ms:.3g} ms"


def choose(candidates: Sequence[Measured], max_drift: float) -> Measured:
    """Return the fastest of the candidates that agree with fp32.

    A candidate agrees when its drift is at most `max_drift`, and not much more than that of the best engine
    for its method: an engine whose arithmetic overflows on this processor is not chosen, however fast. When
    none is within `max_drift`, the candidates agree that are about as good as the best: the verification that
    follows refuses the model then, or accepts it if the user insists.

    Raises:
        NoUsableEngine: no candidate runs at all.
    """
    running = [one for one in candidates if not one.failure and one.drift < float("inf")]
    if not running:
        tried = "; ".join(one.note for one in candidates) or "this build of torch has no engine for int8"
        raise NoUsableEngine(f"no int8 engine of this machine runs the model: {tried}")
    least = {one.method: min(x.drift for x in running if x.method == one.method) for one in running}
    sound = [one for one in running if one.drift <= _AGREES_WITHIN * least[one.method]]
    limit = max(max_drift, _AGREES_WITHIN * min(least.values()))
    return min((one for one in sound if one.drift <= limit), key=lambda one: one.latency_ms)


def measured(
    method: str,
    packed: bytes,
    judge: Callable[[Callable[..., Any]], float],
    time_ms: Callable[[Callable[..., Any]], float],
) -> list[Measured]:
    """Measure the saved model on each engine.

    Args:
        method: name of the method, for the records.
        packed: TorchScript with int8 weights.
        judge: returns the drift of a model from fp32.
        time_ms: returns the time that a model takes for one sample.
    """
    return [
        _measured(Measured(method, engine, 0.0, float("inf")), packed, judge, time_ms)
        for engine in supported()
    ]


def _measured(
    blank: Measured,
    packed: bytes,
    judge: Callable[[Callable[..., Any]], float],
    time_ms: Callable[[Callable[..., Any]], float],
) -> Measured:
    try:
        module = load_script(io.BytesIO(packed), check=False, engine=blank.engine)
        with torch.inference_mode():
            return replace(blank, drift=judge(module), latency_ms=time_ms(module))
    except RuntimeError as error:  # torch's error when an engine lacks an operator
        return replace(blank, failure=f"can't run it ({_reason(error)})")


def _reason(error: RuntimeError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:160]
