"""Builds an archive's files from a user's model: read, quantise, compile, derive a signature, verify.

Nothing is written outside of the work folder; the caller packs the files into an archive.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.convert.files import (
    Packed,
    can_be_kept,
    check_section,
    config_with,
    default_sizes,
    keep,
    may_say,
    says_optimize,
    write_model,
)
from torchere.archiver.models.convert.optimize_gain import loaded, may_gain, measured_gain
from torchere.archiver.models.convert.ranks import with_ranks
from torchere.archiver.models.convert.torchscript import to_torchscript
from torchere.archiver.models.fold.convolutions import folded_paddings
from torchere.archiver.models.fold.exported_layers import with_layers
from torchere.archiver.models.fold.tracing import NotTraceable
from torchere.archiver.models.inputs.buffers import unchanged_buffers
from torchere.archiver.models.inputs.examples import Samples, chosen_samples
from torchere.archiver.models.inputs.run import LoadedModel, Run
from torchere.archiver.models.inputs.sizes import FreeSize, Tensors, sizes_of
from torchere.archiver.models.load.exported_program import ServedProgram
from torchere.archiver.models.load.source import Source, as_in_archive, read_source, source_with_example
from torchere.archiver.models.measure.cost import batch_sizes, fewer_threads_when_busy
from torchere.archiver.models.measure.difference import drift_limit
from torchere.archiver.models.probe.derive import signature_of, tried_signature
from torchere.archiver.models.probe.free_sizes import with_other_sizes
from torchere.archiver.models.probe.id_ranges import with_id_ranges
from torchere.archiver.models.probe.row_independence import VARIATIONS
from torchere.archiver.models.quantize.methods import (
    Quantised,
    check_method,
    check_quantised,
    one_size,
    quantise,
    shared_scale,
)
from torchere.archiver.models.quantize.trials import (
    FP32,
    Trial,
    check_trial,
    choose_trial,
    methods_tried,
    table,
)
from torchere.archiver.models.steps import Say, step
from torchere.archiver.models.verify.compare import refuse_other_sizes, verify, with_memory
from torchere.archiver.models.verify.report import REPORT_NAME
from torchere.archiver.quantization import AUTO, METHODS, max_drift_of
from torchere.archiver.request import (
    AOTI,
    EXPORT,
    ISAS,
    KEEP,
    MODEL_FORMATS,
    TORCHSCRIPT,
    BuildOptions,
    Built,
    check_examples,
)
from torchere.archiver.signature import SIGNATURE_NAME, Signature
from torchere.archiver.torchscript_options import TorchScriptOptions

_NOT_QUANTISED = "take another --quantize or --format, or leave --quantize out"


@fewer_threads_when_busy()
def build(options: BuildOptions, work: Path, say: Say) -> Built:
    """Make the files of the archive in `work`, an empty folder.

    Args:
        options: the model, and the conversion to apply.
        work: where files are made; the result points into it.
        say: takes lines about progress and about the result.

    Raises:
        ModelRefused: an input, an option or the result is refused; one line says why.
        PackingError: an example does not exist; one line says so.
        OSError: a file can't be read or written.
    """
    is_open = options.model_format is None and not options.quantize
    options = _checked(options)
    check_examples(options)
    check_section(options.config_file)
    beside = work / "beside"
    beside.mkdir()
    with step(say, "reading the model"):
        source = read_source(
            options.serialized_file,
            options.model_file,
            options.factory,
            options.allow_pickle,
            strict=options.strict,
            kept=options.model_format == KEEP and options.factory is None,
        )
    for line in (f"the model: {source.kind} ({source.path})", *source.notes):
        say(line)
    if is_open and not can_be_kept(source, options):
        say(f"packed as {TORCHSCRIPT}, since no server loads it as it is; --format changes that")
        options = replace(options, model_format=TORCHSCRIPT)
    source = as_in_archive(source, options, say)
    source, example = source_with_example(source, options, say)
    options = with_ranks(source, example, options, work, say)
    if options.model_format == KEEP:
        if source.onnx is not None:
            signature = tried_signature(source.path, source.onnx, example, say)
            source = replace(source, signature=signature)
        return _finished(*keep(source, example, options, work, say), say)
    return _Compilation(source, options, work, say).built(example)


def _checked(options: BuildOptions) -> BuildOptions:
    """Check that the options agree, and return them with the format decided."""
    wanted = options.model_format or (TORCHSCRIPT if options.quantize else KEEP)
    if wanted not in MODEL_FORMATS:
        raise ModelRefused(f"--format is {wanted!r}; expected one of {', '.join(MODEL_FORMATS)}")
    if options.parallel is not None and (wanted != KEEP or options.factory is not None):
        raise ModelRefused(
            "--parallel spreads a class or a Hugging Face folder as it is; expected --model-file or such a "
            "folder, without --factory, --format and --quantize"
        )
    if options.quantize and wanted == KEEP:
        raise ModelRefused(
            "--quantize changes the model, and --format keep does not; expected another format"
        )
    if options.quantize:
        check_method(options.quantize, wanted, has_samples=options.samples is not None)
        if METHODS[options.quantize].tries and not options.verify:
            raise ModelRefused(
                f"--quantize {options.quantize} chooses by measuring, which --no-verify leaves out; name one "
                f"of {', '.join(METHODS[options.quantize].tries)}"
            )
    if options.script and wanted != TORCHSCRIPT:
        raise ModelRefused(f"--script makes TorchScript; expected --format torchscript instead of {wanted}")
    if options.isa and options.quantize == "int4-weight":
        raise ModelRefused(
            "int4-weight compiles the weights in the order of this machine's processor, so that --isa has no "
            "use; leave it out, or take int8-weight"
        )
    if options.isa and (wanted != AOTI or options.isa not in ISAS):
        raise ModelRefused(f"--isa is {options.isa!r}; expected --format aoti and one of {', '.join(ISAS)}")
    return replace(options, model_format=wanted)


def _only_kept(source: Source, options: BuildOptions) -> str:
    """Return why a model that is packed as it is can't be converted or quantised, with the ways out."""
    if options.quantize is None:
        return (
            f"{source.path}: {source.kind} is packed as it is and can't become {options.model_format}; leave "
            "it so, or start from the model that it was made from"
        )
    other = ", or quantise it with onnxruntime.quantization and give the result" if source.onnx else ""
    return (
        f"{source.path}: {source.kind} is packed as it is, and can't be quantised by --quantize "
        f"{options.quantize}; leave that out, or give the class and the weights that it was made from{other}"
    )


