"""The fastest form in fp32 and in int8 that packing can make of a model: TorchScript or machine code."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

from quantised.compiled import both
from quantised.zoo import Ready
from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.convert.aotinductor import compile_aoti
from torchere.archiver.models.convert.exported_program import to_program
from torchere.archiver.models.inputs.run import LoadedModel, Run
from torchere.archiver.models.inputs.sizes import batch_of as free_batch
from torchere.archiver.models.measure.cost import batch_of, processor_ms
from torchere.archiver.models.measure.difference import difference, flattened
from torchere.archiver.models.quantize.methods import quantise
from torchere.archiver.quantization import INT8_DRIFT
from torchere.handlers.compiled.load import CompiledModel, load_package

BATCHES = (1, 8)
SCRIPT, OPTIMIZED, COMPILED = "TorchScript", "TorchScript, optimised", "AOTInductor"
STATIC, DYNAMIC = "int8-static", "int8-dynamic"
_LARGEST_BATCH = 64
_BUDGET_S = 4.0  # of timing, for each batch size


@dataclass(frozen=True, slots=True)
class Form:
    """One form of a model: milliseconds by batch size, and the drift of its answers."""

    name: str
    int8: bool
    ms: dict[int, float] = field(hash=False)
    drift: float

    @property
    def mean_ms(self) -> float:
        """The geometric mean over the batches."""
        return math.prod(self.ms.values()) ** (1 / len(self.ms))


def fastest(forms: list[Form], int8: bool) -> Form:
    """Return the fastest of those whose answers are accepted."""
    accepted = [one for one in forms if one.int8 == int8 and one.drift <= INT8_DRIFT]
    return min(accepted, key=lambda one: one.mean_ms)


def forms_of(model: LoadedModel, ready: Ready, script: torch.jit.ScriptModule, method: str) -> list[Form]:
    """Make every form, time them in turns, and compare their answers with the eager model's.

    Args:
        model: what is quantised.
        ready: the model and its data.
        script: int8 TorchScript, freshly loaded.
        method: by which the compiled form is quantised; with "int8-dynamic" also by "int8-static".
    """
    with tempfile.TemporaryDirectory(prefix="torchere-int8-") as folder:
        fp32 = both(ready, Path(folder))
        made: dict[tuple[str, bool], Run] = {
            (SCRIPT, False): fp32.torchscript,
            (OPTIMIZED, False): fp32.optimized,
            (COMPILED, False): fp32.aoti,
            (SCRIPT, True): script,
        }
        # As `--quantize auto` tries both: static int8 is for networks of linear layers, too.
        for one in (STATIC, DYNAMIC) if method == DYNAMIC else (method,):
            try:
                made[f"{COMPILED}, {one}", True] = _compiled(model, ready, one, Path(folder))
            except ModelRefused as refusal:
                print(f"; {COMPILED}, {one}: {refusal}", end="")
        times = _timed(list(made.values()), ready)
        return [
            Form(name, int8, ms, _drift(ready, made[name, int8]))
            for (name, int8), ms in zip(made, times, strict=True)
        ]


def _timed(models: list[Run], ready: Ready) -> list[dict[int, float]]:
    """Return the milliseconds of each model by batch size, in turns."""
    times = {size: processor_ms(models, batch_of(ready.held_out, size), _BUDGET_S) for size in BATCHES}
    return [{size: one[index] for size, one in times.items()} for index in range(len(models))]


def _compiled(model: LoadedModel, ready: Ready, method: str, folder: Path) -> CompiledModel:
    """Return the int8 model as `--format aoti` makes it."""
    graph = quantise(model, method, ready.calibration, target="aoti").module
    rows = batch_of([ready.held_out[0]], 2)
    program = to_program(graph, rows, [free_batch(rows, (1, _LARGEST_BATCH))])
    file = folder / f"{method}.pt2"
    compile_aoti(program, file, None, lambda line: print(f"; {line}", end=""), freezing=True)
    (folder / method).mkdir()
    return load_package(str(file), str(folder / method), "cpu")


def _drift(ready: Ready, model: Run) -> float:
    with torch.inference_mode():
        pairs = ((flattened(ready.module(*one)), flattened(model(*one))) for one in ready.held_out)
        return difference(pairs).drift
