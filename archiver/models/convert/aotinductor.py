"""`--format aoti`: machine code for a CPU, compiled ahead of time by AOTInductor."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.convert.exported_program import free_sizes, hide_from
from torchere.archiver.models.inputs.run import Run
from torchere.archiver.models.inputs.sizes import LARGEST, FreeSize, Tensors, resized
from torchere.archiver.models.load.source import aoti_metadata
from torchere.archiver.models.load.weight_only import INPUTS_OF_8_BITS
from torchere.archiver.models.measure.cost import BATCH_SIZES, one_thread, processor_ms
from torchere.archiver.models.measure.difference import answers, difference
from torchere.archiver.models.steps import Say, line_of

# Two ways to multiply matrices in a program that AOTInductor compiles, and the choice of the faster one.
#
# In the plain build, each multiplication is a call of the BLAS library that torch was built with (MKL on
# x86). With Inductor's own C++ templates, multiplications are compiled into the package: weights lie in the
# order in which they are read, and the operations that follow (bias, GELU, a residual) are done before the
# result leaves the cache. The faster way depends on the shapes and on the CPU, so both are measured.

# The number of parts into which a template splits a multiplication, and so the maximum number of threads:
# each part runs on one thread. Inductor's default is the core count of this machine, which can differ from
# the server's. On a single thread, an undivided multiplication would be up to 5 % faster.
_PARTS = 8
# `TEMPLATES` names a single backend: with two, Inductor benchmarks each shape itself, on all cores. That
# takes a compiler run per shape, and its result is arbitrary on a busy machine.
TEMPLATES: dict[str, Any] = {
    "max_autotune_gemm": True,
    "max_autotune_gemm_backends": "CPP",
    "cpp.threads": _PARTS,
}
_MULTIPLYING = ("aten::linear", "aten::addmm", "aten::mm")
_BUDGET_S = 4.0  # timing budget per batch size, for both builds together
_EQUAL = 0.95  # on a busy machine, the measured ratio of two equal models can be this low
_GAIN = 1.03  # minimum geometric mean of the speed-ups for the templates to be chosen
_MOST_DRIFT = 1e-4  # both builds compute in fp32 and differ only in the order of sums


@dataclass(frozen=True, slots=True)
class Timed:
    """Milliseconds per run of both builds, on one thread, for each of `BATCH_SIZES` that the program has."""

    plain_ms: tuple[float, ...]
    templates_ms: tuple[float, ...]
    drift: float = 0.0  # between the outputs of the two builds

    @property
    def templates_win(self) -> bool:
        """Whether the templates are faster on average, not slower at any size, and give the same outputs."""
        ratios = [plain / other for plain, other in zip(self.plain_ms, self.templates_ms, strict=True)]
        if not ratios or not self.drift <= _MOST_DRIFT:  # `not ... <=` also rejects NaN
            return False
        return min(ratios) >= _EQUAL and math.prod(ratios) ** (1 / len(ratios)) >= _GAIN

    def told(self) -> str:
        """Return one line for the user."""
        plain, other = (" / ".join(f"{ms:.3g}" for ms in one) for one in (self.plain_ms, self.templates_ms))
        chosen = "templates" if self.templates_win else "library"
        return (
            f"matrix multiplications: library {plain} ms, Inductor's templates {other} ms; chosen: {chosen}"
        )


def multiplies(program: ExportedProgram) -> bool:
    """Return whether the program has linear layers in fp32."""
    return any(
        name in _MULTIPLYING and node.meta["val"].dtype == torch.float32
        for name, node in _operators_of(program)
    )


def _operators_of(program: ExportedProgram) -> Iterator[tuple[str, fx.Node]]:
    """Yield the calls of torch's operators, each with the operator's name."""
    for node in program.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            yield node.target._schema.name, node


def samples(program: ExportedProgram) -> list[Tensors]:
    """Return inputs to time a build on: the program's example in each size of `BATCH_SIZES` that it accepts.

    Return the unchanged example if the batch size is fixed, and an empty list if the example is not made of
    positional tensors only.
    """
    args = _example(program)
    if not args:
        return []
    batch = next((size for size in free_sizes(program) if size.is_batch(args)), None)
    if batch is None:
        return [args]
    return [resized(args, batch, size) for size in BATCH_SIZES if batch.low <= size <= batch.high]


def _example(program: ExportedProgram) -> Tensors:
    """Return the program's example inputs; an empty tuple if they are not positional tensors only."""
    args, keywords = program.example_inputs or ((), {})
    return () if keywords or not all(isinstance(one, torch.Tensor) for one in args) else args


