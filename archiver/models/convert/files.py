"""The last build step: write the model file and the metadata that the server needs to load it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.convert.aotinductor import compile_aoti, load_aoti
from torchere.archiver.models.convert.exported_program import save_program, to_program
from torchere.archiver.models.convert.torchscript import to_torchscript
from torchere.archiver.models.inputs.run import Run
from torchere.archiver.models.inputs.sizes import FreeSize, Tensors
from torchere.archiver.models.steps import Say, step
from torchere.archiver.request import AOTI, BUILD_NAME, EXPORT, FALLBACK_NAME, TORCHSCRIPT, BuildOptions
from torchere.archiver.torchscript_options import TorchScriptOptions

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
        program: the exported program that the module comes from, if the module is unchanged and no other
            dynamic dimensions are requested.
        example: see `to_program`.
        sizes: the dynamic dimensions.
        options: `model_format` is TORCHSCRIPT, EXPORT or AOTI.
        work: a folder; files are written to `work/model` and `work/beside`.
        say: receives progress lines.
        script: the file of the module, which is TorchScript; it is written as it is.

    Raises:
        ModelRefused: a compiler rejects the model (the message has the first line of its error), or the disk
            has too little space.
    """
    beside = work / "beside"
    target = work / "model" / _FILES[str(options.model_format)]
    target.parent.mkdir()
    refuse_full_disk(module, work, copies=2 if options.model_format == AOTI else 1)
    if script is not None:
        with step(say, "writing the measured model"):
            target.write_bytes(script)
        write_build(beside, {"format": TORCHSCRIPT, "torch": version()})
        return Packed(target, module, beside)
    if options.model_format == TORCHSCRIPT:
        with step(say, "scripting and freezing" if options.script else "tracing and freezing"):
            frozen = to_torchscript(module, example, script=options.script, say=say)
            frozen.save(str(target))
        write_build(beside, {"format": TORCHSCRIPT, "torch": version()})
        return Packed(target, frozen, beside)
    with step(say, "exporting"):
        exported = program or to_program(module, example, sizes)
        if options.model_format == EXPORT:
            save_program(exported, target)
    if options.model_format == EXPORT:
        write_build(beside, {"format": EXPORT, "torch": version()})
        return Packed(target, exported.module(), beside)
    if exported.example_inputs is None:  # saved by `save_program`; the compiler needs them
        exported.example_inputs = (tuple(example), {})
    with step(say, "compiling with AOTInductor"):
        freezing = True if options.quantize else None
        isa = compile_aoti(exported, target, options.isa, say, freezing=freezing).isa
        compiled = load_aoti(target)
    save_program(exported, beside / FALLBACK_NAME)
    write_build(beside, {"format": AOTI, "torch": version(), "isa": isa, "fallback": FALLBACK_NAME})
    return Packed(target, compiled, beside)


def refuse_full_disk(module: torch.nn.Module, work: Path, copies: int = 1) -> None:
    """Raise ModelRefused if the disk space is too small: torch's writer ends the process on a full disk."""
    weights = {id(one): one.nbytes for one in (*module.parameters(), *module.buffers())}
    needed, free = copies * sum(weights.values()), shutil.disk_usage(work).free
    if needed > free:
        raise ModelRefused(
            f"the model takes {needed / 1e6:.0f} MB while it is made, and {work.parent} has room for "
            f"{free / 1e6:.0f} MB; make room there, or name another folder in TMPDIR"
        )


def write_build(beside: Path, record: dict[str, Any]) -> None:
    """Write `MAR-INF/build.json`."""
    path = beside / BUILD_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2), encoding="utf-8")


def version() -> str:
    """Return the version of torch without its build suffix, which is irrelevant to a model."""
    return torch.__version__.partition("+")[0]


# The section `torchscript` in a model-config.yaml of the user's: read, and added.
#
# The archiver knows no YAML: it finds the section where it begins a line, as it mostly does, and its
# members where each has a line of its own or all stand in braces.

_NAME = re.compile(r"""["']?torchscript["']?:""")
_AUTOCAST = re.compile(r"""^["']?autocast["']?:""", re.MULTILINE)  # it disables the optimisation
_COMMENT = re.compile(r"(^|\s)#.*")


def config_with(config: Path | None, options: TorchScriptOptions, work: Path) -> Path | None:
    """Write a copy of the configuration with the load options added; return `config` if it needs none.

    Raises:
        ModelRefused: `config` has a `torchscript` section that lacks some of the options, or its YAML form
            does not allow another section.
    """
    text, members = _text(config), members_of(config)
    missing = [line for line in options.lines() if line not in (members or ())]
    if not missing:
        return config
    if members is not None or not _takes_sections(text):
        where = "has a torchscript section that lacks" if members is not None else "lacks"
        raise ModelRefused(
            f"{config} {where} what measured best; add to its section torchscript: {', '.join(missing)}"
        )
    made = work / (config.name if config else "model-config.yaml")
    separator = "" if not text or text.endswith("\n") else "\n"
    added = "".join(f"  {line}\n" for line in missing)
    made.write_text(f"{text}{separator}torchscript:\n{added}", encoding="utf-8")
    return made


def members_of(config: Path | None) -> set[str] | None:
    """Return the members of the `torchscript` section, each as `name: value`; None without a section."""
    found: set[str] | None = None
    inside = False
    for line in _text(config).splitlines():
        said = _COMMENT.sub("", line)
        if said[:1] not in (" ", ""):
            inside = _NAME.match(said) is not None
            found = set() if inside else found
        if inside and found is not None:
            found.update(part.strip(" {}") for part in _NAME.sub("", said).split(","))
    return found


def may_say(config: Path | None) -> bool:
    """Return whether `config` can get a `torchscript` section: it has none, and does not use autocast."""
    text = _text(config)
    return members_of(config) is None and _takes_sections(text) and not _AUTOCAST.search(text)


def _takes_sections(text: str) -> bool:
    """Return whether a section can be appended: not after a flow mapping, a list or several documents."""
    starts = [line[:1] for line in text.splitlines() if line.strip()]
    return not {"{", "[", "-", "."} & set(starts)


def _text(config: Path | None) -> str:
    try:
        return config.read_text(encoding="utf-8") if config else ""
    except UnicodeDecodeError as error:
        raise ModelRefused(f"{config} is not UTF-8: {error}") from error
