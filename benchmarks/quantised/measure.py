"""One model in fp32 and in int8, both as frozen TorchScript, on one thread."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from quantised.zoo import Ready, Sample, Subject
from torchere.archiver.models.dynamic import batch_of as free_batch
from torchere.archiver.models.engines import saved
from torchere.archiver.models.loaded import LoadedModel
from torchere.archiver.models.quantise import quantise
from torchere.archiver.models.quantise_traced import plain_attention, traced
from torchere.archiver.models.to_aoti import compile_aoti, load_aoti
from torchere.archiver.models.to_program import to_program
from torchere.archiver.models.verify import MAX_DRIFT, verify
from torchere.archiver.models.verify_timing import batch_of, medians_ms, one_thread
from torchere.archiver.signature import Signature, TensorSpec

BATCHES = (1, 8)
_BUDGET_S = 1.0


@dataclass(frozen=True, slots=True)
class Row:
    """What one model came to. Latencies in milliseconds by batch size."""

    title: str
    data: str
    method: str
    engine: str
    fp32_ms: dict[int, float]
    int8_ms: dict[int, float]
    fp32_bytes: int
    int8_bytes: int
    drift: float
    cosine: float | None
    top1: float | None
    engines: str  # every engine with its time
    aoti_ms: dict[int, float] | None = None  # fp32, compiled ahead of time
    aoti_fp32_ms: dict[int, float] | None = None  # TorchScript, in turns with it

    def speedup(self, batch: int) -> float:
        """How many times as fast int8 is."""
        return self.fp32_ms[batch] / self.int8_ms[batch]

    @property
    def smaller(self) -> float:
        """How many times as small the file is."""
        return self.fp32_bytes / self.int8_bytes


def measured(subject: Subject, aoti: bool) -> Row:
    """Quantise the subject and compare; raises Unavailable when it can't be made here."""
    ready = subject.make()
    example = ready.held_out[0]
    with plain_attention():
        fp32 = traced(ready.module, example)
    made = quantise(_loaded(ready, example), subject.method, ready.calibration)
    report = verify(fp32, made.module, ready.held_out, max_drift=MAX_DRIFT["int8"])
    compiled = _compiled(ready, fp32, example) if aoti else (None, None)
    return Row(
        title=subject.title,
        data=ready.data,
        method=made.method,
        engine=str(made.engine),
        fp32_ms=dict(report.original.latency_ms),
        int8_ms=dict(report.packed.latency_ms),
        fp32_bytes=len(saved(fp32)),
        int8_bytes=len(saved(made.module)) if isinstance(made.module, torch.jit.ScriptModule) else 0,
        drift=report.difference.drift,
        cosine=report.difference.cosine,
        top1=report.difference.top1 if ready.classes else None,
        engines=", ".join(
            one.note if subject.method == one.method else f"{one.method.removeprefix('int8-')} {one.note}"
            for one in made.measured
        ),
        aoti_ms=compiled[0],
        aoti_fp32_ms=compiled[1],
    )


def geometric_mean(values: Sequence[float]) -> float:
    """The mean that suits ratios."""
    return math.exp(sum(math.log(value) for value in values) / len(values))


def _loaded(ready: Ready, example: Sample) -> LoadedModel:
    """The seam's record; of the signature only that there are batches counts here."""
    inputs = tuple(TensorSpec(f"in{i}", "FP32", (-1, *t.shape[1:])) for i, t in enumerate(example))
    signature = Signature(inputs, (TensorSpec("output", "FP32", (-1, -1)),))
    return LoadedModel(ready.module, example, signature, "eager", Path("benchmark"))


def _compiled(
    ready: Ready, fp32: torch.jit.ScriptModule, example: Sample
) -> tuple[dict[int, float], dict[int, float]]:
    """Times of AOTInductor and of TorchScript, taken in turns."""
    rows = batch_of([example], 2)
    program = to_program(ready.module, rows, [free_batch(rows, (1, 64))])
    with tempfile.TemporaryDirectory(prefix="torchere-aoti-") as folder:
        path = Path(folder, "model.pt2")
        compile_aoti(program, path, None, freezing=True)
        model = load_aoti(path)
        with one_thread():
            times = {
                size: medians_ms([model, fp32], batch_of([example], size), _BUDGET_S) for size in BATCHES
            }
    return {size: one[0] for size, one in times.items()}, {size: one[1] for size, one in times.items()}
