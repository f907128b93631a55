"""Comparison of the packed model with the original: outputs, latency, size. On by default."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.inputs.buffers import is_same, unchanged_buffers
from torchere.archiver.models.inputs.run import DATATYPES, Run, shapes
from torchere.archiver.models.inputs.sizes import FreeSize, Tensors
from torchere.archiver.models.measure.cost import (
    BATCH_SIZES,
    Samples,
    fewer_threads_when_busy,
    times_by_batch,
)
from torchere.archiver.models.measure.difference import answers, difference
from torchere.archiver.models.probe.free_sizes import examples_of_size
from torchere.archiver.models.probe.isolation import ModelEndedProcess, isolated
from torchere.archiver.models.steps import Say, counted, silent
from torchere.archiver.models.verify.memory import resident_bytes
from torchere.archiver.models.verify.report import Report, Side, this_machine
from torchere.archiver.torchscript_options import TorchScriptOptions

_BUDGET_S = 1.5  # timing budget per batch size, for all models together
_PLAINLY = TorchScriptOptions()  # no option is set


@fewer_threads_when_busy()
def verify(
    original: Run,
    packed: Run,
    samples: Samples,
    *,
    max_drift: float,
    batched: bool = True,
    sizes: Sequence[int] = BATCH_SIZES,
    names: tuple[str, str] = ("original", "packed"),
    files: tuple[Path | None, Path | None] = (None, None),
    load: TorchScriptOptions = _PLAINLY,
    notes: Sequence[str] = (),
    fp32: Run | None = None,
    timed: Samples = (),
    say: Say = silent,
) -> Report:
    """Time both models in turns, and compare their outputs on the samples.

    Not thread-safe: it sets torch's number of threads. It does not check the drift; see `refuse_drift`.
    The models are timed before the comparison, the smallest batch first: the first runs decide their speed.

    Args:
        original: takes the tensors of a sample as positional arguments.
        packed: called likewise; freshly loaded as the server will load it.
        samples: at least one.
        max_drift: the largest drift at which the report is accepted. See `max_drift_of`.
        batched: see `times_by_batch`.
        sizes: the batch sizes to time; see `batch_sizes`.
        names: the names of both models, for the table.
        files: the files of both models, whose sizes are reported.
        load: the load options of the packed file.
        notes: how the packed model was made, for the JSON.
        fp32: the fastest form in fp32 that packing would make instead, freshly loaded; timed, not compared.
        timed: inputs to time the models with, instead of `samples`.
        say: takes a line about progress now and then.

    Raises:
        ModelRefused: there are no samples, or the outputs differ in number or shape.
    """
    watched = Original(original, samples)
    with _as_before(models := [original, packed, *([fp32] if fp32 else [])]):
        times = times_by_batch(models, timed or samples, batched, _BUDGET_S, sizes)
    with torch.inference_mode():
        found = difference(counted(watched.beside(packed), len(samples), "samples compared", say))
        doubts = watched.doubts()
    sizes_bytes = [file.stat().st_size if file else None for file in files]
    return Report(
        original=Side(names[0], sizes_bytes[0], None, times[0]),
        packed=Side(names[1], sizes_bytes[1], None, times[1]),
        difference=found,
        max_drift=max_drift,
        samples=len(samples),
        machine=this_machine(),
        engine=load.quantized_engine,
        optimized=load.optimize_for_inference,
        notes=tuple(notes),
        doubts=doubts,
        fp32=Side("fp32", None, None, times[2]) if fp32 else None,
    )


@contextlib.contextmanager
def _as_before(models: Sequence[Run]) -> Iterator[None]:
    """Restore the buffers at block exit, so that models that keep state are compared from the same state."""
    with contextlib.ExitStack() as stack:
        for model in models:
            if isinstance(model, torch.nn.Module):
                stack.enter_context(unchanged_buffers(model))
        yield


def with_memory(
    report: Report,
    files: tuple[Path | None, Path | None],
    loads: tuple[TorchScriptOptions, TorchScriptOptions],
    sample: Tensors,
) -> Report:
    """Add the memory that each TorchScript file of the two takes, measured in a process of its own."""
    original, packed = resident_bytes(files, loads, sample)
    return replace(
        report,
        original=replace(report.original, memory_bytes=original),
        packed=replace(report.packed, memory_bytes=packed),
    )


def refuse_drift(report: Report, quantised: bool = True) -> None:
    """Raise ModelRefused unless the report is accepted; the message gives the drift and the reason.

    Args:
        report: the report on the packed model.
        quantised: whether the packed model is quantised; if not, the message advises on the format.
    """
    if not report.accepted:
        raise ModelRefused(f"{reason_of(report, quantised)}; --accept-drift packs it all the same")


def refuse_other_sizes(
    original: Run,
    packed: Run,
    example: Tensors,
    sizes: Sequence[FreeSize],
    max_drift: float,
    *,
    quantised: bool = True,
) -> None:
    """Raise ModelRefused when the packed model's answers differ at sizes other than those of the example.

    A compiler may have fixed a size that is declared free, such as the number of steps of an unrolled loop,
    even if the outputs have the right shapes. In static int8, values that grow with a size leave the ranges
    of the samples. Sizes that the original does not accept are skipped. Both models get the same random
    numbers. `quantised` chooses the advice, as in `refuse_drift`.
    """

    def work(tell: Say, _say: Say) -> str:
        for free, size in [(one, size) for one in sizes for size in one.sizes_to_compare(example)]:
            given = next(examples_of_size(example, free, size))
            tell(shapes(given))
            with torch.inference_mode(), torch.random.fork_rng(devices=()):
                try:
                    pair = _seeded(original, given), _seeded(packed, given)
                except RuntimeError:  # `signature_of` tries these sizes, too, and raises the error
                    continue
                found = difference([pair])
            if not found.undefined and found.drift > max_drift:
                return (
                    f"answers differently when {free.name} is {size}: drift {found.drift:.3g}"
                    f"{_worst(*pair)}, expected at most {max_drift:.3g}"
                )
        return ""

    try:
        refusal = isolated(work, silent) if sizes else ""
    except ModelEndedProcess:
        return  # see above
    if not refusal:
        return
    if quantised:  # a form in fp32 is compared with the original at the example's sizes when it is made
        raise ModelRefused(
            f"the quantised model {refusal}; narrow --dynamic, calibrate with --samples of all its sizes, "
            "take another --quantize, or allow more by --max-drift; --accept-drift packs it all the same"
        )
    raise ModelRefused(
        f"the packed model is right for the example, and {refusal}; take --format torchscript --script, "
        "which keeps loops over a size, or leave --dynamic out"
    )


def _worst(wanted: Tensors, found: Tensors) -> str:
    """Name the output of several that drifts most, with its datatype: small errors can exchange indices."""
    if len(wanted) == 1:
        return ""
    drifts = [difference([((one,), (other,))]).drift for one, other in zip(wanted, found, strict=True)]
    worst = drifts.index(max(drifts))
    kind = wanted[worst].dtype
    return f" in output {worst} ({DATATYPES.get(kind, kind)})"


def _seeded(run: Run, given: Tensors) -> Tensors:
    torch.manual_seed(0)
    return answers(run, given)


def reason_of(report: Report, quantised: bool = True) -> str:
    """Return why a report is not accepted, with advice; see `refuse_drift`."""
    found = report.difference
    names = f"the {report.packed.name} model", f"the {report.original.name} one"
    if found.undefined:
        return (
            f"the {report.original.name} model answers with nothing but not-a-number, so that nothing can be "
            "compared with it; look for NaN in the weights and in the samples"
        )
    off = f"drift {found.drift:.3g}, expected at most {report.max_drift:.3g}"
    if report.doubts:
        return f"{names[0]} answers too differently from {names[1]}: {off}; {'; '.join(report.doubts)}"
    advice = "take another --quantize" if quantised else "take another --format"
    calibrate = "calibrate with more samples {}, " if quantised else ""
    if found.drift <= report.max_drift and not found.silenced and found.channel:
        return (
            f"{names[0]} answers too differently from {names[1]} in one output: "
            f"{found.channel.note}, which counts as {found.channel.beyond_chance:.2g}, expected at most "
            f"{report.max_channel_drift:.2g}; "
            f"{calibrate.format('in which it varies')}{advice}, or allow more by --max-drift"
        )
    if found.drift <= report.max_drift:
        apart = "give outputs of such different sizes apart instead of joined, or " if quantised else ""
        return (
            f"{names[0]} has lost outputs of {names[1]}: {'; '.join(one.note for one in found.silenced)}; "
            f"{apart}{advice}"
        )
    return (
        f"{names[0]} answers too differently from {names[1]}: {off} (largest difference "
        f"{found.largest_abs:.3g}); {calibrate.format('that are like real requests')}{advice}, or allow more "
        "by --max-drift"
    )


_UNSTEADY = 1e-4  # accepted drift between two runs of one model; threads may add in another order


class Original:
    """The original model and its samples. Call it in inference mode. Not thread-safe."""

    def __init__(self, run: Run, samples: Samples) -> None:
        if not samples:
            raise ModelRefused("there are no samples to verify the packed model on; give at least one")
        self._run, self._samples = run, samples
        self._first: Tensors | None = None
        self._constant = self._empty = True

    def beside(self, packed: Run) -> Iterator[tuple[Tensors, Tensors]]:
        """Yield the outputs of both models for each sample."""
        for sample in self._samples:
            wanted = answers(self._run, sample)
            self._first = self._first or wanted
            self._empty = self._empty and not any(one.numel() for one in wanted)
            self._constant = self._constant and _alike(self._first, wanted)
            yield wanted, answers(packed, sample)

    def doubts(self) -> tuple[str, ...]:
        """Return the reasons why the comparison is not meaningful; call it after `beside` is exhausted."""
        found = []
        if self._first is not None:
            again = answers(self._run, self._samples[0])
            if (off := difference([(self._first, again)]).drift) > _UNSTEADY:
                found.append(
                    f"the original itself drifts by {off:.3g} between two runs on one input: something in it "
                    "is random (F.dropout without training=self.training, noise), or it keeps state"
                )
        if self._empty:
            found.append(
                "the original gives nothing for these samples, so that nothing was compared: give --samples "
                "in which it finds something"
            )
            return tuple(found)
        differ = any(not _alike(self._samples[0], sample) for sample in self._samples)
        if differ and self._constant:
            found.append(
                "the original gives the same answer to samples that differ, so that they show little: are "
                "these its weights, and are the samples like real requests?"
            )
        return tuple(found)


def _alike(one: Tensors, other: Tensors) -> bool:
    return len(one) == len(other) and all(map(is_same, one, other))
