"""`--format keep`: pack the model in its original format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.convert.aotinductor import load_aoti
from torchere.archiver.models.convert.exported_program import free_sizes
from torchere.archiver.models.convert.files import refuse_full_disk, write_build
from torchere.archiver.models.inputs.examples import check_against
from torchere.archiver.models.inputs.run import Run
from torchere.archiver.models.inputs.sizes import Tensors, sizes_of
from torchere.archiver.models.load.module import take_along
from torchere.archiver.models.load.source import EAGER, Source, aoti_metadata
from torchere.archiver.models.probe.derive import signature_of
from torchere.archiver.models.steps import Say, refusing, step
from torchere.archiver.request import AOTI, BuildOptions, Built
from torchere.archiver.scan.weights import (
    AOTINDUCTOR,
    EXPORTED_PROGRAM,
    ONNX,
    TORCH_SAVE,
    TORCHSCRIPT,
    classify_file,
)
from torchere.archiver.signature import Signature


@dataclass(frozen=True)
class Kept:
    """The files to pack, and the signature if it is known."""

    built: Built
    signature: Signature | None


def keep(source: Source, example: Tensors | None, options: BuildOptions, work: Path, say: Say) -> Kept:
    """Prepare the source to be packed unchanged, and determine its signature.

    Args:
        source: the loaded source model.
        example: example inputs to derive a signature from; ONNX has a signature of its own.
        options: `needs_signature` rejects a model without a signature.
        work: new files are written to `work/beside`.
        say: receives a line if the model does not accept batches.

    Raises:
        ModelRefused: the server could not load the model, or it needs a signature and there is no example.
    """
    built = _built(source, options, work)
    if source.signature is not None:
        if example is not None:
            check_against(example, source.signature)
        return Kept(built, source.signature)
    if example is None:
        if options.needs_signature:
            raise ModelRefused(
                "without --handler the server must know the model's inputs and outputs: give --example with "
                "inputs (.json, .pt, .npy or a picture), or name a handler"
            )
        return Kept(built, None)
    return Kept(built, _signature(source, example, options, say))


def _built(source: Source, options: BuildOptions, work: Path) -> Built:
    beside = work / "beside"
    if source.kind == EAGER and options.model_file is not None:
        take_along(options.model_file, beside)
        return Built(_state_file(source, options, work), options.model_file, options.config_file, beside)
    if source.kind == AOTINDUCTOR:
        isa = aoti_metadata(source.path).get("AOTI_CPU_ISA", "").lower()
        write_build(beside, {"format": AOTI, "isa": isa})
    if source.kind in (TORCHSCRIPT, EXPORTED_PROGRAM, AOTINDUCTOR, ONNX):
        file, weights = _with_suffix(source, work), source.onnx.beside if source.onnx else ()
        return Built(file, None, options.config_file, beside, weights)
    raise ModelRefused(
        f"{source.path}: {source.kind} is not a form that a server loads by itself; expected --format "
        "torchscript, export or aoti"
    )


def _with_suffix(source: Source, work: Path) -> Path:
    """Return the file, or a link to it with the suffix of its format: the server selects the loader by it."""
    wanted = {TORCHSCRIPT: ".pt", ONNX: ".onnx"}.get(source.kind, ".pt2")
    if source.path.suffix == wanted:
        return source.path
    link = work / f"{source.path.stem}{wanted}"
    link.symlink_to(source.path.resolve())
    return link


def _state_file(source: Source, options: BuildOptions, work: Path) -> Path | None:
    """Return a file with the weights as a plain state dict, or None if the source has no weights file.

    A server loads a state dict if the archive has a model file.
    """
    path = options.serialized_file
    module: Any = source.module
    if path is None:
        return None
    if path.is_file() and classify_file(path).kind == TORCH_SAVE and not classify_file(path).foreign:
        found = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(found, dict) and found.keys() == module.state_dict().keys():
            return path
    made = work / "model.pth"
    refuse_full_disk(module, work)
    torch.save(module.state_dict(), made)
    return made


def _signature(source: Source, example: Tensors, options: BuildOptions, say: Say) -> Signature:
    run = _run(source, options)
    names = source.names_of_inputs(len(example))
    sizes = sizes_of(options, names, example)
    if not sizes and source.program is not None:
        sizes = free_sizes(source.program, example)
    with step(say, "trying sizes and batches"):
        return signature_of(run, example, names, sizes, probe_batch=source.program is None, say=say)


def _run(source: Source, options: BuildOptions) -> Run:
    if source.module is not None:
        return source.program.module() if source.program is not None else source.module
    if not options.allow_pickle:
        raise ModelRefused(
            f"{source.path}: to derive a signature its machine code would have to run; trust it with "
            "--allow-pickle, or name a --handler and leave --example out"
        )
    with refusing(f"{source.path}: loading the AOTInductor package"):
        run: Run = load_aoti(source.path)
    return run