def timed(plain: Run, templates: Run, given: Sequence[Tensors]) -> Timed:
    """Time both builds alternately, and compare their outputs.

    Args:
        plain: the loaded build that calls the library for matrix multiplications.
        templates: the loaded build that uses Inductor's templates.
        given: inputs from `samples`; at least one.
    """
    with one_thread(), torch.inference_mode():
        pairs = [(answers(plain, one), answers(templates, one)) for one in given]
        times = [processor_ms([plain, templates], one, _BUDGET_S) for one in given]
    return Timed(tuple(one[0] for one in times), tuple(one[1] for one in times), difference(pairs).drift)


# The compiler may use only the instructions that every CPU of the level has: "native" would tie the archive
# to this CPU model. x86-64-v3 is AVX2 with FMA and F16C, x86-64-v4 AVX-512 F, BW, CD, DQ, VL (x86-64 psABI).
_LEVELS = {"avx2": ("x86-64-v3", 256), "avx512": ("x86-64-v4", 512)}
# The operators that gain from packed weights: oneDNN's convolutions and LSTM. Linear layers lose, because
# with a dynamic batch they would use oneDNN's multiplication instead of MKL's, which is faster for few rows.
_PACKED = ("aten::conv", "aten::_conv", "aten::lstm")


# Layers that AOTInductor unrolls for a fixed number of steps. LSTM is absent: oneDNN runs it in one call.
_UNROLLED = (torch.ops.aten.gru.input, torch.ops.aten.rnn_tanh.input, torch.ops.aten.rnn_relu.input)


@dataclass(frozen=True, slots=True)
class Compiled:
    """The result of a compilation. `timed` is None unless two builds were compared."""

    isa: str  # the required instruction set, in lower case
    frozen: bool
    timed: Timed | None = None


def compile_aoti(
    program: ExportedProgram, path: Path, isa: str | None, say: Say, *, freezing: bool | None = None
) -> Compiled:
    """Compile the program into the package `path`.

    A program with linear layers that is not frozen is compiled twice, with the library's and with Inductor's
    matrix multiplication, and the faster build is kept.

    Args:
        program: for the CPU, with its example inputs.
        path: must end in `.pt2`.
        isa: "avx2" or "avx512"; None: the best that this machine has.
        say: receives progress lines.
        freezing: fold and pack constants during compilation, which int8 needs to be fast; None: only if the
            model has layers that gain from it.

    Raises:
        ModelRefused: this machine lacks the instruction set (the compiler tests it here), a GRU or an RNN has
            a variable length, or the code takes fewer sizes than the program.
        Exception: any error of the compilers.
    """
    _refuse_unrolled(program)
    sizes = free_sizes(program)  # before the compiler notes its conditions in the program
    frozen = gains_by_freezing(program) if freezing is None else freezing
    with private_cache(path.parent):
        if frozen and not _compiles_frozen(program, path, isa, say):
            frozen = False
        settings = _settings(isa, frozen)
        if not frozen:
            _compile(program, path, settings)
        given = [] if frozen or not multiplies(program) else samples(program)
        found = _with_templates(program, path, settings, given, say) if given else None
    _refuse_narrowed(program, sizes)
    return Compiled(aoti_metadata(path).get("AOTI_CPU_ISA", "").lower(), frozen, found)


def _refuse_unrolled(program: ExportedProgram) -> None:
    """Raise ModelRefused if a recurrent layer has a variable length: it would be compiled for one length."""
    for node in program.graph.nodes:
        if node.op != "call_function" or node.target not in _UNROLLED:
            continue
        length = node.args[0].meta["val"].shape[1 if node.args[-1] else 0]
        if isinstance(length, torch.SymInt):
            raise ModelRefused(
                "AOTInductor compiles a GRU for the length of the example only, and the length is to vary; "
                "take --format export or torchscript"
            )


