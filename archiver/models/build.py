"""Builds the files of an archive from a user's model: read, quantise, compile, sign, verify.

Nothing is written outside of the work folder; the caller packs the files into an archive.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.convert.exported_program import free_sizes
from torchere.archiver.models.convert.files import Packed, config_with, keep, may_say, members_of, write_model
from torchere.archiver.models.convert.optimize_gain import loaded, may_gain, measured_gain
from torchere.archiver.models.convert.torchscript import to_torchscript
from torchere.archiver.models.fold.convolutions import NotTraceable
from torchere.archiver.models.fold.paddings import folded_paddings
from torchere.archiver.models.inputs.examples import (
    example_of,
    files_of,
    inputs_of,
    read_example,
    read_samples,
    spread,
)
from torchere.archiver.models.inputs.run import LoadedModel
from torchere.archiver.models.inputs.sizes import Tensors, sizes_of
from torchere.archiver.models.load.source import Source, inputs_up_to, read_source
from torchere.archiver.models.probe.derive import signature_of, tried_signature
from torchere.archiver.models.probe.row_independence import VARIATIONS
from torchere.archiver.models.quantize.methods import Quantised, check_method, quantise, shared_scale
from torchere.archiver.models.steps import Say, step
from torchere.archiver.models.verify.compare import MAX_DRIFT, refuse_drift, verify
from torchere.archiver.models.verify.report import REPORT_NAME
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
from torchere.archiver.signature import SIGNATURE_NAME, Signature, TensorSpec
from torchere.archiver.torchscript_options import TorchScriptOptions

_UNPREPARED = (
    "the handler prepares no pictures: they are taken in their own size with values from 0 to 1; if clients "
    "send other numbers, give --example and --samples as .npy or .pt, or handler.image in model-config.yaml"
)


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
    options = _checked(options)
    check_examples(options)
    beside = work / "beside"
    beside.mkdir()
    with step(say, "reading the model"):
        source = read_source(
            options.serialized_file,
            options.model_file,
            options.factory,
            options.allow_pickle,
            strict=options.strict,
            kept=options.model_format == KEEP,
        )
    for line in (f"the model: {source.kind} ({source.path})", *source.notes):
        say(line)
    signed = inputs_of(options.example_signature) if options.example_signature else ()
    if signed:  # clients use these input names; a program has its own
        source = dataclasses.replace(source, names=tuple(spec.name for spec in signed))
    example = _example(source, options, signed, say)
    if options.model_format == KEEP:
        if source.onnx is not None:
            signature = tried_signature(source.path, source.onnx, example, say)
            source = dataclasses.replace(source, signature=signature)
        kept = keep(source, example, options, work, say)
        return _finished(kept.built, kept.signature, say)
    return _Compilation(source, options, work, say).built(example)


def _checked(options: BuildOptions) -> BuildOptions:
    """Check that the options agree, and return them with the format decided."""
    wanted = options.model_format or (TORCHSCRIPT if options.quantize else KEEP)
    if wanted not in MODEL_FORMATS:
        raise ModelRefused(f"--format is {wanted!r}; expected one of {', '.join(MODEL_FORMATS)}")
    if options.quantize and wanted == KEEP:
        raise ModelRefused(
            "--quantize changes the model, and --format keep does not; expected another format"
        )
    if options.quantize:
        check_method(options.quantize)
    if options.script and wanted != TORCHSCRIPT:
        raise ModelRefused(f"--script makes TorchScript; expected --format torchscript instead of {wanted}")
    if options.isa and (wanted != AOTI or options.isa not in ISAS):
        raise ModelRefused(f"--isa is {options.isa!r}; expected --format aoti and one of {', '.join(ISAS)}")
    return dataclasses.replace(options, model_format=wanted)


def _example(source: Source, options: BuildOptions, signed: Sequence[TensorSpec], say: Say) -> Tensors | None:
    if options.example is not None:
        example = read_example(options.example, doubles=source.doubles, prepare=options.prepare)
        if example.unprepared:
            say(_UNPREPARED)
    elif source.example is None and signed:
        example = example_of(signed)
    else:
        return source.example
    names = source.signature.inputs if source.signature else None
    count = inputs_up_to(source.module, example.names, len(example.tensors))
    wanted = [spec.name for spec in names] if names else source.names_of_inputs(count)
    return example.ordered(wanted)


@dataclass(frozen=True)
class _Compilation:
    """The conversion of one model to another format."""

    source: Source
    options: BuildOptions
    work: Path
    say: Say

    def built(self, example: Tensors | None) -> Built:
        """Quantise, compile, sign and verify the model."""
        module, example = self._startable(example)
        names = self.source.names_of_inputs(len(example))
        sizes = sizes_of(self.options, names, example)
        program = self.source.program
        if program is not None and not sizes:
            sizes = free_sizes(program, example)
        else:
            program = None  # to be exported again
        # Check first, so that a model that is refused anyway is not compiled.
        with step(self.say, "running the model"):
            signature = signature_of(
                module, example, names, sizes, probe_batch=True, variations=VARIATIONS[:1]
            )
        model = LoadedModel(module, example, signature, self.source.kind, self.source.path)
        samples = self._samples(names, example)
        quantised = self._quantised(model, samples)
        packed = write_model(
            quantised.module if quantised else self._folded(module, example),
            program if quantised is None else None,
            example,
            sizes,
            options=self.options,
            work=self.work,
            say=self.say,
            script=quantised.script if quantised else None,
        )
        probe = self.options.model_format == TORCHSCRIPT
        # Run the packed model, not the source: compiling fixes every size that no option lets vary.
        with step(self.say, "trying sizes and batches"):
            final = signature_of(packed.run, example, names, sizes, probe_batch=probe, say=self.say)
        self._tell_batch(final)
        model = dataclasses.replace(model, signature=final)
        load = self._load(packed, samples or [example], final, quantised)
        if load.optimize_for_inference:
            with step(self.say, "optimising for inference"):
                packed = dataclasses.replace(packed, run=loaded(packed.file, load))
        self._verify(model, packed, load, samples or [example], quantised)
        config = config_with(self.options.config_file, load, self.work)
        return _finished(Built(packed.file, None, config, packed.beside), final, self.say)

    def _samples(self, names: Sequence[str], example: Tensors) -> list[Tensors]:
        if self.options.samples is None:
            return []
        found, most = files_of(self.options.samples), self.options.max_samples
        files = spread(found, most)
        with step(self.say, f"reading {len(files)} samples"):
            samples = read_samples(files, names, example, self.options.prepare)
        if len(files) < len(found):
            self.say(
                f"samples: {len(files)} of {len(found)} files, evenly spaced; --max-samples sets how many"
            )
        return samples

    def _startable(self, example: Tensors | None) -> tuple[torch.nn.Module, Tensors]:
        wanted = self.options.model_format
        if self.source.module is None:
            raise ModelRefused(
                f"{self.source.path}: {self.source.kind} is packed as it is and can't become {wanted}; start "
                "from the model that it was made from"
            )
        if example is None:
            raise ModelRefused(
                f"to make {wanted} of it, the model must be run: give --example with inputs (.json, .pt, "
                ".npy or a picture)"
            )
        return self.source.module, example

    def _quantised(self, model: LoadedModel, samples: Sequence[Tensors]) -> Quantised | None:
        method = self.options.quantize
        if method is None:
            return None
        script = self.options.script
        told = functools.cache(self.say)  # each line once: all traced candidates give the same ones
        with step(self.say, f"quantising ({method})"):
            made = quantise(
                model,
                method,
                samples,
                target=str(self.options.model_format),
                compiled=lambda module, example: to_torchscript(module, example, script=script, say=told),
            )
        made = dataclasses.replace(made, notes=(*made.notes, *shared_scale(model, made.method)))
        for note in made.notes:
            self.say(note)
        return made

    def _folded(self, module: torch.nn.Module, example: Tensors) -> torch.nn.Module:
        """Return the module with separate paddings folded into the convolutions that follow them.

        A module is returned as it is when TorchScript is compiled from its source, or when it comes from an
        exported program.
        """
        if self.options.script or self.source.program is not None:
            return module
        try:
            folded = folded_paddings(module, example)
        except NotTraceable as reason:
            self.say(f"paddings stay apart from their convolutions, which is slower: {reason}")
            return module
        if folded is None:
            return module
        self.say(f"folded into convolutions: {folded.note}")
        return folded.module

    def _load(
        self, packed: Packed, samples: Sequence[Tensors], signature: Signature, quantised: Quantised | None
    ) -> TorchScriptOptions:
        """Return how the server is to load the file: as the user's configuration says, or the fastest way.

        The fastest way is measured.
        """
        if self.options.model_format != TORCHSCRIPT:
            return TorchScriptOptions()
        said = members_of(self.options.config_file) or ()
        load = TorchScriptOptions(
            quantised.engine if quantised else None, "optimize_for_inference: true" in said
        )
        is_open = quantised is None and self.options.verify and may_say(self.options.config_file)
        run: Any = packed.run
        if not is_open or not may_gain(run, signature):
            return load
        with step(self.say, "optimising for inference, to compare"):
            gain = measured_gain(packed.file, samples, batched=signature.batched)
        if gain is None:
            self.say("optimize_for_inference: the model does not run so; not taken")
            return load
        self.say(gain.note)
        return dataclasses.replace(load, optimize_for_inference=gain.is_worthwhile)

    def _verify(
        self,
        model: LoadedModel,
        packed: Packed,
        load: TorchScriptOptions,
        samples: Sequence[Tensors],
        quantised: Quantised | None,
    ) -> None:
        """Compare the packed model with the original, and write the report beside the packed model."""
        if not self.options.verify:
            return
        kind = "none" if quantised is None else "bf16" if quantised.method == "bf16" else "int8"
        limit = self.options.max_drift
        with step(self.say, "verifying"):
            report = verify(
                model.module,
                packed.run,
                samples,
                max_drift=MAX_DRIFT[kind] if limit is None else limit,
                batched=model.signature.batched,
                files=(model.source if model.source.is_file() else None, packed.file),
                loads=(TorchScriptOptions(), load),
                notes=quantised.notes if quantised else (),
            )
        self.say(report.table())
        if not self.options.accept_drift:
            refuse_drift(report)
        path = packed.beside / REPORT_NAME
        path.write_text(report.to_json(), encoding="utf-8")

    def _tell_batch(self, signature: Signature) -> None:
        fixed = self.options.model_format in (EXPORT, AOTI) and self.options.dynamic_batch is None
        if fixed and not signature.batched:
            self.say("it takes the batch size of the example only; --dynamic-batch 1:64 lets it vary")


def _finished(built: Built, signature: Signature | None, say: Say) -> Built:
    if signature is not None:
        signature.check()
        (built.beside / SIGNATURE_NAME).write_text(signature.to_json(), encoding="utf-8")
        for role, specs in (("in", signature.inputs), ("out", signature.outputs)):
            for spec in specs:
                say(f"{role:>4}: {spec.name} {spec.datatype}{list(spec.shape)}")
    return built
