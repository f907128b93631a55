"""`docs/quantization.md`: what `--quantize` does, and the last run of the benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.machine import Machine
from harness.report import markdown_table

from quantised.measure import BATCHES, Row, geometric_mean
from torchere.archiver.models.verify import MAX_DRIFT

_HEAD = """# Quantisation

Written by `python benchmarks/quantization.py --write-docs`; do not edit, but its text in
`benchmarks/quantised/document.py`.

    torchere archive --model-name net --model-file net.py --serialized-file net.pth \\
      --example example.npy --samples calibration/ --quantize int8-static

| method | what it does | needs |
| --- | --- | --- |
| `int8-dynamic` | linear, LSTM, GRU layers, large embeddings: weights in 8 bits | the eager model |
| `int8-static` | convolutions, linear layers: weights and activations in 8 bits | it, as a graph; samples |
| `int8` | both of these; the faster one that agrees | samples, or only the first is tried |
| `int8-trained` | takes a model as it is, and chooses the engine | QAT, or int8 TorchScript |
| `bf16` | weights and sums in bfloat16, float32 in and out | the eager model, a processor that has it |

Dynamic int8 scales activations at each call. Static int8 takes their ranges from samples: some tens of
inputs like real requests; a forward that branches on values is no graph. QAT is a model from
`prepare_qat_fx` and training, or `convert_fx`. TorchScript of fp32 can't be quantised any more.

With `--format torchscript` (the default) int8 is by PyTorch's FX graph mode. Padding (`ZeroPad2d`,
`F.pad`, layers that pad by themselves) and batch normalisation are folded into the convolutions first,
and a ReLU6 becomes the range of the number format. PyTorch has several int8 engines, and its default can
be many times slower than fp32: each one is timed on the samples with the very bytes that go into the
archive, and the fastest that agrees is written to `model-config.yaml` (`torchscript: quantized_engine`),
from where the server sets it while it loads the model. With `--format export` or `aoti` int8 is by
torchao's PT2E (`pip install 'torchere[quantize]'`) for oneDNN; an exported program that is not compiled
gets no faster by it.

In static int8 weights have 7 bits, 8 in depthwise convolutions: processors without VNNI add pairs of
products in 16 bits, which 8 bits overflow, and archives are often packed on another processor than they
are served on.

## Verification

Whatever becomes of a model, the packed one is compared with the original before it is packed
(`--no-verify` leaves that out), on `--samples`, or on the example without any. *Drift* is the root of the
mean squared difference over the root of the mean square of the original's values: 0 is equal, 1 has
nothing to do with it. Above `--max-drift` (0.001 for a format alone, 0.05 for bf16, 0.4 for int8) nothing
is packed, with exit status 2; `--force` packs it anyway. The report is `MAR-INF/report.json` in the
archive: differences, agreement of the first class, cosine, latencies at batch 1 and 8 (one thread, in
turns, median), sizes, memory, the engine and how it was chosen. It holds times, so two archives packed
from the same files differ by it.

`torchere compare A.mar B.mar --data DIR --picture out.svg` compares the models of two archives in the
same way.
"""

_LIMITS = """## What stays in fp32

