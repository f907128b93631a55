"""Two ways to multiply matrices in a program that AOTInductor compiles, and which of them is faster here.

Plain, each multiplication is a call of the BLAS library that torch was built with (MKL on x86). With
Inductor's own C++ templates it is compiled into the package: weights lie in the order in which they are read,
and what follows the multiplication (bias, GELU, a residual) is done before its result leaves the cache. Which
one wins depends on the shapes and on the CPU, so both are compiled and measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram

from torchere.archiver.models.dynamic import BATCH, Tensors, resized
from torchere.archiver.models.to_program import free_sizes
from torchere.archiver.models.verify_outputs import difference, flattened
from torchere.archiver.models.verify_timing import Model, one_thread, quick_ms

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
