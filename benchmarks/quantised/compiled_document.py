"""`docs/aoti.md`: the last run of `benchmarks/aoti.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.machine import Machine
from harness.report import markdown_table

from quantised.compiled import BATCHES, Pair
from quantised.scaling import Scaling

FASTER, ON = 1.15, 2  # goal besides being as fast on each model: so many times as fast on so many of them
TWICE = 1.9  # goal: two executors against one
_EQUAL = 0.97  # the ratio of two equal models may come out as low

_HEAD = """# AOTInductor beside TorchScript

How fast models are that `--format aoti` compiles ahead of time, beside the same models as TorchScript.
Written by `python benchmarks/aoti.py --write-docs`; do not edit, but its text in
`benchmarks/quantised/compiled_document.py`.

The same fp32 model as `--format aoti --dynamic-batch 1:64` and as `--format torchscript`, with the server's
settings of the allocator. Paddings are folded into convolutions in both. Models with convolutions or LSTMs
have their weights packed for oneDNN while they are compiled (Inductor's freezing), which makes them faster.
Other models are not frozen: with a free batch, freezing uses oneDNN's matrix multiplication for linear
layers instead of MKL's, and that was 0.6 times as fast as TorchScript for one row of the MLP, and 0.7 times
for eight of MiniLM, on a processor without VNNI. They are compiled twice, with MKL's multiplication and
with Inductor's C++ templates, both are measured at batches 1 and 8, and the templates are taken where they
gain and are not slower at either by more than two equal builds differ. The processor decides as much as the
model: without VNNI the encoder gained by the templates at both batches, MiniLM for one text and the MLP for
eight rows; with VNNI and AVX-512 the library came out faster for both transformers, and the templates for
the MLP, above all for one row. The column "layers by" says what was taken in this run.

TorchScript is frozen, as it is in the file, and the goals are counted against that. `torchere archive` also
measures what it gains by being [made for the processor](formats.md#torchscript-for-the-processor), and has
the server do it at load where it is faster throughout. The second table has AOTInductor beside that: where
its last column is below 1, an archive of TorchScript is the faster one.
"""


def markdown(
    pairs: Sequence[Pair], scaling: Scaling | None, missing: Mapping[str, str], machine: Machine
) -> str:
    """The whole document."""
    quiet = "" if machine.load_before < machine.cores / 4 else ", so other work ran beside it"
    measured = (
        f"Measured {machine.date} on {machine.cpu}, {machine.cores} cores, PyTorch {machine.torch}, torchere "
        f"{machine.torchere} (commit {machine.commit}); load average before the run {machine.load_before:g}"
        f"{quiet}. One thread, in turns; the tenth percentile of processor time.\n"
    )
    parts = [_HEAD, measured, markdown_table(table(pairs)) + "\n", verdict(pairs) + "\n"]
    parts.append(markdown_table(optimized_table(pairs)) + "\n")
    if scaling is not None:
        parts.append(executors(scaling) + "\n")
    return "\n".join([*parts, *(f"Not measured: {title} ({why}).\n" for title, why in missing.items())])


def table(pairs: Sequence[Pair]) -> list[list[str]]:
    """Times of both."""
    heads = [f"TorchScript → AOTI, batch {batch}" for batch in BATCHES]
    lines = [["model", "layers by", *heads, "faster", "drift"]]
    for pair in pairs:
        times = [f"{pair.torchscript_ms[b]:.3g} → {pair.aoti_ms[b]:.3g} ms" for b in BATCHES]
        faster = ", ".join(f"{pair.speedup(batch):.2f} ×" for batch in BATCHES)
        lines.append([pair.title, pair.compiled, *times, faster, f"{pair.drift:.1g}"])
    return lines


def optimized_table(pairs: Sequence[Pair]) -> list[list[str]]:
    """TorchScript as it is, optimised, and AOTInductor beside that."""
    heads = [f"TorchScript → optimised, batch {batch}" for batch in BATCHES]
    lines = [["model", *heads, "faster", "AOTI faster than optimised"]]
    for pair in pairs:
        plain, fast, aoti = pair.torchscript_ms, pair.optimized_ms, pair.aoti_ms
        times = [f"{plain[b]:.3g} → {fast[b]:.3g} ms" for b in BATCHES]
        faster = ", ".join(f"{plain[b] / fast[b]:.2f} ×" for b in BATCHES)
        lines.append([pair.title, *times, faster, ", ".join(f"{fast[b] / aoti[b]:.2f} ×" for b in BATCHES)])
    return lines


def verdict(pairs: Sequence[Pair]) -> str:
    """Whether the goals are reached: a model counts by the slower of its batches."""
    slow = slower(pairs)
    fast = [pair.title for pair in pairs if min(pair.speedup(batch) for batch in BATCHES) >= FASTER]
    behind = f"Slower than TorchScript: {', '.join(slow)}." if slow else "None is slower than TorchScript."
    return (
        f"{behind} At least {FASTER:g} × as fast at every batch: {', '.join(fast) or 'none'} "
        f"(goal: {ON} models)."
    )


def slower(pairs: Sequence[Pair]) -> list[str]:
    """Where AOTInductor loses, by more than two equal models differ."""
    return [
        f"{pair.title} at batch {batch} ({pair.speedup(batch):.2f} ×)"
        for pair in pairs
        for batch in BATCHES
        if pair.speedup(batch) < _EQUAL
    ]


def executors(scaling: Scaling) -> str:
    """What a second executor brings, beside what it could."""
    reached = "reached" if scaling.aoti_threads >= TWICE else "missed"
    return (
        f"Two executor threads on one copy of the MLP's weights, batch 8, do {scaling.aoti_threads:.2f} × "
        f"the runs of one by AOTInductor (goal {TWICE:g} ×: {reached}). Two processes that run the same "
        f"package and share nothing do {scaling.aoti_processes:.2f} × those of one: that is what the machine "
        "allows, for its cores share caches and memory. The threads do "
        f"{scaling.torchscript_threads:.2f} × by TorchScript."
    )
