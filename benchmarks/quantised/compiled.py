"""AOTInductor against TorchScript: the same fp32 model packed in both formats, on one thread."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quantised.zoo import Ready, Sample
from torchere.archiver.models.convert.aotinductor import compile_aoti
from torchere.archiver.models.convert.exported_program import to_program
from torchere.archiver.models.convert.optimize_gain import loaded
from torchere.archiver.models.convert.torchscript import to_torchscript
from torchere.archiver.models.fold.convolutions import folded_paddings
from torchere.archiver.models.inputs.sizes import batch_of as free_batch
from torchere.archiver.models.measure.cost import batch_of, processor_ms
from torchere.archiver.models.measure.difference import difference, flattened
from torchere.archiver.models.quantize.candidates import plain_attention
from torchere.archiver.torchscript_options import TorchScriptOptions
from torchere.handlers.compiled.load import CompiledModel, load_package

BATCHES = (1, 8)
_LARGEST_BATCH = 64
_BUDGET_S = 4.0  # of timing, for each batch size


@dataclass(frozen=True, slots=True)
class Pair:
    """One model both ways. Latencies in milliseconds by batch size."""

    title: str
    compiled: str  # how layers with weights are computed
    torchscript_ms: dict[int, float]
    optimized_ms: dict[int, float]  # TorchScript, optimised for inference while it is loaded
    aoti_ms: dict[int, float]
    drift: float  # of AOTInductor's answers from TorchScript's

    def speedup(self, batch: int) -> float:
        """How many times as fast AOTInductor is."""
        return self.torchscript_ms[batch] / self.aoti_ms[batch]


@dataclass(frozen=True)
class Both:
    """A model's forms, loaded as the server loads them."""

    torchscript: CompiledModel
    optimized: CompiledModel  # the same file
    aoti: CompiledModel
    aoti_file: Path
    compiled: str  # see Pair


def both(ready: Ready, folder: Path) -> Both:
    """Make TorchScript and AOTInductor code of the model in the folder, as `torchere archive` does."""
    example = ready.held_out[0]
    folded = folded_paddings(ready.module, example)
    module = folded.module if folded else ready.module
    with plain_attention():
        script = to_torchscript(module, example)
    saved = folder / "model.pt"
    script.save(str(saved))
    fast = loaded(saved, TorchScriptOptions(optimize_for_inference=True))
    file = folder / "model.pt2"
    rows = batch_of([example], 2)
    program = to_program(module, rows, [free_batch(rows, (1, _LARGEST_BATCH))])
    said: list[str] = []
    made = compile_aoti(program, file, None, said.append)
    print("; ".join([*said, ""]), end="", flush=True)
    compiled = load_package(str(file), str(folder), "cpu")
    templates = made.timed is not None and made.timed.templates_win
    layers = "oneDNN" if made.frozen else "templates" if templates else "MKL"
    return Both(script, fast, compiled, file, layers)


def compared(title: str, forms: Both, sample: Sample) -> Pair:
    """Time the forms in turns."""
    found = difference([(flattened(forms.torchscript(*sample)), flattened(forms.aoti(*sample)))])
    models = [forms.torchscript, forms.optimized, forms.aoti]
    times = {size: processor_ms(models, batch_of([sample], size), _BUDGET_S) for size in BATCHES}
    return Pair(
        title=title,
        compiled=forms.compiled,
        torchscript_ms={size: one[0] for size, one in times.items()},
        optimized_ms={size: one[1] for size, one in times.items()},
        aoti_ms={size: one[2] for size, one in times.items()},
        drift=found.drift,
    )
