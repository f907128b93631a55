"""The last build step: write or keep the model file, and write the metadata that servers need to load it."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.convert.aotinductor import compile_aoti, load_aoti
from torchere.archiver.models.convert.exported_program import free_sizes, save_program, to_program
from torchere.archiver.models.convert.torchscript import AS_PYTHON, to_torchscript
from torchere.archiver.models.inputs.buffers import is_same
from torchere.archiver.models.inputs.examples import check_against
from torchere.archiver.models.inputs.run import Run, copies, run_on
from torchere.archiver.models.inputs.sizes import FreeSize, Tensors, sizes_of
from torchere.archiver.models.load.exported_program import ServedProgram
from torchere.archiver.models.load.huggingface import files_to_serve
from torchere.archiver.models.load.module import file_to_serve, take_along
from torchere.archiver.models.load.source import EAGER, HUGGING_FACE, Source, aoti_metadata
from torchere.archiver.models.load.torchscript import save_script
from torchere.archiver.models.load.weight_only import INT4_FOR_A_PROCESSOR, has_4_bits, torchao_kinds
from torchere.archiver.models.probe.derive import signature_of
from torchere.archiver.models.probe.id_ranges import with_id_ranges
from torchere.archiver.models.probe.isolation import ModelEndedProcess
from torchere.archiver.models.steps import Say, refusing, step
from torchere.archiver.request import (
    AOTI,
    BUILD_NAME,
    EXPORT,
    FALLBACK_NAME,
    TORCHSCRIPT,
    BuildOptions,
    Built,
)
from torchere.archiver.scan import weights as kinds
from torchere.archiver.signature import Signature
from torchere.archiver.torchscript_options import TorchScriptOptions

_NOT_EXPORTED = f"change that in the model, or take --format torchscript; {AS_PYTHON}"
_NOT_COMPILED = f"take --format {EXPORT}, which is not compiled, or --format {TORCHSCRIPT}"
_NO_GRADIENTS = (
    "a server runs models in inference mode, in which nothing has gradients: where forward needs them, let "
    "it say `with torch.inference_mode(False), torch.enable_grad():` and clone its inputs there"
)
_FILES = {TORCHSCRIPT: "model.pt", EXPORT: "model.pt2", AOTI: "model.pt2"}


@dataclass(frozen=True)
class Packed:
    """The model file for the archive, the loaded model, and the folder of additional files."""

    file: Path
    run: Run  # the model as a server will run it
    beside: Path


def write_model(
    module: torch.nn.Module,
    program: torch.export.ExportedProgram | None,
    example: Tensors,
    sizes: Sequence[FreeSize],
    *,
    options: BuildOptions,
    work: Path,
    say: Say,
    script: bytes | None = None,
) -> Packed:
    """Compile the module to `options.model_format` and write it.

    Args:
        module: in eval mode.
        program: the exported program, if the module and `sizes` come unchanged from it.
        example: see `to_program`.
        sizes: the dynamic dimensions.
        options: `model_format` is TORCHSCRIPT, EXPORT or AOTI.
        work: a folder; files are written to `work/model` and `work/beside`.
        say: receives progress lines.
        script: the module's TorchScript file, which is written unchanged; None: the module is compiled.

    Raises:
        ModelRefused: a compiler rejects the model (with the first line of its error), or the disk is full.
    """
    beside = work / "beside"
    target = work / "model" / _FILES[str(options.model_format)]
    target.parent.mkdir()
    refuse_no_room(module, work, copies=2 if options.model_format == AOTI else 1)
    record = {"format": options.model_format, "torch": version()}
    run: Run = module
    if script is not None:
        with step(say, "writing the measured model"):
            target.write_bytes(script)
    elif options.model_format == TORCHSCRIPT:
        with step(say, "scripting and freezing" if options.script else "tracing and freezing"):
            run = frozen = to_torchscript(
                module, example, sizes=sizes, script=options.script, only_trace=options.trace, say=say
            )
            save_script(frozen, str(target))
    else:
        with step(say, "exporting", _NOT_EXPORTED):
            exported = program or to_program(module, example, sizes)
            if options.model_format == EXPORT:
                save_program(exported, target)
                run = ServedProgram(exported)
        if options.model_format == AOTI:
            if exported.example_inputs is None:  # saved by `save_program`; the compiler needs them
                exported.example_inputs = (tuple(example), {})
            with step(say, "compiling with AOTInductor", _NOT_COMPILED):
                freezing = _freezing(module, options)
                isa = compile_aoti(exported, target, options.isa, say, freezing=freezing).isa
                run = _loaded(target, example, say)
            save_program(exported, beside / FALLBACK_NAME)
            record |= {"isa": needed_isa(isa, exported), "fallback": FALLBACK_NAME}
            if has_4_bits(exported):
                record["weights_for"] = torch.backends.cpu.get_cpu_capability()
    write_build(beside, record)
    return Packed(target, run, beside)


def _loaded(target: Path, example: Tensors, say: Say) -> Run:
    """Load a package; warn if it writes into its inputs, as some int8 models compiled by torch 2.13 do."""
    run: Run = load_aoti(target)
    if changes_inputs(run, example):
        say(
            "compiled, the model writes into its inputs: a handler of your own that reads them behind the "
            "model has to copy them first; --format torchscript leaves them alone"
        )
    return run


_SMALL = (torch.int8, torch.uint8, torch.int16)


def needed_isa(isa: str, program: torch.export.ExportedProgram) -> str:
    """Return the instruction sets of `isa` that the compiled program needs.

    VNNI multiplies integers of 8 and 16 bits, so a program without such tensors does not need it.
    """
    values = pytree.tree_leaves([node.meta.get("val") for node in program.graph.nodes])
    if any(isinstance(one, torch.Tensor) and one.dtype in _SMALL for one in values):
        return isa
    return " ".join(name for name in isa.split() if name != "avx512_vnni") or "avx512"


def changes_inputs(run: Run, example: Tensors) -> bool:
    """Return whether a run of the model changes the tensors that it gets."""
    given = copies(example)
    with torch.no_grad():
        run(*given)
    return not all(map(is_same, given, example))


def _freezing(module: torch.nn.Module, options: BuildOptions) -> bool | None:
    if kinds := torchao_kinds(module):
        # Freezing would fold 8-bit weights to fp32; 4-bit weights need it to be packed for the processor.
        return kinds == INT4_FOR_A_PROCESSOR
    return True if options.quantize else None


# Allowance for the rest of a file: the graph or code, and the header of each tensor. Its true size is known
# only when the file is written.
_OTHER_SHARE, _OTHER_BYTES = 0.01, 4e6


def refuse_no_room(module: torch.nn.Module, work: Path, copies: int = 1) -> None:
    """Raise ModelRefused if the disk space or the file size limit is too small for the model's file.

    If a write fails, torch's writer ends the process.
    """
    weights = sum({id(one): one.nbytes for one in (*module.parameters(), *module.buffers())}.values())
    size = (1 + _OTHER_SHARE) * weights + _OTHER_BYTES
    needed, free, limit = copies * size, shutil.disk_usage(work).free, _largest_file()
    if size > limit:
        raise ModelRefused(
            f"the model takes {size / 1e6:.0f} MB, and a file of this process may have {limit / 1e6:.0f} MB; "
            "raise the limit of its shell (ulimit -f)"
        )
    if needed > free:
        raise ModelRefused(
            f"the model takes {needed / 1e6:.0f} MB while it is made, and {work.parent} has room for "
            f"{free / 1e6:.0f} MB; make room there, or name another folder in TMPDIR"
        )


def _largest_file() -> float:
    """Return the maximum size in bytes of a file that this process writes."""
    try:
        import resource  # noqa: PLC0415  # Windows has none
    except ImportError:
        return math.inf
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return math.inf if limit == resource.RLIM_INFINITY else limit


def write_build(beside: Path, record: dict[str, Any]) -> None:
    """Write `MAR-INF/build.json`."""
    path = beside / BUILD_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2), encoding="utf-8")


def version() -> str:
    """Return the version of torch without its build suffix, which is irrelevant to a model."""
    return torch.__version__.partition("+")[0]


# Reads and adds the section `torchscript` of the user's model-config.yaml.
#
# The archiver has no YAML parser. It finds the section if its name begins a line, as is usual, and the
# members if each has a line of its own or all are in braces.

_NAME = re.compile(r"""["']?torchscript["']?:""")
# `autocast` with a value disables the optimisation; `autocast: null` does not.
_AUTOCAST = re.compile(
    r"""^["']?autocast["']?:(?![ \t]*(null|~)?[ \t]*(#.*)?$)""", re.MULTILINE | re.IGNORECASE
)
# YAML's words for true, false and null, in lower case.
_TRUE, _NOT_TRUE = ("true", "yes", "on"), ("false", "no", "off", "null", "~", "")
_COMMENT = re.compile(r"(^|\s)#.*")


def config_with(config: Path | None, options: TorchScriptOptions, work: Path) -> Path | None:
    """Write a copy of the configuration with the load options added; return `config` if it has them all.

    Raises:
        ModelRefused: options must be added, but `config` already has a `torchscript` section, or is written
            in a YAML form that allows no further section.
    """
    section = _section(config)
    said = {f"{name}: {value}" for name, value in (section or {}).items()}
    if says_optimize(config):
        said.add("optimize_for_inference: true")
    missing = [line for line in options.lines() if line not in said]
    if not missing:
        return config
    if section is not None or not takes_sections(config_text(config)):
        where = "has a torchscript section that lacks" if section is not None else "lacks"
        raise ModelRefused(
            f"{config} {where} what measured best; add to its section torchscript: {', '.join(missing)}"
        )
    return with_section(config, "\n".join(["torchscript:", *(f"  {line}" for line in missing)]), work)


def with_section(config: Path | None, section: str, work: Path) -> Path:
    """Write a copy of the configuration with a section at its end."""
    text = config_text(config)
    made = work / (config.name if config else "model-config.yaml")
    separator = "" if not text or text.endswith("\n") else "\n"
    made.write_text(f"{text}{separator}{section}\n", encoding="utf-8")
    return made


def _section(config: Path | None) -> dict[str, str] | None:
    """Return the values of the section `torchscript` as text, by name; None without that section."""
    found: dict[str, str] | None = None
    inside = False
    for line in config_text(config).splitlines():
        said = _COMMENT.sub("", line)
        if said[:1] not in (" ", ""):
            inside = _NAME.match(said) is not None
            found = {} if inside else found
        if inside and found is not None:
            for member in _NAME.sub("", said).split(","):
                name, _, value = member.strip(" {}").partition(":")
                found[name.strip(" \"'")] = value.strip()
    return found


def says_optimize(config: Path | None) -> bool:
    """Return whether the `torchscript` section says `optimize_for_inference: true`."""
    return (_section(config) or {}).get("optimize_for_inference", "").lower() in _TRUE


def check_section(config: Path | None) -> None:
    """Raise ModelRefused if a server would refuse to load the model with the `torchscript` section."""
    said = _section(config) or {}
    optimize, engine = said.get("optimize_for_inference", ""), said.get("quantized_engine", "")
    if optimize.lower() not in (*_TRUE, *_NOT_TRUE):
        raise ModelRefused(
            f"{config}: torchscript.optimize_for_inference is {optimize}; expected true or false"
        )
    engines = torch.backends.quantized.supported_engines
    if engine.lower() not in _NOT_TRUE and engine.strip("\"'") not in engines:
        raise ModelRefused(
            f"{config}: torchscript.quantized_engine is {engine}; expected one of {', '.join(engines)}"
        )


def may_say(config: Path | None) -> bool:
    """Return whether a `torchscript` section can be added: `config` has none, and does not use autocast."""
    text = config_text(config)
    return _section(config) is None and takes_sections(text) and not _AUTOCAST.search(text)


def takes_sections(text: str) -> bool:
    """Return whether a section can be appended: not to a flow mapping, a list or several documents."""
    starts = [line[:1] for line in text.splitlines() if line.strip()]
    return not {"{", "[", "-", "."} & set(starts)


def config_text(config: Path | None) -> str:
    """Return the text of a configuration; "" without one. Raise ModelRefused if it is not UTF-8."""
    try:
        return config.read_text(encoding="utf-8") if config else ""
    except UnicodeDecodeError as error:
        raise ModelRefused(f"{config} is not UTF-8: {error}") from error


# `--format keep`: the model is packed in its original format.

_LOADABLE = (kinds.TORCHSCRIPT, kinds.EXPORTED_PROGRAM, kinds.AOTINDUCTOR, kinds.ONNX)


def keep(
    source: Source, example: Tensors | None, options: BuildOptions, work: Path, say: Say
) -> tuple[Built, Signature | None]:
    """Return the files that pack the source model unchanged, and the model's signature if it is known.

    Args:
        source: the loaded source model.
        example: example inputs to derive a signature from; ONNX has a signature of its own.
        options: the files that belong to the source, and the sizes that the signature leaves free.
        work: new files are written to `work/beside`.
        say: receives a line if the model does not accept batches.

    Raises:
        ModelRefused: the server could not load the model, or the example does not fit it.
    """
    built = _built(source, options, work)
    if source.signature is not None:
        if example is not None:
            check_against(example, source.signature)
        return built, source.signature
    if example is None:
        return built, None
    return built, _signature(source, example, options, say)


def can_be_kept(source: Source, options: BuildOptions) -> bool:
    """Return whether a server can load the source in its original format."""
    if source.kind == HUGGING_FACE and options.parallel is not None:
        return True
    return source.kind in _LOADABLE or (source.kind == EAGER and options.model_file is not None)


def _built(source: Source, options: BuildOptions, work: Path) -> Built:
    beside = work / "beside"
    if source.kind == EAGER and options.model_file is not None:
        take_along(options.model_file, beside)
        module: Any = source.module
        model_file = file_to_serve(options.model_file, module, work, beside)
        return Built(_state_file(source, options, work), model_file, options.config_file, beside)
    if source.kind == HUGGING_FACE and options.parallel is not None:
        return Built(None, None, options.config_file, beside, files_to_serve(source.path))
    if source.kind == kinds.AOTINDUCTOR:
        isa = aoti_metadata(source.path).get("AOTI_CPU_ISA", "").lower()
        write_build(beside, {"format": AOTI, "isa": isa})
    if source.kind in _LOADABLE:
        data = source.onnx.beside if source.onnx else ()
        return Built(_with_suffix(source, work), None, options.config_file, beside, data)
    raise ModelRefused(
        f"{source.path}: {source.kind} is not a form that a server loads by itself; expected --format "
        "torchscript, export or aoti, or a --handler of your own that loads it from --extra-files"
    )


def _with_suffix(source: Source, work: Path) -> Path:
    """Return the file, or a link to it with the suffix by which the server selects the loader."""
    wanted = {kinds.TORCHSCRIPT: ".pt", kinds.ONNX: ".onnx"}.get(source.kind, ".pt2")
    if source.path.suffix == wanted:
        return source.path
    link = work / f"{source.path.stem}{wanted}"
    link.symlink_to(source.path.resolve())
    return link


def _state_file(source: Source, options: BuildOptions, work: Path) -> Path | None:
    """Return a file with the weights as a plain state dict, or None if the source has no weights file.

    A server loads a state dict only if the archive has a model file.
    """
    path = options.serialized_file
    module: Any = source.module
    if path is None:
        return None
    given = kinds.classify_file(path) if path.is_file() else None
    if given is not None and given.kind == kinds.TORCH_SAVE and not given.foreign:
        found = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(found, dict) and found.keys() == module.state_dict().keys():
            return path
    made = work / "model.pth"
    refuse_no_room(module, work)
    torch.save(module.state_dict(), made)
    return made


def default_sizes(source: Source) -> list[FreeSize]:
    """Return the sizes that vary without an option: those of the exported program, or of the source."""
    return list(source.sizes) if source.program is None else free_sizes(source.program)


def _signature(source: Source, example: Tensors, options: BuildOptions, say: Say) -> Signature:
    run = _run(source, options)
    names = source.names_of_inputs(len(example))
    sizes = sizes_of(options, names, example, default_sizes(source))
    served = _in_inference_mode(run) if source.kind == EAGER else run
    with step(say, "trying sizes and batches"):
        try:
            found = signature_of(served, example, names, sizes, probe_batch=source.program is None, say=say)
        except ModelEndedProcess:
            raise
        except ModelRefused as refusal:
            if served is run or _runs(served, example) or not _runs(run, example):
                raise
            raise ModelRefused(f"{str(refusal).partition(';')[0]}; {_NO_GRADIENTS}") from refusal
        return with_id_ranges(found, run, example)


def _in_inference_mode(run: Run) -> Run:
    """Return the model as a server runs it: in inference mode, in which gradients can't be enabled."""

    def served(*inputs: torch.Tensor) -> Any:
        with torch.inference_mode():
            return run(*inputs)

    return served


def _runs(run: Run, example: Tensors) -> bool:
    try:
        run_on(run, example)
    except ModelRefused:
        return False
    return True


def _run(source: Source, options: BuildOptions) -> Run:
    if source.module is not None:
        return ServedProgram(source.program) if source.program is not None else source.module
    if not options.allow_pickle:
        raise ModelRefused(
            f"{source.path}: to derive a signature its machine code would have to run; trust it with "
            "--allow-pickle, or name a --handler and leave --example out"
        )
    with refusing(f"{source.path}: loading the AOTInductor package"):
        run: Run = load_aoti(source.path)
    return run