@dataclass(frozen=True)
class _Job:
    """The inputs from which all forms of one model are made."""

    model: LoadedModel
    samples: Samples
    names: Sequence[str]
    sizes: list[FreeSize]
    program: torch.export.ExportedProgram | None  # None: the model must be exported again

    @property
    def file(self) -> Path | None:
        """The file of the original model, which has its weights or class; None for a folder or a factory."""
        return self.model.source if self.model.source.is_file() else None

    @property
    def given(self) -> list[Tensors]:
        """The samples; the example if there are none."""
        return self.samples.tensors or [self.model.example]

    @functools.cached_property
    def layered(self) -> LoadedModel:
        """The model with layers, which quantisers change, in place of an exported program's operators."""
        return replace(self.model, module=with_layers(self.model.module, self.model.example))

    @functools.cached_property
    def timed(self) -> list[Tensors]:
        """The samples to time models with; see `with_other_sizes`."""
        return with_other_sizes(self.given, self.sizes, self.model.module)


def _as_served(trial: Trial) -> Run:
    """Return the run as a server has it: TorchScript is loaded anew, because probing ran it on other shapes.

    An exported program that keeps state is copied, because it shares its buffers with the original.
    """
    if isinstance(trial.packed.run, ServedProgram) and trial.packed.run.keeps_state:
        return copy.deepcopy(trial.packed.run)
    is_script = isinstance(trial.packed.run, torch.jit.ScriptModule)
    return loaded(trial.packed.file, trial.load) if is_script else trial.packed.run


