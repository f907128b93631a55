"""Measures whether `optimize_for_inference` speeds TorchScript up enough to justify its memory.

The optimised model can't be saved, so the server optimises it at each load; the gain is measured when the
archive is packed. Layers between convolutions may accept fewer sizes afterwards: oneDNN's `AdaptiveAvgPool2d`
needs a multiple of its output size. So models with convolutions are tried only if no dimension but the batch
is dynamic.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from torchere.archiver.models.load.torchscript import (
    has_convolutions,
    has_linear_layers,
    load_script,
    optimized,
)
from torchere.archiver.models.measure.cost import BATCH_SIZES, Samples, times_by_batch, told_times
from torchere.archiver.models.measure.difference import answers, difference
from torchere.archiver.quantization import SAME_DRIFT
from torchere.archiver.signature import ANY, Signature
from torchere.archiver.torchscript_options import TorchScriptOptions

LEAST_GAIN = 1.05  # at every batch size; less may be noise, and a second copy of the weights costs memory
_BUDGET_S = 1.5  # timing budget per batch size, for both models together


@dataclass(frozen=True, slots=True)
class Gain:
    """The measured effect of the optimisation: processor times in milliseconds, by batch size."""

    plain_ms: Mapping[int, float]
    optimized_ms: Mapping[int, float]
    drift: float  # of the optimised model's outputs from the original outputs

    @property
    def is_worthwhile(self) -> bool:
        """Whether the optimised model is faster at every batch size and gives the same outputs."""
        factors = [self.plain_ms[size] / self.optimized_ms[size] for size in self.plain_ms]
        return self.drift <= SAME_DRIFT and min(factors) >= LEAST_GAIN

    @property
    def note(self) -> str:
        """One line for the user."""
        times = told_times(self.plain_ms, self.optimized_ms)
        return f"optimize_for_inference: {times}; {'taken' if self.is_worthwhile else 'not taken'}"


def loaded(file: Path, options: TorchScriptOptions) -> torch.jit.ScriptModule:
    """Load a file that packing wrote or checked, as a server does; raise RuntimeError if the engine fails."""
    if options.optimize_for_inference:
        with contextlib.suppress(RuntimeError):  # a server serves a module as it is if the optimiser fails
            return optimized(_plain(file, options))
    return _plain(file, options)


def _plain(file: Path, options: TorchScriptOptions) -> torch.jit.ScriptModule:
    return load_script(str(file), check=False, engine=options.quantized_engine).eval()


def may_gain(module: torch.jit.ScriptModule, signature: Signature) -> bool:
    """Return whether the model can gain and would still accept all sizes of the signature."""
    if has_convolutions(module):
        return all(ANY not in spec.shape[1:] for spec in signature.inputs)
    return has_linear_layers(module)


def measured_gain(
    file: Path, samples: Samples, *, batched: bool, sizes: Sequence[int] = BATCH_SIZES
) -> Gain | None:
    """Load the file with and without optimisation, compare the outputs and time both models.

    Return None if the optimisation fails or the optimised model does not run.

    Args:
        file: TorchScript.
        samples: arguments of the model, for at least one call.
        batched: see `times_by_batch`.
        sizes: the batch sizes to time; see `batch_sizes`.
    """
    plain = loaded(file, TorchScriptOptions())
    try:
        other = optimized(_plain(file, TorchScriptOptions()))
        plain_ms, optimized_ms = times_by_batch([plain, other], samples, batched, _BUDGET_S, sizes)
        with torch.inference_mode():
            found = difference((answers(plain, one), answers(other, one)) for one in samples)
    except RuntimeError:  # the base class of all TorchScript errors; the model is packed without optimisation
        return None
    return Gain(plain_ms, optimized_ms, found.drift)
