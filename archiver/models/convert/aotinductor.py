"""`--format aoti`: machine code for a CPU, compiled ahead of time by AOTInductor."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.convert.exported_program import free_sizes
from torchere.archiver.models.inputs.sizes import BATCH, Tensors, resized
from torchere.archiver.models.load.source import aoti_metadata
from torchere.archiver.models.measure.cost import Model, one_thread, quick_ms
from torchere.archiver.models.measure.difference import difference, flattened
from torchere.archiver.models.steps import Say

# Parts that a multiplication by template is cut into, each done by one thread: at most so many threads work
# at one. Inductor would take the cores of this machine, which need not be those of the server. One thread
# alone is up to 5 % faster with a single part.
_PARTS = 8
# `TEMPLATES` has no second backend, for then Inductor measures each shape itself: by the clock, on all cores,
# which takes a compiler run each and, on a busy machine, finds anything.
TEMPLATES: dict[str, Any] = {
    "max_autotune_gemm": True,
    "max_autotune_gemm_backends": "CPP",
    "cpp.threads": _PARTS,
}
_MULTIPLYING = ("aten::linear", "aten::addmm", "aten::mm")
_BATCHES = (1, 8)
_BUDGET_S = 4.0  # of timing, for each batch size and both
_EQUAL = 0.95  # the ratio of two equal models may come out as low, on a machine that has other work
_GAIN = 1.03  # on the geometric mean, what makes another build worth it
_MOST_DRIFT = 1e-4  # both compute in fp32 and add up in another order


@dataclass(frozen=True, slots=True)
class Timed:
    """Milliseconds for a run of both builds, on one thread, for each of `_BATCHES` that the program takes."""

    plain_ms: tuple[float, ...]
    templates_ms: tuple[float, ...]
    drift: float = 0.0  # of the answers of one from those of the other

    @property
    def templates_win(self) -> bool:
        """Whether they are faster taken together, not slower at any size, and the answers are the same."""
        ratios = [plain / other for plain, other in zip(self.plain_ms, self.templates_ms, strict=True)]
        if not ratios or not self.drift <= _MOST_DRIFT:  # NaN is no drift to accept
            return False
        return min(ratios) >= _EQUAL and math.prod(ratios) ** (1 / len(ratios)) >= _GAIN

    def told(self) -> str:
        """One line for the user."""
        plain, other = (" / ".join(f"{ms:.3g}" for ms in one) for one in (self.plain_ms, self.templates_ms))
        chosen = "templates" if self.templates_win else "library"
        return (
            f"matrix multiplications: library {plain} ms, Inductor's templates {other} ms; chosen: {chosen}"
        )


def multiplies(program: ExportedProgram) -> bool:
    """Whether the program has linear layers in fp32."""
    return any(
        isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.name in _MULTIPLYING
        and node.meta["val"].dtype == torch.float32
        for node in program.graph.nodes
        if node.op == "call_function"
    )


def samples(program: ExportedProgram) -> list[Tensors]:
    """What to measure a build on: the program's example in batches of `_BATCHES`, as far as it takes them.

    The example as it is when the batch is fixed; nothing when it is not just tensors by position.
    """
    args, keywords = program.example_inputs or ((), {})
    if keywords or not args or not all(isinstance(one, torch.Tensor) for one in args):
        return []
    batch = next((size for size in free_sizes(program, args) if size.name == BATCH), None)
    if batch is None:
        return [args]
    return [resized(args, batch, size) for size in _BATCHES if batch.low <= size <= batch.high]


def timed(plain: Model, templates: Model, given: Sequence[Tensors]) -> Timed:
    """Measure both, in turns.

    Args:
        plain: the loaded build that calls the library.
        templates: the other.
        given: see `samples`; at least one.
    """
    with one_thread(), torch.inference_mode():
        answers = [(flattened(plain(*one)), flattened(templates(*one))) for one in given]
        times = [quick_ms([plain, templates], one, _BUDGET_S) for one in given]
    return Timed(tuple(one[0] for one in times), tuple(one[1] for one in times), difference(answers).drift)


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


_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # torch reads it each time, and sets it itself


@contextmanager
def private_cache(folder: Path) -> Iterator[None]:
    """Let Inductor cache below `folder` while the block runs, and remove all of it afterwards.

    Else a copy of the weights would stay in the system's temporary folder for each compilation, where others
    may read it. The headers that Inductor compiles ahead hold nothing of a model and take seconds: they stay
    where they are. One compilation in a process at a time.
    """
    from torch._inductor.utils import clear_inductor_caches  # noqa: PLC0415  # torch._inductor takes seconds

    before = os.environ.get(_VARIABLE)
    with tempfile.TemporaryDirectory(dir=folder, prefix="inductor-", ignore_cleanup_errors=True) as cache:
        clear_inductor_caches()  # what is remembered of files elsewhere
        os.environ[_VARIABLE] = cache
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(_VARIABLE, None)
            else:
                os.environ[_VARIABLE] = before
            clear_inductor_caches()
