"""`--format aoti`: machine code for a CPU, compiled ahead of time by AOTInductor."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.aoti_candidates import TEMPLATES, Timed, multiplies, samples, timed
from torchere.archiver.models.dynamic import Tensors
from torchere.archiver.models.inductor_cache import private_cache
from torchere.archiver.models.sources import aoti_metadata
from torchere.archiver.models.steps import Say

# The compiler may use what every CPU of the level has, and no more: "native" would tie the archive to this
# very model of CPU. x86-64-v3 is AVX2 with FMA and F16C, x86-64-v4 AVX-512 F, BW, CD, DQ, VL (x86-64 psABI).
_LEVELS = {"avx2": ("x86-64-v3", 256), "avx512": ("x86-64-v4", 512)}
# What gains by packing weights while compiling: oneDNN's convolutions and LSTM. Linear layers lose by it, for
# with a free batch they would leave MKL's multiplication for oneDNN's, which is slower for few rows.
_PACKED = ("aten::conv", "aten::_conv", "aten::lstm")


@dataclass(frozen=True, slots=True)
class Compiled:
    """What became of a program. `timed` is None unless two builds of it were compared."""

    isa: str  # the instruction set that it needs, lower case
    frozen: bool
    timed: Timed | None = None


def compile_aoti(
    program: ExportedProgram, path: Path, isa: str | None, say: Say, *, freezing: bool | None = None
) -> Compiled:
    """Compile the program into the package `path`.

    A program of linear layers that is not frozen is compiled twice, see `aoti_candidates`; the faster build
    stays.

    Args:
        program: for the CPU, with its example inputs.
        path: must end in `.pt2`.
        isa: "avx2" or "avx512"; None: the best that this machine has.
        say: takes lines about progress.
        freezing: fold and pack constants while compiling, which int8 needs to be fast; None: when the model
            has layers that gain by it.

    Raises:
        ModelRefused: this machine lacks the instruction set, which the compiler tries out.
        Exception: whatever the compilers have to say.
    """
    frozen = gains_by_freezing(program) if freezing is None else freezing
    settings = _settings(isa, frozen)
    with private_cache(path.parent):
        _compile(program, path, settings)
        given = [] if frozen or not multiplies(program) else samples(program)
        found = _with_templates(program, path, settings, given, say) if given else None
    return Compiled(aoti_metadata(path).get("AOTI_CPU_ISA", "").lower(), frozen, found)


def gains_by_freezing(program: ExportedProgram) -> bool:
    """Whether the program, in fp32, has convolutions or LSTMs."""
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    names = [one._schema.name for one in targets if isinstance(one, torch._ops.OpOverload)]
    return any(name.startswith(_PACKED) for name in names)


def load_aoti(path: Path) -> Any:
    """The package as a function of tensors; its machine code is loaded into this process."""
    return torch._inductor.aoti_load_package(str(path))


def _compile(program: ExportedProgram, path: Path, settings: dict[str, Any]) -> None:
    with torch._inductor.config.patch(settings), torch.no_grad():
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))


def _with_templates(
    program: ExportedProgram, path: Path, settings: dict[str, Any], given: Sequence[Tensors], say: Say
) -> Timed | None:
    """Compile once more, and put the result in the place of `path` if it is the faster.

    None when this can't be compiled: Inductor refuses a program with one multiplication that templates can't
    do, of doubles for example.
    """
    say("compiling again with Inductor's own matrix multiplication, to compare ...")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        other = Path(folder) / path.name
        try:
            _compile(program, other, settings | TEMPLATES)
        except RuntimeError as error:  # of which all of Inductor's are
            say(f"that can't be compiled ({type(error).__name__}); the library's multiplication stays")
            return None
        found = timed(load_aoti(path), load_aoti(other), given)
        say(found.told())
        if found.templates_win:
            os.replace(other, path)
    return found


def _settings(isa: str | None, freezing: bool) -> dict[str, Any]:
    import torch._inductor.config  # noqa: PLC0415  # torch._inductor takes seconds
    from torch._inductor.cpu_vec_isa import pick_vec_isa, valid_vec_isa_list  # noqa: PLC0415

    found = {str(item) for item in valid_vec_isa_list()}
    if isa is not None and isa not in found:
        raise ModelRefused(f"--isa is {isa}, and this machine has {', '.join(sorted(found)) or 'none'}")
    wanted = isa or str(pick_vec_isa()).partition(" ")[0]  # "avx512 avx512_vnni": the level comes first
    # The kernels ask how many threads they may use, instead of taking the number of this machine. All of
    # them are one file for the C++ compiler, so more processes than one would only start and wait.
    settings: dict[str, Any] = {"cpp.dynamic_threads": True, "freezing": freezing, "compile_threads": 1}
    if hasattr(torch._inductor.config.aot_inductor, "check_lowerbound"):
        # Export can not see a size of 1 and notes 2 as the least; the code runs with 1, too.
        settings["aot_inductor.check_lowerbound"] = False
    if wanted in _LEVELS:
        march, bits = _LEVELS[wanted]
        settings["cpp.simdlen"] = bits
        if hasattr(torch._inductor.config.cpp, "march"):  # torch 2.12 on
            settings["cpp.march"] = march
    return settings
