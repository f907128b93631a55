"""`docs/quantization.md`: what `--quantize` does, and the last run of the benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from harness.machine import Machine
from harness.report import markdown_table

from quantised.fastest import BATCHES, fastest
from quantised.measure import Row, geometric_mean
from torchere.archiver.quantization import INT8_DRIFT

SIZE, COSINE, TOP1 = 0.35, 0.99, 0.97  # goals for each model: of its file against fp32, of its answers

_HEAD = """# Quantisation

How `torchere archive --quantize` makes a model smaller and faster, and how much.
Written by `python benchmarks/quantization.py --write-docs`; do not edit, but its text in
`benchmarks/quantised/document.py`.

    torchere archive --model-name net --model-file net.py --serialized-file net.pth \\
      --example example.npy --samples calibration/ --quantize int8-static

| method | what it does | needs |
| --- | --- | --- |
| `int8-dynamic` | linear, LSTM, GRU layers, large embeddings: weights in 8 bits | a model with layers |
| `int8-static` | convolutions, linear layers: weights, activations in 8 bits | a traceable model; samples |
| `int8` | both of these, the faster one that agrees; with `--format export` and `aoti` `int8-static` alone \
| samples; without them `int8-dynamic` alone, with `torchscript` only |
| `int8-trained` | takes a model as it is, and chooses the engine | QAT, or int8 TorchScript |
| `int8-weight` | linear layers, embeddings: weights in 8 bits, products in bfloat16 | a model with layers |
| `int4-weight` | the same in 4 bits | a model with layers; `--format export` or `aoti` |
| `bf16` | weights and sums in bfloat16, float32 in and out | the eager model, a processor that has it |
| `auto` | tries what suits; packs the fastest that agrees, or fp32 | samples, for static int8 |