def _compiles_frozen(program: ExportedProgram, path: Path, isa: str | None, say: Say) -> bool:
    """Compile with freezing; return whether that succeeded."""
    try:
        _compile(program, path, _settings(isa, freezing=True))
    except ModelRefused:
        raise
    # Broad, because freezing runs further passes over the model, which may fail in any way.
    except Exception as error:
        say(
            f"with weights packed for oneDNN it can't be compiled ({line_of(error)}); compiling again "
            "without, which may be slower ..."
        )
        return False
    return True


def gains_by_freezing(program: ExportedProgram) -> bool:
    """Return whether the fp32 program has convolutions or LSTMs."""
    return any(name.startswith(_PACKED) for name, _ in _operators_of(program))


def load_aoti(path: Path) -> Any:
    """Load the package as a function of tensors; this loads its machine code into this process."""
    return torch._inductor.aoti_load_package(str(path))


def _compile(program: ExportedProgram, path: Path, settings: dict[str, Any]) -> None:
    with torch._inductor.config.patch(settings), torch.no_grad(), _unlimited_sizes():
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))


@contextmanager
def _unlimited_sizes() -> Iterator[None]:
    """Keep the compiler from limiting sizes to those that torch would compute in the example's way.

    When torch compares a size of the example with a number, the outcome becomes a condition on all inputs.
    For a convolution it compares the batch with 16, and the compiler uses the outcome only to find the memory
    format of the output. For a sum it compares the length with 4096, to add long sums more precisely; the
    code for either outcome accepts all lengths. Not thread-safe.
    """
    from torch._inductor.codegen.cpp import CppKernel  # noqa: PLC0415  # torch._inductor takes seconds
    from torch._inductor.virtualized import V  # noqa: PLC0415

    def of_convolution(*given: Any, **named: Any) -> Any:
        return (given[0] if given else named["input"]).fake_mode.shape_env

    def of_sum(*_given: Any) -> Any:
        return V.graph.sizevars.shape_env

    with (
        _without_conditions(torch._C, "_select_conv_backend", of_convolution),
        _without_conditions(CppKernel, "need_use_acc_helper", of_sum),
    ):
        yield


@contextmanager
def _without_conditions(owner: Any, name: str, sizes_of: Callable[..., Any]) -> Iterator[None]:
    """Let a function of torch compare sizes without recording conditions.

    `sizes_of` returns torch's record of the sizes in a call, to which conditions would be added.
    """
    choose = getattr(owner, name, None)
    if choose is None:  # other versions of torch
        yield
        return

    def chosen(*given: Any, **named: Any) -> Any:
        sizes = sizes_of(*given, **named)
        with sizes.suppress_guards() if sizes else nullcontext():
            return choose(*given, **named)

    setattr(owner, name, chosen)
    try:
        yield
    finally:
        setattr(owner, name, choose)


def _refuse_narrowed(program: ExportedProgram, sizes: Sequence[FreeSize]) -> None:
    """Raise ModelRefused if the compiler has narrowed the range of a size: servers refuse all other sizes.

    A lower bound of 2 does not count, see `_settings`.
    """
    example = _example(program)
    inputs = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    for free in sizes if example else ():
        index, dimension = free.places[0]
        name = program.graph_signature.user_inputs[index]
        size = inputs[name].meta["val"].shape[dimension].node
        found = size.shape_env.bound_sympy(size.expr)
        low = free.low if found.lower <= 2 * free.multiple else found.lower
        needed = free.far_sizes(example)
        if free.high < LARGEST // free.multiple * free.multiple:  # the end of a range is a promise to clients
            needed.append(free.high)
        if not all(low <= one <= found.upper for one in needed):
            raise ModelRefused(
                f"the compiled code takes {low} to {found.upper} for dimension {dimension} of {name}; "
                f"expected {free.text}; narrow --dynamic-batch or --dynamic"
            )


