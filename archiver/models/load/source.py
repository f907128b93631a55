"""Recognises the kind of a user's model by its content and reads it; also chooses the example to run it on.

Only code that the user names (a class or a factory) or trusts (a pickle) is run.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import platform
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.ao.quantization import disable_observer

from torchere.archiver.container.entries import ArchiveLimits, open_regular
from torchere.archiver.container.zip import DAMAGED, ZipContainer
from torchere.archiver.errors import ArchiveError, ModelRefused
from torchere.archiver.models.inputs.buffers import random_ones, unsaved
from torchere.archiver.models.inputs.examples import Example, example_of, files_of, read_example, signature_at
from torchere.archiver.models.inputs.run import DATATYPES
from torchere.archiver.models.inputs.sizes import (
    BATCH,
    LARGEST,
    FreeSize,
    Tensors,
    asked_sizes,
    signed_sizes,
    sizes_of,
)
from torchere.archiver.models.load.checkpoint import Weights, read_weights
from torchere.archiver.models.load.exported_program import take_by_position, unguarded_module
from torchere.archiver.models.load.fitting import ADAPTER, is_adapter, load_into, unwrapped
from torchere.archiver.models.load.huggingface import Loaded, is_model_folder, load_folder
from torchere.archiver.models.load.module import module_from_factory, module_from_file
from torchere.archiver.models.load.onnx import OnnxForm, read_onnx
from torchere.archiver.models.load.torchscript import load_script
from torchere.archiver.models.load.weight_only import torchao_kinds
from torchere.archiver.models.steps import Say, refusing
from torchere.archiver.request import AOTI, EXPORT, BuildOptions
from torchere.archiver.scan import UnsafeModel
from torchere.archiver.scan.exported_program import INT8_OPERATORS, check_program
from torchere.archiver.scan.weights import (
    AOTINDUCTOR,
    EXPORTED_PROGRAM,
    ONNX,
    SHARED_LIBRARY,
    TORCHSCRIPT,
    classify_file,
)
from torchere.archiver.signature import Signature

EAGER = "eager"
HUGGING_FACE = "Hugging Face folder"
_UNPREPARED = (
    "the handler prepares no pictures: they are taken in their own size with values from 0 to 1; if clients "
    "send other numbers, give --example and --samples as .npy or .pt, or handler.image in model-config.yaml"
)
_LENGTH = 64  # maximum length of texts that advice suggests, if the model has none
_BATCH = 64  # the largest batch of a program from an archive whose signature has no maximum


@dataclass(frozen=True)
class Source:
    """A model that was read.

    `module` is None for ONNX and AOTInductor, which are packed unchanged. `program` is the exported program
    from which `module` was made. `example`, `names` and `signature` are set if the source itself has them.
    """

    kind: str
    path: Path
    module: torch.nn.Module | None = None
    program: torch.export.ExportedProgram | None = None
    example: Tensors | None = None
    names: tuple[str, ...] | None = None
    signature: Signature | None = None
    onnx: OnnxForm | None = None
    notes: tuple[str, ...] = ()  # lines for the user about choices that were made
    sizes: tuple[FreeSize, ...] = ()  # sizes in `example` that vary unless the user says otherwise
    folder: Loaded | None = None  # a Hugging Face model, of which an example decides the inputs

    def names_of_inputs(self, count: int) -> tuple[str, ...]:
        """Return the names of the first `count` inputs."""
        if self.names is not None and len(self.names) >= count:
            return self.names[:count]
        return input_names(self.module, count)  # the module may be None: AOTInductor keeps no names

    def taking(self, given: Sequence[str] | None, count: int) -> Source:
        """Return the source with the inputs of an example; only a Hugging Face model's inputs depend on it.

        Args:
            given: the names of the example's inputs; None: the example has none.
            count: the number of the example's inputs.
        """
        if self.folder is None:
            return self
        names = self.folder.names(given, count)
        module = self.folder.module(names)
        return replace(self, module=_in_eval_mode(module), example=None, names=names, sizes=())

    @property
    def doubles(self) -> bool:
        """Whether the model computes in FP64, by its signature or, without one, its example and weights."""
        if self.signature is not None:
            return any(spec.datatype == DATATYPES[torch.float64] for spec in self.signature.inputs)
        weights = self.module.parameters() if self.module is not None else ()
        return any(tensor.dtype is torch.float64 for tensor in (*(self.example or ()), *weights))


def read_source(
    serialized: Path | None,
    model_file: Path | None,
    factory: str | None,
    allow_pickle: bool,
    *,
    strict: bool = True,
    kept: bool = False,
) -> Source:
    """Read a model; modules are in eval mode, on the CPU, without gradients and with observers off.

    Args:
        serialized: a file or folder of weights or of a whole model; None if the class creates its weights.
        model_file: a Python file with the model's class; its code is run.
        factory: `module:name` in an importable package, instead of `model_file`; its code is run.
        allow_pickle: unpickle without restriction.
        strict: see `load_into`.
        kept: the server will call the unchanged class, without arguments.

    Raises:
        ModelRefused: the model can't be used; the text gives the reason.
        OSError: a file can't be read.
    """
    if model_file is not None and factory is not None:
        raise ModelRefused("--model-file and --factory are both given; expected one of them")
    if serialized is not None:
        os.stat(serialized)  # raises a FileNotFoundError that names the file
    if model_file is not None or factory is not None:
        return _ready(_eager(serialized, model_file, factory, allow_pickle, strict=strict, kept=kept), kept)
    if serialized is None:
        raise ModelRefused("no model is given; expected --serialized-file, --model-file or --factory")
    return _ready(_whole(serialized, allow_pickle), kept)


def _eager(
    serialized: Path | None,
    model_file: Path | None,
    factory: str | None,
    allow_pickle: bool,
    *,
    strict: bool,
    kept: bool,
) -> Source:
    weights = None if serialized is None else read_weights(serialized, allow_pickle)
    given = weights.hyper_parameters if weights else None
    arguments = None if kept else given
    try:

        def made() -> tuple[torch.nn.Module, str]:
            if model_file:
                return module_from_file(model_file, arguments)
            return module_from_factory(str(factory), arguments), ""

        module, told = made()
        is_plain = not torchao_kinds(module)
        notes = [told] if told else []
        if weights and serialized:
            before = unsaved(module)
            notes += load_into(module, weights, serialized, strict)
            if before and (warning := random_ones(before, unsaved(module), lambda: made()[0])):
                notes.append(warning)
        if kept and is_plain and (quantised := torchao_kinds(module)):
            raise ModelRefused(
                f"{serialized}: weights of torchao ({quantised}), which a server can't load into a class "
                "that is not quantised; take --format export or aoti, which keep their bits and need no "
                "torchao to serve"
            )
    except ModelRefused as refusal:
        if kept and given:
            raise ModelRefused(f"{refusal}; {_KEPT_WITHOUT_ARGUMENTS}") from refusal
        raise
    if arguments:
        names = ", ".join(arguments.values)
        notes.append(
            f"the class is made with those hyper_parameters of the checkpoint that it takes, of {names}"
        )
    return Source(EAGER, serialized or model_file or Path(str(factory)), module, notes=tuple(notes))


_KEPT_WITHOUT_ARGUMENTS = (
    "the checkpoint has hyper_parameters, and a server that keeps the class makes it without arguments: take "
    "--format torchscript, export or aoti, or give the parameters these values as defaults"
)


def _whole(path: Path, allow_pickle: bool) -> Source:
    if path.is_dir():
        return _folder(path, allow_pickle)
    try:
        kind = classify_file(path).kind
    except ArchiveError as error:
        raise ModelRefused(f"{path}: {error.reason}; expected a model's file or folder") from error
    readers: dict[str, Callable[[Path], Source]] = {
        ONNX: _onnx,
        AOTINDUCTOR: _aotinductor,
        TORCHSCRIPT: partial(_torchscript, allow_pickle=allow_pickle),
        EXPORTED_PROGRAM: partial(_program, allow_pickle=allow_pickle),
    }
    if kind in readers:
        return readers[kind](path)
    if kind == "unknown" and path.suffix == ".py":
        raise ModelRefused(
            f"{path}: Python code, expected a model's file or folder; with the model's class it is "
            f"--model-file beside the weights, and a handler is packed by torchere archive --handler {path}"
        )
    if kind in ("unknown", "zip", "damaged zip", SHARED_LIBRARY):
        found = "not a model of a kind known here" if kind == "unknown" else kind
        raise ModelRefused(
            f"{path}: {found}; expected TorchScript, a .pt2, ONNX, or weights (torch.save, safetensors) with "
            "--model-file or --factory; if it was one of these, it is damaged or cut off"
        )
    return _without_class(path, read_weights(path, allow_pickle))


def _folder(path: Path, allow_pickle: bool) -> Source:
    if not is_model_folder(path):
        return _without_class(path, read_weights(path, allow_pickle))
    loaded = load_folder(path, allow_pickle)
    names = tuple(loaded.example) or loaded.names(None, 1)
    example = tuple(loaded.example.values()) or None
    return Source(
        HUGGING_FACE,
        path,
        loaded.module(names),
        example=example,
        names=names,
        sizes=loaded.sizes,
        folder=loaded,
    )


def _without_class(path: Path, weights: Weights) -> Source:
    if weights.module is not None:
        return Source(weights.kind, path, weights.module)
    if is_adapter(weights):
        raise ModelRefused(f"{path}: {ADAPTER}")
    raise ModelRefused(
        f"{path}: a {weights.kind}, which is numbers without a model; name the model's class too: "
        "--model-file model.py, or --factory package.module:function"
    )


def _torchscript(path: Path, allow_pickle: bool) -> Source:
    with refusing(
        f"{path}: loading TorchScript", "save it again with torch.jit.save and this release of torch"
    ):
        try:
            return Source(TORCHSCRIPT, path, load_script(str(path), check=not allow_pickle))
        except UnsafeModel as error:
            raise ModelRefused(
                f"{path}: not loaded, because its code could read or write any file: {error}; take that out, "
                "or trust the file with --allow-pickle"
            ) from error


def _onnx(path: Path) -> Source:
    form = read_onnx(path)
    return Source(ONNX, path, signature=form.signature_by_names(), onnx=form)


def _program(path: Path, allow_pickle: bool) -> Source:
    try:
        ZipContainer(path, ArchiveLimits())  # one entry per name, nothing hidden: all readers see the same
        with open_regular(path) as file:
            check_program(file, path.stat().st_size, allow_pickle)
    except ArchiveError as error:
        raise ModelRefused(f"{path}: damaged: {error.reason}; export it again") from error
    except UnsafeModel as error:
        hint = (
            "trust the file with --allow-pickle"
            if "pickle" in str(error)
            else "write it with torch.export.save"
        )
        if "torchao." in str(error):
            hint = (
                "its weights are tensors of torchao: give the model itself, or call "
                "torchao.utils.unwrap_tensor_subclass(model) before torch.export"
            )
        raise ModelRefused(f"{path}: not loaded, because that could run code: {error}; {hint}") from error
    with refusing(f"{path}: loading the exported program", "export it again with this release of torch"):
        importlib.import_module(INT8_OPERATORS)
        program = torch.export.load(path)
        take_by_position(program)
        module = unguarded_module(program)
    tensors, _ = program.example_inputs or ((), {})
    plain = bool(tensors) and all(isinstance(item, torch.Tensor) for item in tensors)
    names = tuple(str(name) for name in program.graph_signature.user_inputs)
    return Source(EXPORTED_PROGRAM, path, module, program, tuple(tensors) if plain else None, names)


def _aotinductor(path: Path) -> Source:
    """Check whether machine code suits this machine, without loading it."""
    machine = aoti_metadata(path).get("AOTI_MACHINE") or platform.machine()
    if machine != platform.machine():
        raise ModelRefused(
            f"{path}: compiled for {machine}, and this machine is {platform.machine()}; compile it again here"
        )
    return Source(AOTINDUCTOR, path)


def aoti_metadata(path: Path) -> dict[str, str]:
    """Return the compiler's metadata of an AOTInductor package: AOTI_CPU_ISA, AOTI_MACHINE, ...; or {}.

    Raises:
        ModelRefused: the package is damaged.
    """
    try:
        ZipContainer(path, ArchiveLimits())
        with zipfile.ZipFile(path) as package:
            notes = [name for name in package.namelist() if name.endswith("wrapper_metadata.json")]
            found = json.loads(package.read(notes[0])) if notes else {}
    except ArchiveError as error:
        raise ModelRefused(f"{path}: damaged: {error.reason}; compile it again") from error
    except (*DAMAGED, ValueError) as error:
        raise ModelRefused(f"{path}: damaged: {error}; compile it again") from error
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}


def _ready(source: Source, kept: bool) -> Source:
    module = source.module
    if module is None:
        return source
    if not kept and source.program is None and not isinstance(module, torch.jit.ScriptModule):
        module = unwrapped(module)
        source = replace(source, module=module)
    _in_eval_mode(module)
    return source


def _in_eval_mode(module: torch.nn.Module) -> torch.nn.Module:
    if not isinstance(module, torch.jit.ScriptModule):
        for part in module.modules():
            part.training = False  # as eval() does, which exported programs refuse
            # Observers of a model trained for int8 would record each run, in eval mode, too.
            disable_observer(part)  # type: ignore[no-untyped-call]
    elif getattr(module, "training", False):  # frozen modules have no such attribute
        module.eval()
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    return module


def input_names(module: Any, count: int) -> tuple[str, ...]:
    """Return names of the first `count` inputs: the parameters of `forward`, otherwise `input_0`, ...

    `module` is None for a model in whose file the inputs have no names.
    """
    found: list[str] = []
    if isinstance(module, torch.jit.ScriptModule):
        schema: Any = module.forward
        found = [argument.name for argument in schema.schema.arguments[1:]]
    elif module is not None:
        parameters = inspect.signature(module.forward).parameters.values()
        plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        found = [parameter.name for parameter in parameters if parameter.kind in plain]
        _refuse_keyword_only(parameters, count - len(found))
    if len(found) < count:
        return ("input",) if count == 1 else tuple(f"input_{index}" for index in range(count))
    return tuple(found[:count])


def inputs_up_to(module: Any, given: Sequence[str] | None, least: int) -> int:
    """Return the number of inputs of `forward` up to the last one in `given`, but at least `least`."""
    if given is None or module is None or isinstance(module, torch.jit.ScriptModule):
        return least
    known = list(inspect.signature(module.forward).parameters)
    return max([least, *(known.index(name) + 1 for name in given if name in known)])


def _refuse_keyword_only(parameters: Iterable[inspect.Parameter], missing: int) -> None:
    kinds = {parameter.kind for parameter in parameters}
    named = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    if missing > 0 and named and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise ModelRefused(
            f"forward takes {', '.join(named)} by keyword only, and a server gives inputs in their order; "
            "take the * out of its parameters"
        )


def as_in_archive(source: Source, options: BuildOptions, say: Say) -> Source:
    """Return the source with the input names of the archive's signature, and an example made from it.

    Clients use these names, and an exported program has others. If the user or the source gives an example,
    that one is kept; otherwise the signature's free sizes vary, too, except for a program, which has its own.

    Raises:
        ModelRefused: the file holds no signature, or no example can be made of it; or an option is wrong.
    """
    path = options.example_signature
    signature = signature_at(path) if path is not None else None
    if signature is None:
        return source
    names = tuple(spec.name for spec in signature.inputs)
    source = replace(source, names=names)
    if options.example is not None or source.example is not None:
        return source
    example = example_of(signature, asked_sizes(options, names)).tensors
    source = replace(source, example=example)
    if source.program is not None:
        return source
    return replace(source, sizes=_sizes_in_archive(signature, options, example, say))


def _sizes_in_archive(
    signature: Signature, options: BuildOptions, example: Tensors, say: Say
) -> tuple[FreeSize, ...]:
    """Return the signature's free sizes that no option names.

    The example is made from the signature with arbitrary sizes. A model that is packed for only these sizes
    would refuse requests that the old archive accepted.
    """
    signed, names = signed_sizes(signature), [spec.name for spec in signature.inputs]
    if signed and signed[0].name == BATCH and signed[0].high == LARGEST:
        if options.model_format in (EXPORT, AOTI):  # a program has a largest batch
            signed[0] = replace(signed[0], high=signed[0].smallest(_BATCH))
        elif signed[0].multiple == 1:  # TorchScript is tried with other batches without an option
            del signed[0]
    kept = tuple(free for free in sizes_of(options, names, example, signed) if free in signed)
    if kept:
        told = ", ".join(f"{free.option(names)}={free.text}" for free in kept)
        say(f"varying, since the archive's signature leaves it free: {told}; --dynamic changes that")
    return kept


def source_with_example(source: Source, options: BuildOptions, say: Say) -> tuple[Source, Tensors | None]:
    """Return the source with the names of the example's inputs, and the example (None without one).

    Args:
        source: the model; it may have an example of its own.
        options: the user's example and samples; if there is no other example, the first sample is used.
        say: receives lines about the example that was chosen.

    Raises:
        ModelRefused: the example is invalid, or has other inputs than the model.
        OSError: the example can't be read.
    """
    example = _chosen(source, options, say)
    if example is None:
        _tell_made_up(source, say)
        return source, source.example
    source = source.taking(example.names, len(example.tensors))
    names = source.signature.inputs if source.signature else None
    count = inputs_up_to(source.module, example.names, len(example.tensors))
    wanted = [spec.name for spec in names] if names else source.names_of_inputs(count)
    tensors = example.ordered(wanted)
    if not options.dynamic_sizes:
        _tell_fixed_lengths(source, tensors, say)
    return source, tensors


def _chosen(source: Source, options: BuildOptions, say: Say) -> Example | None:
    path = options.example
    if path is None and source.example is None and options.samples is not None:
        path = files_of(options.samples)[0]
        say(f"the example: {path}, the first of --samples, since --example is not given")
    if path is None:
        return None
    example = read_example(path, doubles=source.doubles, prepare=options.prepare)
    if example.unprepared:
        say(_UNPREPARED)
    return example


def _tell_made_up(source: Source, say: Say) -> None:
    if source.folder is None or source.example is None:
        return
    inputs = ", ".join(source.names_of_inputs(len(source.example)))
    say(
        f"tried with made-up inputs ({inputs}), since --example is not given: lengths of texts vary, "
        "and all other sizes but the batch are fixed"
    )
    if left_out := ", ".join(source.folder.left_out):
        say(f"without {left_out}, since the folder's tokenizer does not make it; an --example may have it")


def _tell_fixed_lengths(source: Source, example: Tensors, say: Say) -> None:
    """Tell the user which option lets the lengths of texts vary, because an example fixes them."""
    names = source.names_of_inputs(len(example))
    for free in source.folder.lengths(names, example) if source.folder is not None else ():
        now = free.size_in(example)
        most = free.high if free.high < LARGEST else max(_LENGTH, now)
        inputs = ",".join(names[place] for place, _ in free.places)
        say(f"texts have {now} tokens, as in the example; --dynamic {inputs}.1=1:{most} lets that vary")
