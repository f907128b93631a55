"""One model in fp32 and in int8, both as frozen TorchScript, on one thread."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantised.fastest import BATCHES, Form, fastest, forms_of
from quantised.zoo import Ready, Sample, Subject
from torchere.archiver.models.convert.torchscript import to_torchscript
from torchere.archiver.models.inputs.run import LoadedModel
from torchere.archiver.models.load.torchscript import load_script, saved
from torchere.archiver.models.measure.cost import batch_of, processor_ms
from torchere.archiver.models.measure.difference import difference, flattened
from torchere.archiver.models.quantize.candidates import plain_attention
from torchere.archiver.models.quantize.methods import quantise
from torchere.archiver.signature import Signature, TensorSpec

_BUDGET_S = 2.0  # of timing, for each batch size


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
    kept: tuple[str, ...] = ()  # layers that went back to fp32
    forms: tuple[Form, ...] = ()  # every form that packing makes, in fp32 and int8
    trained: bool = True  # weights are, so that its first class means something

    @classmethod
    def read(cls, kept: dict[str, Any]) -> Row:
        """Return the row that `dataclasses.asdict` and JSON made this of."""
        forms = tuple(Form(**{**one, "ms": _by_batch(one["ms"])}) for one in kept["forms"])
        times = {name: _by_batch(kept[name]) for name in ("fp32_ms", "int8_ms")}
        return cls(**{**kept, **times, "forms": forms, "kept": tuple(kept["kept"])})

    def speedup(self, batch: int) -> float:
        """How many times as fast int8 is."""
        return self.fp32_ms[batch] / self.int8_ms[batch]

    def beyond_fastest(self, batch: int) -> float:
        """How many times as fast the fastest int8 form is as the fastest one in fp32."""
        fp32, int8 = (fastest(list(self.forms), quantised) for quantised in (False, True))
        return fp32.ms[batch] / int8.ms[batch]

    @property
    def smaller(self) -> float:
        """How many times as small the file is."""
        return self.fp32_bytes / self.int8_bytes


def measured(subject: Subject) -> Row:
    """Quantise the subject and compare; raises Unavailable when it can't be made here."""
    ready = subject.make()
    example = ready.held_out[0]
    with plain_attention():
        fp32 = to_torchscript(ready.module, example)
    model = _loaded(ready, example)
    made = quantise(model, subject.method, ready.calibration)
    if not isinstance(made.module, torch.jit.ScriptModule):
        raise TypeError(f"{subject.title} became a {type(made.module).__name__}; expected TorchScript")
    with torch.inference_mode():
        found = difference((flattened(fp32(*one)), flattened(made.module(*one))) for one in ready.held_out)
    models = [fp32, made.module]
    times = {size: processor_ms(models, batch_of(ready.held_out, size), _BUDGET_S) for size in BATCHES}
    fresh = load_script(io.BytesIO(saved(made.module)), check=False, engine=str(made.engine))
    forms = forms_of(model, ready, fresh, subject.method)
    return Row(
        title=subject.title,
        data=ready.data,
        method=subject.method,
        engine=str(made.engine),
        fp32_ms={size: one[0] for size, one in times.items()},
        int8_ms={size: one[1] for size, one in times.items()},
        fp32_bytes=len(saved(fp32)),
        int8_bytes=len(saved(made.module)),
        drift=found.drift,
        cosine=found.cosine,
        top1=found.top1 if ready.classes else None,
        engines=", ".join(one.note for one in made.measured),
        kept=made.kept,
        forms=tuple(forms),
        trained=ready.trained,
    )


def _by_batch(times: dict[str, float]) -> dict[int, float]:
    return {int(batch): ms for batch, ms in times.items()}


def geometric_mean(values: Sequence[float]) -> float:
    """The mean that suits ratios."""
    return math.exp(sum(math.log(value) for value in values) / len(values))


def _loaded(ready: Ready, example: Sample) -> LoadedModel:
    """The seam's record; of the signature only that there are batches counts here."""
    inputs = tuple(TensorSpec(f"in{i}", "FP32", (-1, *t.shape[1:])) for i, t in enumerate(example))
    signature = Signature(inputs, (TensorSpec("output", "FP32", (-1, -1)),))
    return LoadedModel(ready.module, example, signature, Path("benchmark"))