def _with_templates(
    program: ExportedProgram, path: Path, settings: dict[str, Any], given: Sequence[Tensors], say: Say
) -> Timed | None:
    """Compile again with templates, and replace `path` with the new build if it is faster.

    Return None if the compilation fails: Inductor rejects a program with any multiplication that the
    templates do not support, such as one of doubles.
    """
    say("compiling again with Inductor's own matrix multiplication, to compare ...")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        other = Path(folder) / path.name
        try:
            _compile(program, other, settings | TEMPLATES)
        except RuntimeError as error:  # the base class of all of Inductor's errors
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
        raise ModelRefused(
            f"--isa is {isa}, and this machine has {', '.join(sorted(found)) or 'none'}; "
            "leave --isa out, or pack on a machine that has it"
        )
    wanted = isa or str(pick_vec_isa()).partition(" ")[0]  # the level in "avx512 avx512_vnni"
    # With dynamic_threads, kernels take the thread count at run time instead of this machine's.
    # One compile process is enough, because all kernels are in one C++ file.
    settings: dict[str, Any] = {
        "cpp.dynamic_threads": True,
        "freezing": freezing,
        "compile_threads": 1,
        "joint_custom_post_pass": _block_rewrites,  # the last pass before those of freezing
    }
    if hasattr(torch._inductor.config.aot_inductor, "check_lowerbound"):
        # torch.export specialises a size of 1, so it records 2 as the lower bound; the code also runs with 1.
        settings["aot_inductor.check_lowerbound"] = False
    if wanted in _LEVELS:
        march, bits = _LEVELS[wanted]
        settings["cpp.simdlen"] = bits
        if hasattr(torch._inductor.config.cpp, "march"):  # torch 2.13 on; before, for this CPU model
            settings["cpp.march"] = march
    return settings


def _block_rewrites(graph: fx.Graph) -> None:
    """Change the parts of the graph that the compiler would rewrite wrongly; the results stay equal."""
    _block_folds(graph)
    _block_8_bits(graph)


def _block_folds(graph: fx.Graph) -> None:
    """Keep freezing from folding arithmetic into a convolution's weights where it does so wrongly.

    Freezing scales dimension 0 of the weights; in a transposed convolution these are the input channels. It
    takes dimension 1 of a constant for the channels, even if it has fewer dimensions than one image. An
    alias, which a later pass removes, hides the convolution from freezing.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default):
        weight, users = node.args[1].meta["val"], list(node.users)
        values = [one.meta.get("val") for user in users for one in user.all_input_nodes]
        is_short = any(isinstance(one, torch.Tensor) and 1 < one.dim() < weight.dim() - 1 for one in values)
        if node.args[6] or is_short:  # 6: whether it is transposed
            for user in users:
                hide_from(user, node)


def _block_8_bits(graph: fx.Graph) -> None:
    """Keep the compiler from calling torch's kernel for 8-bit weights where it would read beyond the weights.

    The compiler looks for a product in bfloat16 that is multiplied by scales, in this order only.
    """
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        if not all(isinstance(one, fx.Node) for one in node.args):
            continue
        product, scales = node.args
        while product.target in (aten.view.default, aten.reshape.default):
            product = product.args[0]
        if product.target not in (aten.mm.default, aten.bmm.default):
            continue
        weight = product.args[1].meta["val"]
        inputs = weight.shape[-2]
        if weight.dtype == torch.bfloat16 and isinstance(inputs, int) and inputs % INPUTS_OF_8_BITS:
            node.args = (scales, node.args[0])


_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # torch reads it each time, and sets it itself


@contextmanager
def private_cache(folder: Path) -> Iterator[None]:
    """Move Inductor's cache into `folder` for the duration of the block, and delete it afterwards.

    Inductor's default cache would keep a copy of the weights of each compilation in the system's temporary
    folder, where other users may read it. Precompiled headers stay in their usual place, and so do the four
    programs with which Inductor tests this machine's instruction sets: they contain no model data and take
    seconds to build. Not thread-safe: one compilation per process at a time.
    """
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list  # noqa: PLC0415  # torch._inductor takes seconds
    from torch._inductor.utils import clear_inductor_caches  # noqa: PLC0415

    with suppress(OSError):  # if the usual place is read-only, the programs go into `folder`, too
        valid_vec_isa_list()  # the process remembers the result
    before = os.environ.get(_VARIABLE)
    with tempfile.TemporaryDirectory(dir=folder, prefix="inductor-", ignore_cleanup_errors=True) as cache:
        clear_inductor_caches()  # drop in-memory references to files of other cache folders
        os.environ[_VARIABLE] = cache
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(_VARIABLE, None)
            else:
                os.environ[_VARIABLE] = before
            clear_inductor_caches()
