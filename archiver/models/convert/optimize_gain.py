"""Whether TorchScript is faster when it is made for the processor (`optimized.py`), and worth its memory.

The result can't be saved, so that it is made at each load; what it gains is measured when the archive is
packed. Layers between convolutions may take fewer sizes then: `AdaptiveAvgPool2d` of oneDNN wants a multiple
of its output. So models with convolutions are tried only where nothing but the batch varies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from torchere.archiver.models.load.engines import rebuilt_file
from torchere.archiver.models.load.torchscript import has_convolutions, has_linear_layers, optimized
from torchere.archiver.models.measure.cost import Samples, batches_of, medians_ms, one_thread
from torchere.archiver.models.measure.difference import answers, difference
from torchere.archiver.signature import ANY, Signature
from torchere.archiver.torchscript_options import TorchScriptOptions

MAX_DRIFT = 1e-3  # from the model as it is; only the order of sums is another
LEAST_GAIN = 1.05  # at every batch size: less is noise, and the second copy of the weights costs memory
_BUDGET_S = 1.5  # of timing, for each batch size and both ways


@dataclass(frozen=True, slots=True)
class Gain:
    """What optimising brought. Latencies in milliseconds, by batch size."""

    plain_ms: Mapping[int, float]
    optimized_ms: Mapping[int, float]
    drift: float  # of the optimised model's answers

    @property
    def is_worthwhile(self) -> bool:
        """Whether it is faster throughout, and answers the same."""
        factors = [self.plain_ms[size] / self.optimized_ms[size] for size in self.plain_ms]
        return self.drift <= MAX_DRIFT and min(factors) >= LEAST_GAIN

    @property
    def note(self) -> str:
        """For people."""
        times = ", ".join(
            f"{self.plain_ms[size]:.3g} -> {self.optimized_ms[size]:.3g} ms for a batch of {size}"
            for size in self.plain_ms
        )
        return f"optimize_for_inference: {times}; {'taken' if self.is_worthwhile else 'not taken'}"


def loaded(file: Path, options: TorchScriptOptions) -> torch.jit.ScriptModule:
    """Load a file onto the CPU as a server does; RuntimeError when an engine or the optimiser can't."""
    module = rebuilt_file(file, options.quantized_engine)
    return optimized(module.eval()) if options.optimize_for_inference else module


def may_gain(module: torch.jit.ScriptModule, signature: Signature) -> bool:
    """Whether there is anything to gain, and it takes all the sizes then that the signature promises."""
    if has_convolutions(module):
        return all(ANY not in spec.shape[1:] for spec in signature.inputs)
    return has_linear_layers(module)


def measured_gain(file: Path, samples: Samples, *, batched: bool) -> Gain | None:
    """Load the file both ways, compare and time them; None when it can't be optimised or does not run so.

    Args:
        file: TorchScript.
        samples: arguments of the model, at least one.
        batched: see `verify`.
    """
    plain = loaded(file, TorchScriptOptions())
    try:
        other = loaded(file, TorchScriptOptions(optimize_for_inference=True))
        with torch.inference_mode():
            found = difference((answers(plain, one), answers(other, one)) for one in samples)
        with one_thread():
            times = {
                size: medians_ms([plain, other], batch, _BUDGET_S)
                for size, batch in batches_of(samples, batched).items()
            }
    except RuntimeError:  # of which all of TorchScript's are: the model is fine as it is
        return None
    plain_ms = {size: pair[0] for size, pair in times.items()}
    return Gain(plain_ms, {size: pair[1] for size, pair in times.items()}, found.drift)