@dataclass(frozen=True)
class _Compilation:
    """The conversion of one model to another format."""

    source: Source
    options: BuildOptions
    work: Path
    say: Say

    def built(self, example: Tensors | None) -> Built:
        """Quantise and compile the model, derive its tensor signature, and verify the result."""
        module, example = self._startable(example)
        if note := check_quantised(module, self.options.quantize, str(self.options.model_format)):
            self.say(note)
        names = self.source.names_of_inputs(len(example))
        program = self.source.program
        default = default_sizes(self.source)
        sizes = sizes_of(self.options, names, example, default)
        if sizes != default:
            program = None  # to be exported again
        # Check before the model is compiled, which takes long, whether it is refused.
        lines: list[str] = []
        with step(self.say, "running the model"):
            tried = VARIATIONS if self._has_fixed_batch else VARIATIONS[:1]
            signature = signature_of(
                module, example, names, sizes, probe_batch=True, say=lines.append, variations=tried
            )
        model = LoadedModel(module, example, signature, self.source.path)
        samples = chosen_samples(self.options, names, example, self.say)
        job = _Job(model, samples, names, sizes, program)
        method = self.options.quantize
        if method is None:
            trial = self._made(job, FP32)
            if self.options.verify:
                trial = self._verified(job, trial, None)
        else:
            target = str(self.options.model_format)
            trial = self._best(job, methods_tried(job.layered.module, method, target, samples.tensors))
        self._tell_batch(trial.signature, lines if not signature.batched else ())
        self._accept(job, trial)
        config = config_with(self.options.config_file, trial.load, self.work)
        signature = with_id_ranges(trial.signature, module, example)
        return _finished(Built(trial.packed.file, None, config, trial.packed.beside), signature, self.say)

    def _best(self, job: _Job, methods: Sequence[str]) -> Trial:
        """Quantise the model by each method, and return the best form with its report."""
        method = str(self.options.quantize)
        trials: list[Trial] = []
        failures: dict[str, str] = {}  # reasons by method
        fp32 = self._in_fp32(job) if self.options.verify else None
        if method == AUTO and fp32 is not None:
            trials.append(self._verified(job, fp32, None))  # the other trials are compared with it
        for number, name in enumerate(methods, 1):
            if len(methods) > 1:
                self.say(f"candidate {number} of {len(methods)}: {name}")
            try:
                made = self._made(job, name)
                trials.append(self._verified(job, made, fp32) if self.options.verify else made)
            except ModelRefused as refusal:
                if len(methods) == 1 and not trials:
                    raise
                failures[name] = str(refusal)
        if not trials:
            raise ModelRefused(next(iter(failures.values())))
        chosen = choose_trial(trials, method)
        if len(trials) + len(failures) > 1:
            self.say(table(trials, failures, chosen))
        return chosen

    def _in_fp32(self, job: _Job) -> Trial | None:
        """Return the model packed without `quantize`, to measure the gain; None if it can't be made so.

        For the format AOTInductor, TorchScript is measured instead, because it compiles in a second; except
        with `auto`, which may choose the model without `quantize`, so that AOTInductor itself is measured.
        """
        method, target = self.options.quantize, self.options.model_format
        if method == "int8-trained":
            return None  # the original model is int8 already, or simulates int8
        quick = TORCHSCRIPT if target == AOTI and method != AUTO else None
        try:
            with step(self.say, "making fp32, to compare"):
                return self._made(job, FP32, quick)
        except ModelRefused as refusal:
            if method == AUTO:
                raise
            self.say(f"no form in fp32 to compare the speed with: {refusal}")
            return None

    def _made(self, job: _Job, method: str, quick: str | None = None) -> Trial:
        """Make one form of the model, in the format `quick` or, without it, in the format of the options."""
        target = quick or str(self.options.model_format)
        options = replace(
            self.options,
            model_format=target,
            quantize=None if method == FP32 else method,
            script=self.options.script and target == TORCHSCRIPT,
        )
        work = self.work / f"{method}-{target}"
        (work / "beside").mkdir(parents=True)
        quantised = self._quantised(job, method) if method != FP32 else None
        packed = write_model(
            quantised.module if quantised else self._folded(job, target),
            job.program if quantised is None else None,
            job.model.example,
            job.sizes,
            options=options,
            work=work,
            say=self.say,
            script=quantised.script if quantised else None,
        )
        # Run the packed model, not the source: compiling fixes every size for which no option is given.
        with step(self.say, "trying sizes and batches"):
            signature = signature_of(
                packed.run,
                job.model.example,
                job.names,
                job.sizes,
                probe_batch=target == TORCHSCRIPT,
                say=self.say,
                scales_by_batch=method == "int8-dynamic",
            )
        # TorchScript in fp32 was already compared with the original when it was made.
        if self.options.verify and not self.options.accept_drift and (quantised or target != TORCHSCRIPT):
            limit = self._limit(job, None if method == FP32 else method)
            with unchanged_buffers(job.model.module):
                given = job.model.module, packed.run, job.model.example, job.sizes
                refuse_other_sizes(*given, limit, quantised=quantised is not None)
        load = self._load(packed, job, signature, quantised, target)
        return Trial(method, packed, load, signature, quantised)

    def _limit(self, job: _Job, method: str | None) -> float:
        """Return the largest drift that is allowed; `method` is None without quantisation."""
        limit = self.options.max_drift
        return drift_limit(max_drift_of(method), job.model.module) if limit is None else limit

    def _startable(self, example: Tensors | None) -> tuple[torch.nn.Module, Tensors]:
        if self.source.module is None:
            raise ModelRefused(_only_kept(self.source, self.options))
        if example is None:
            raise ModelRefused(
                f"to make {self.options.model_format} of it, the model must be run: give --example with "
                "inputs (.json, .pt, .npy or a picture), or --samples"
            )
        return self.source.module, example

    def _quantised(self, job: _Job, method: str) -> Quantised:
        told = functools.cache(self.say)  # each line once: all traced candidates report the same lines
        compiled = functools.partial(
            to_torchscript,
            sizes=job.sizes,
            script=self.options.script,
            only_trace=self.options.trace,
            say=told,
        )
        module = job.model.module
        quantising = step(self.say, f"quantising ({method})", _NOT_QUANTISED)
        with quantising, unchanged_buffers(module), job.samples.named(module):
            made = quantise(
                job.layered,
                method,
                job.samples.tensors,
                target=str(self.options.model_format),
                compiled=compiled,
                max_drift=self._limit(job, method),
                timed=job.timed,
                say=self.say,
            )
        warnings = shared_scale(job.model, method)
        warnings += one_size(method, job.samples.tensors, job.sizes)
        made = replace(made, notes=(*made.notes, *warnings))
        for note in made.notes:
            self.say(note)
        return made

    def _folded(self, job: _Job, target: str) -> torch.nn.Module:
        """Return the module with separate paddings folded into the convolutions that follow them.

        A module is returned as it is when TorchScript is compiled from its source, or when it comes from an
        exported program and is packed as one.
        """
        model = job.model
        if self.options.script or (self.source.program is not None and target != TORCHSCRIPT):
            return model.module
        if self.source.program is not None:  # TorchScript, which is compared with it, checks no sizes
            model.module._forward_pre_hooks.clear()
        try:
            folded = folded_paddings(job.layered.module, model.example)
        except NotTraceable as reason:
            self.say(f"paddings stay apart from their convolutions, which is slower: {reason}")
            return model.module
        if folded is None:
            return model.module
        self.say(f"folded into convolutions: {folded.note}")
        return folded.module

    def _load(
        self, packed: Packed, job: _Job, signature: Signature, quantised: Quantised | None, target: str
    ) -> TorchScriptOptions:
        """Return the options with which the server is to load the file.

        If the configuration leaves it open, an unquantised model is timed with and without optimisation.
        """
        if target != TORCHSCRIPT:
            return TorchScriptOptions()
        load = TorchScriptOptions(
            quantised.engine if quantised else None, says_optimize(self.options.config_file)
        )
        is_open = quantised is None and self.options.verify and may_say(self.options.config_file)
        run: Any = packed.run
        if not is_open or not may_gain(run, signature):
            return load
        with step(self.say, "optimising for inference, to compare"):
            sizes = batch_sizes(signature)
            gain = measured_gain(packed.file, job.timed, batched=signature.batched, sizes=sizes)
        if gain is None:
            self.say("optimize_for_inference: the model does not run so; not taken")
            return load
        self.say(gain.note)
        return replace(load, optimize_for_inference=gain.is_worthwhile)

    def _verified(self, job: _Job, trial: Trial, fp32: Trial | None) -> Trial:
        """Return the trial with its report: outputs are compared with the original, times with fp32."""
        module = job.model.module
        verifying = step(self.say, f"verifying ({trial.method})")
        with verifying, unchanged_buffers(module), job.samples.named(module):
            report = verify(
                module,
                _as_served(trial),
                job.given,
                max_drift=self._limit(job, trial.method if trial.quantised else None),
                batched=all(one.signature.batched for one in (trial, fp32) if one),
                sizes=batch_sizes(trial.signature, fp32.signature if fp32 else None),
                files=(job.file, trial.packed.file),
                load=trial.load,
                notes=trial.quantised.notes if trial.quantised else (),
                fp32=_as_served(fp32) if fp32 else None,
                timed=job.timed,
                say=self.say,
            )
        if report.fp32 is not None and fp32 is not None:
            size_bytes = fp32.packed.file.stat().st_size
            report = replace(report, fp32=replace(report.fp32, size_bytes=size_bytes))
        return replace(trial, report=report)

    def _accept(self, job: _Job, trial: Trial) -> None:
        """Write the trial's report, if it has one, beside the packed model.

        Raises:
            ModelRefused: the drift is too large, or a quantised model is not faster; see `check_trial`.
        """
        if trial.report is None:
            return
        with step(self.say, "measuring the memory"):
            loads = (TorchScriptOptions(), trial.load)
            report = with_memory(trial.report, (job.file, trial.packed.file), loads, job.given[0])
        self.say(report.table())
        warning = check_trial(trial, job.layered.module, self.options)
        if warning:
            self.say(warning)
        path = trial.packed.beside / REPORT_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(report.to_json(), encoding="utf-8")

    @property
    def _has_fixed_batch(self) -> bool:
        return self.options.model_format in (EXPORT, AOTI) and self.options.dynamic_batch is None

    def _tell_batch(self, signature: Signature, reasons: Sequence[str]) -> None:
        """Say how the batch can vary, or why it can't; `reasons` say why the original takes no batches."""
        if self._has_fixed_batch and not signature.batched:
            lets_vary = "it takes the batch size of the example only; --dynamic-batch 1:64 lets it vary"
            self.say(reasons[-1] if reasons else lets_vary)


def _finished(built: Built, signature: Signature | None, say: Say) -> Built:
    if signature is not None:
        signature.check()
        (built.beside / SIGNATURE_NAME).write_text(signature.to_json(), encoding="utf-8")
        for role, specs in (("in", signature.inputs), ("out", signature.outputs)):
            for spec in specs:
                say(f"{role:>4}: {spec.name} {spec.datatype}{list(spec.shape)}")
    return built