Dynamic int8 scales activations at each call. Static int8 takes their ranges from samples: some tens of
inputs like real requests (`--max-samples`, 100 files of a folder by default); the model is
traced, or else its exported program is taken, which follows loops over a tensor. Neither keeps a branch on
values, or on a size that may vary, or state in a buffer. Pictures among the
samples go through the handler's own decoding, cropping and normalising, as those of `--example` and of
`torchere compare --data` do ([formats](formats.md#examples-and-sizes)). QAT is a model from
`prepare_qat_fx` and training, or `convert_fx`. TorchScript of fp32 can't be quantised any more. An eager
model has layers; an exported program gets its linear layers, convolutions, embeddings, LSTM, GRU and batch
normalisations back from its operators.

With `--format torchscript` (the default) int8 is by PyTorch's FX graph mode. Padding (`ZeroPad2d`,
`F.pad`, layers that pad by themselves) and batch normalisation are folded into the convolutions first,
and a ReLU6 becomes the range of the number format. Torch's `nn.MultiheadAttention` becomes linear layers
and the attention between them, and torch's encoders plain layers, so that all their linear layers are
int8. With dynamic int8 a linear layer does the ReLU that follows it. What joins outputs (`torch.cat`,
`torch.stack` behind the last layers) stays in fp32, for in int8 all that is joined has one scale.

PyTorch has several int8 engines, and its default can be many times slower than fp32: each one is timed on
the samples with the very bytes that go into the archive, and the fastest that agrees is written to
`model-config.yaml` (`torchscript: quantized_engine`), from where the server sets it while it loads the
model. If torch's default engine agrees and takes at most 5 % longer, it is written instead, so that packing
again chooses the same. With `--format export` or `aoti` int8 is by torchao's PT2E
(`pip install 'torchere[quantize]'`) for oneDNN; an exported program that is not compiled gets no faster by
it. Some compiled transformers are a tenth faster by static int8, which `--quantize int8` is there, than by
dynamic int8, where activations allow it; `auto` measures both
([decision 40](decisions/0040-static-int8-for-compiled-transformers.md)).

Activations have 8 bits and weights 7 (8 in depthwise convolutions): processors without VNNI add pairs of
products in 16 bits, which 8 bits times 8 overflow, and archives are often packed on another processor than
they are served on. So models with depthwise convolutions are not tried on `x86` and `fbgemm`, which add
pairs for these on processors without VNNI. LSTM and GRU layers have it the other way round, for torch's
kernels know no other.

Where int8 drifts by more than 0.141 (a cosine of 0.99; or by more than `--max-drift`, if that is less), the
layers that hurt most go back to fp32. Each layer is rounded by itself in the fp32 model, and the worst go
back, as many as should do; the model is converted again and compared, three times at most. At most 12 % of
the weights go back, which keeps a file below 0.35 times of fp32 that would be 0.25 times. The report names
the layers. Not with `--format export` and `aoti`.

## Weights alone

`int8-weight` makes the weights small and leaves the activations as they are: it drifts less than
dynamic int8, the rows of a batch share no scale, and it needs no samples. It gains where large layers
meet few rows and the time goes into reading weights: one layer of 4096 x 1024 takes 0.22 instead of 0.72 ms
for a row, 0.85 instead of 2.4 ms for 8, and no less for 128
([decision 30](decisions/0030-weights-in-8-and-4-bits.md)). It changes linear layers and embeddings of 16,384
weights and more; recurrent layers, convolutions, `nn.EmbeddingBag`, layers with hooks, and linear layers
whose number of inputs is no multiple of 16 stay in fp32: torch's kernel reads beyond the weights of the last
kind. `int4-weight` is as fast, and smaller: 5 bits for each weight with its scales. It drifts ten times as
far. Embeddings, and layers of sizes that its kernel does not take (outputs that are no multiple of 16,
inputs of 32), get 8 bits. An archive of it that was compiled on a processor with AVX-512 runs on one without
as the exported program that lies beside it, and the other way round. Both use operators of torch's own:
neither packing nor serving needs torchao.

A model that was quantised with torchao's `quantize_` keeps its bits with `--format export` and `aoti`: give a
factory that makes it, or its class and the state dict (`torch.save(model.state_dict(), ...)`). Its answers
stay the same, and a server needs no torchao. That goes for `Int8WeightOnlyConfig`,
`Int8DynamicActivationInt8WeightConfig`, `IntxWeightOnlyConfig` and, packed on the kind of processor where it
was quantised, `PrototypeInt4WeightOnlyConfig` for CPUs; `Int4WeightOnlyConfig` needs a GPU to quantise, so
take `int4-weight` of the model in fp32. Such a model is smaller, and mostly not faster, for torchao casts the
weights to fp32 at each call; `int8-weight` of the model in fp32 is. TorchScript would hold the weights in
fp32, and `keep` would load them into a class that is not quantised: both are refused.

## Verification

Whatever becomes of a model, the packed one is compared with the original before it is packed
(`--no-verify` leaves that out), on `--samples`, or on the example without any. *Drift* is the root of the
mean squared difference over the root of the mean square of the original's values: 0 means equal, 1
means unrelated. Nothing is packed, and the
exit status is 2, if

* the drift is above `--max-drift` (0.001 for a format alone, or four roundings of weights in 16 bits: 0.03
  for bfloat16, 0.004 for float16; 0.05 for bf16 and `int8-weight`, 0.25 for other int8 and int4);
* a channel of an output varies in the original and has a single value in the packed model. One figure over
  a whole output does not show that: scores beside boxes that are 640 times as large may all be zero;
* the worst channel drifts by more than 1.6 times `--max-drift`. It is reported with its own drift, measured
  by what varies in this channel; channels are the last dimension of an output, and dimension 1 of those
  with three or more. A channel that varies by less than a quarter of its size counts by that quarter, and
  the worst of many channels over few values is divided by how far it would be off by chance (by 3.0 for
  1000 classes over 13 photographs);
* all values of the original's answer are not-a-number (NaN).

An original that answers one input in two ways (dropout left on), or all samples alike, is reported.
`--accept-drift` packs the model all the same; `-f` only overwrites. The report is `MAR-INF/report.json` in
the archive: differences, agreement of the first class, cosine, times at batch 1 and 8, sizes, memory, the
engine and how it was chosen. It holds times, so two archives packed from the same files differ by it, and
by what was chosen for its times.

`torchere compare A.mar B.mar --data DIR --picture out.svg` compares the models of two archives in the
same way.

## Times

All times are processor time of a run on one thread, the tenth percentile of runs in turns: for the choice of
an engine, of `optimize_for_inference`, of a candidate of `auto`, in the report and in `compare`. A model is
freshly loaded for it and meets a batch of one first, as in a server: an int8 layer of oneDNN prepares its
weights for the shape of its first run, and took ten times as long for a picture of another size
(EfficientNet-Lite0: 62 ms instead of 6.2; [decision 27](decisions/0027-forms-of-a-model-on-one-clock.md)).
In its turn it runs three times, and the first run, which brings its weights back to the caches, does not
count; where a run takes 50 ms or more, a turn is one run. Times are the mean over up to three sizes of the
samples, and where sizes may vary (`--dynamic`) and all samples have one, over that and another one: an
engine that is fast in its first size alone is not chosen.

A quantised model is timed beside the form in fp32 that would be packed instead: TorchScript, optimised for
inference where that gains; an exported program for `--format export`; for `aoti` TorchScript, too, and the
compiled program with `auto`. One that is not faster (geometric mean over the batches) is refused with what
would help; `--accept-slower` packs it with a warning. What gains less than a tenth is packed, and a line
says what would help. Usual reasons: `int8-dynamic` leaves convolutions in fp32; SiLU, GELU and the like
stay in fp32 between the int8 layers of TorchScript, and `--format aoti` compiles them together with these;
an exported program computes in fp32 until it is compiled; small layers gain nothing in any way.
"""

_LIMITS = """## What stays in fp32

Dynamic int8 changes linear and recurrent layers and large embeddings only: LSTM and GRU layers with biases
and without `proj_size`; embeddings of a million weights, without `max_norm`, and bags that sum, without
`padding_idx`. With `--format export` and `aoti` it changes linear layers only. Scores and mixing of
attention, GELU and normalisations stay in fp32. So do the projections of `nn.MultiheadAttention` with
`add_bias_kv`, `add_zero_attn` or hooks, of its subclasses, and of any model that answers its example
otherwise once its attention is plain layers, or whose own code reads the weights of torch's. Convolutions
stay in fp32 by `int8-dynamic`, transposed ones always. By `int8-static` so do `nn.PReLU`, convolutions
whose weights are computed (blur pooling) and, in TorchScript, sums and products with a number that would
lose a bit or more (`x * 255`). In TorchScript layers stay in fp32 whose weights the model's own code reads,
as a head `F.linear(x, self.embedding.weight)` does; by `int8-weight` and `int4-weight` with `--format aoti`,
too. A layer that was given back or is read is named in the report.

Dynamic int8 has one scale for all numbers that go into a layer, the rows of other requests among them: one
with numbers far larger than usual moves the answers of its batch. The packer says so where it can be.
"""


def markdown(
    rows: Sequence[Row],
    missing: Mapping[str, str],
    machine: Machine,
    vnni: bool,
    goals_of: tuple[float, float],
) -> str:
    """The whole document; the goals are against plain TorchScript and against the fastest form in fp32."""
    words = "with VNNI" if vnni else "without VNNI"
    quiet = "" if machine.load_before < machine.cores / 4 else ", so other work ran beside it"
    measured = (
        f"Measured {machine.date} on {machine.cpu} {words}, {machine.cores} cores, PyTorch {machine.torch}, "
        f"torchere {machine.torchere} (commit {machine.commit}); load average before the run "
        f"{machine.load_before:g}{quiet}. "
        "One thread, the forms of a model in turns, see above; the tenth percentile of processor time.\n"
    )
    parts = [
        _HEAD,
        "## Measured\n",
        measured,
        "The fastest form that packing makes of each model, in fp32 (TorchScript as it is or "
        "[optimised at load](formats.md#torchscript-for-the-processor), AOTInductor) and in int8 "
        "(TorchScript, AOTInductor), by the geometric mean of both batches:\n",
        markdown_table(fastest_table(rows)) + "\n",
        fastest_verdict(rows, goals_of[1]) + "\n",
        "Frozen TorchScript, as it is in the file, in fp32 and in int8:\n",
        markdown_table(table(rows)) + "\n",
        verdict(rows, vnni, goals_of[0]) + "\n",
    ]
    parts += [
        markdown_table(agreement(rows)) + "\n",
        goals(rows) + "\n",
        markdown_table(engines(rows)) + "\n",
    ]
    parts += [f"Not measured: {title} ({why}).\n" for title, why in missing.items()]
    return "\n".join([*parts, _LIMITS])


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Times and sizes, and their geometric means."""
    lines = [["model", "method, engine", *(f"fp32 → int8, batch {b}" for b in BATCHES), "faster", "smaller"]]
    for row in rows:
        times = [f"{_plain(row.fp32_ms[b])} → {_plain(row.int8_ms[b])} ms" for b in BATCHES]
        faster = ", ".join(f"{row.speedup(b):.2f} ×" for b in BATCHES)
        fp32 = f", {len(row.kept)} layers in fp32" if row.kept else ""
        lines.append([row.title, f"{row.method}, {row.engine}{fp32}", *times, faster, f"{row.smaller:.2f} ×"])
    means = ", ".join(f"{geometric_mean([row.speedup(b) for row in rows]):.2f} ×" for b in BATCHES)
    smaller = geometric_mean([row.smaller for row in rows])
    return [*lines, ["geometric mean", "", *("" for _ in BATCHES), means, f"{smaller:.2f} ×"]]


def fastest_table(rows: Sequence[Row]) -> list[list[str]]:
    """The fastest form in fp32 and in int8 of each model."""
    lines = [["model", "fp32", "int8", *(f"fp32 → int8, batch {b}" for b in BATCHES), "faster"]]
    for row in rows:
        fp32, int8 = (fastest(list(row.forms), quantised) for quantised in (False, True))
        times = [f"{_plain(fp32.ms[b])} → {_plain(int8.ms[b])} ms" for b in BATCHES]
        faster = ", ".join(f"{row.beyond_fastest(b):.2f} ×" for b in BATCHES)
        lines.append([row.title, fp32.name, int8.name, *times, faster])
    means = (geometric_mean([row.beyond_fastest(b) for row in rows]) for b in BATCHES)
    return [
        *lines,
        ["geometric mean", "", "", *("" for _ in BATCHES), ", ".join(f"{m:.2f} ×" for m in means)],
    ]


def fastest_mean(rows: Sequence[Row]) -> float:
    """How many times as fast the fastest int8 form is as the fastest one in fp32, over models and batches."""
    return geometric_mean([row.beyond_fastest(batch) for row in rows for batch in BATCHES])


def _below(goal: float, rows: Sequence[Row], factor: Callable[[Row, int], float]) -> str:
    """Return the models and batches whose factor is below the goal, with it; "" if there are none."""
    return ", ".join(
        f"{row.title} at batch {batch} ({factor(row, batch):.2f} ×)"
        for row in rows
        for batch in BATCHES
        if factor(row, batch) < goal
    )


def fastest_verdict(rows: Sequence[Row], goal: float) -> str:
    """Whether int8 reaches the goal against the fastest form in fp32, and which models miss it."""
    mean = fastest_mean(rows)
    below = _below(goal, rows, Row.beyond_fastest)
    said = f" Below it: {below}." if below else ""
    return (
        f"Over {len(rows)} models and both batches the fastest int8 form is {mean:.2f} × as fast as the "
        f"fastest one in fp32 (geometric mean; goal {goal:g} ×: "
        f"{'reached' if mean >= goal else 'missed'}).{said}"
    )


def goals(rows: Sequence[Row]) -> str:
    """What misses a goal of size or likeness, and which models show no agreement of classes, and why."""
    misses = []
    for row in rows:
        if 1 / row.smaller > SIZE:
            misses.append(f"{row.title} is {1 / row.smaller:.2f} times as large (goal {SIZE:g})")
        if row.cosine is not None and row.cosine < COSINE:
            misses.append(f"{row.title} has a cosine of {row.cosine:.4f} (goal {COSINE:g})")
        if row.trained and row.top1 is not None and row.top1 < TOP1:
            misses.append(f"{row.title} has the same first class in {row.top1:.1%} (goal {TOP1:.0%})")
    said = f"Missed: {'; '.join(misses)}." if misses else "All models are as small and as alike as asked for."
    if all(row.trained for row in rows):
        return said
    return (
        f"{said} Random weights put the first two classes so close together that any rounding swaps some; "
        "of those models the cosine tells."
    )


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
    slow = _below(goal, rows, Row.speedup)
    below = f" Below it: {slow}." if slow else " Every one is above it."
    drifting = [row.title for row in rows if row.drift > INT8_DRIFT]
    refused = f" `torchere archive` would refuse {', '.join(drifting)} for the drift." if drifting else ""
    return f"{said}{why}.{below}{refused}"