Dynamic int8 changes linear and recurrent layers and large embeddings only. Attention, GELU and normalisations
stay in fp32, and so do the projections of torch's `nn.MultiheadAttention` (the transformer encoder above),
which is why that file is only half as large. Convolutions stay in fp32 by `int8-dynamic`, transposed ones
always. On x86 dynamic int8 gives activations 7 bits, which doubles the drift of MiniLM: with qnnpack, which
gives them 8 and is slower than fp32 here, it was 0.12.
"""


def markdown(
    rows: Sequence[Row], missing: Mapping[str, str], machine: Machine, vnni: bool, goal: float
) -> str:
    """The whole document."""
    words = "with VNNI" if vnni else "without VNNI"
    quiet = "" if machine.load_before < machine.cores / 4 else ", so other work ran beside it"
    measured = (
        f"Measured {machine.date} on {machine.cpu} {words}, {machine.cores} cores, PyTorch {machine.torch}, "
        f"torchere {machine.torchere} (commit {machine.commit}); load average before the run "
        f"{machine.load_before:g}{quiet}. "
        "One thread; fp32 and int8 are both frozen TorchScript, timed in turns.\n"
    )
    parts = [
        _HEAD,
        "## Measured\n",
        measured,
        markdown_table(table(rows)) + "\n",
        verdict(rows, vnni, goal) + "\n",
    ]
    parts += [markdown_table(agreement(rows)) + "\n", markdown_table(engines(rows)) + "\n"]
    if any(row.aoti_ms for row in rows):
        text = "AOTInductor (fp32, `--format aoti`) beside TorchScript (fp32), one thread, in turns:\n"
        parts += [text, markdown_table(compiled(rows)) + "\n"]
    parts += [f"Not measured: {title} ({why}).\n" for title, why in missing.items()]
    return "\n".join([*parts, _LIMITS])


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Times and sizes, and their geometric means."""
    lines = [["model", "method, engine", *(f"fp32 → int8, batch {b}" for b in BATCHES), "faster", "smaller"]]
    for row in rows:
        times = [f"{_plain(row.fp32_ms[b])} → {_plain(row.int8_ms[b])} ms" for b in BATCHES]
        faster = ", ".join(f"{row.speedup(b):.2f} ×" for b in BATCHES)
        lines.append([row.title, f"{row.method}, {row.engine}", *times, faster, f"{row.smaller:.2f} ×"])
    means = ", ".join(f"{geometric_mean([row.speedup(b) for row in rows]):.2f} ×" for b in BATCHES)
    smaller = geometric_mean([row.smaller for row in rows])
    return [*lines, ["geometric mean", "", *("" for _ in BATCHES), means, f"{smaller:.2f} ×"]]


def _plain(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def agreement(rows: Sequence[Row]) -> list[list[str]]:
    """How alike the answers are, and on what data."""
    lines = [["model", "drift", "cosine", "same first class", "data"]]
    for row in rows:
        cosine = "" if row.cosine is None else f"{row.cosine:.4f}"
        top1 = "" if row.top1 is None else f"{row.top1:.1%}"
        lines.append([row.title, f"{row.drift:.3g}", cosine, top1, row.data])
    return lines


def engines(rows: Sequence[Row]) -> list[list[str]]:
    """What each engine took for one sample."""
    return [["model", "int8 on each engine, batch 1"], *([row.title, row.engines] for row in rows)]


def compiled(rows: Sequence[Row]) -> list[list[str]]:
    """AOTInductor against TorchScript."""
    lines = [["model", *(f"AOTI, batch {batch}" for batch in BATCHES), "faster than TorchScript"]]
    for row in rows:
        if row.aoti_ms and row.aoti_fp32_ms:
            times = [f"{row.aoti_ms[b]:.3g} ms" for b in BATCHES]
            ratios = ", ".join(f"{row.aoti_fp32_ms[b] / row.aoti_ms[b]:.2f} ×" for b in BATCHES)
            lines.append([row.title, *times, ratios])
    return lines


def verdict(rows: Sequence[Row], vnni: bool, goal: float) -> str:
    """Whether the goal is reached, and if not, why."""
    mean = geometric_mean([row.speedup(batch) for row in rows for batch in BATCHES])
    said = (
        f"Over all models and batches int8 is {mean:.2f} × as fast as fp32 (geometric mean; goal {goal:g} ×)"
    )
    why = (
        ""
        if vnni
        else ", meant for processors with VNNI, which multiply int8 four at a time; this one has none"
    )
    slow = [
        f"{row.title} at batch {batch} ({row.speedup(batch):.2f} ×)"
        for row in rows
        for batch in BATCHES
        if row.speedup(batch) < goal
    ]
    below = f" Below it: {', '.join(slow)}." if slow else " Every one is above it."
    drifting = [row.title for row in rows if row.drift > MAX_DRIFT["int8"]]
    refused = f" `torchere archive` would refuse {', '.join(drifting)} for the drift." if drifting else ""
    return f"{said}{why}.{below}{refused}"
