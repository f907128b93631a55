"""Trials: forms of a model that may be packed, each measured against the original and against fp32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.convert.files import Packed
from torchere.archiver.models.fold.parametrizations import without_parametrizations
from torchere.archiver.models.load.weight_only import large_layers
from torchere.archiver.models.measure.cost import gain, told_times
from torchere.archiver.models.quantize.methods import Quantised, processor_has_bf16
from torchere.archiver.models.steps import refusing
from torchere.archiver.models.verify.compare import refuse_drift
from torchere.archiver.models.verify.report import Report
from torchere.archiver.quantization import AUTO, METHODS
from torchere.archiver.request import AOTI, EXPORT, TORCHSCRIPT, BuildOptions
from torchere.archiver.signature import Signature
from torchere.archiver.torchscript_options import TorchScriptOptions

FP32 = "fp32"
# A smaller gain is not worth the drift: then `auto` packs fp32, and other methods get advice (`what_helps`).
LITTLE = 1.1
_HEAVY = 2**20  # weights
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_DYNAMIC = (nn.Linear, nn.LSTM, nn.GRU)
# Activations that int8-static of TorchScript leaves in fp32, between layers that are int8.
_IN_FP32 = (nn.SiLU, nn.GELU, nn.Sigmoid, nn.Tanh, nn.Hardswish, nn.Hardsigmoid, nn.Mish, nn.ELU, nn.PReLU)


@dataclass(frozen=True)
class Trial:
    """One form of the model: the file to pack, how the server loads it, and its measured speed and drift."""

    method: str  # `FP32`, or the method that it was quantised by
    packed: Packed
    load: TorchScriptOptions
    signature: Signature
    quantised: Quantised | None = None  # None for fp32
    report: Report | None = None  # None: not verified

    @property
    def name(self) -> str:
        """The method with its engine, for tables."""
        engine = self.load.quantized_engine
        return f"{self.method}, {engine}" if engine else self.method

    @property
    def speedup(self) -> float:
        """How many times as fast as fp32 it is; 1 where that was not measured."""
        found = self.report.speedup if self.report else None
        return 1.0 if found is None else found


def methods_tried(module: nn.Module, method: str, target: str, samples: Sequence[object]) -> tuple[str, ...]:
    """Return the methods that `method` chooses from for this model; only `method` if it chooses from none."""
    if not METHODS[method].tries:
        return (method,)
    with refusing("looking for layers to quantise"):
        module = without_parametrizations(module)
    layers = Counter(type(layer) for layer in module.modules())
    dynamic = sum(layers[kind] for kind in _DYNAMIC)
    convolutions = sum(layers[kind] for kind in _CONVOLUTIONS)
    if method != AUTO:  # "int8": without samples dynamic only; with torchao's PT2E static only
        return METHODS[method].tries[not samples :] if target == TORCHSCRIPT else METHODS[method].tries[:1]
    suits = {
        "int8-static": bool(samples) and bool(dynamic or convolutions),
        # One such layer among many convolutions takes a hundredth of the time.
        "int8-dynamic": bool(dynamic) and not convolutions > 4 * dynamic,
        "bf16": processor_has_bf16(),
        "int8-weight": not convolutions and _is_heavy(module),
    }
    return tuple(name for name in METHODS[method].tries if suits[name])


def _is_heavy(module: nn.Module) -> bool:
    """Return whether the weights of large linear layers are more than the caches near a core hold."""
    linear = [one for one in large_layers(module).values() if isinstance(one, nn.Linear)]
    return sum(one.weight.numel() for one in linear) >= _HEAVY


def choose_trial(trials: Sequence[Trial], method: str) -> Trial:
    """Return the fastest trial whose drift is accepted; the fastest trial of all if every drift is refused.

    With `auto`, a quantised form is chosen only if it is at least `LITTLE` times as fast as fp32.
    """
    accepted = [one for one in trials if one.report and one.report.accepted]
    if method == AUTO:
        worth = [one for one in accepted if one.method == FP32 or one.speedup >= LITTLE]
        return max(worth or trials, key=lambda one: (one.method != FP32, one.speedup))
    return max(accepted or trials, key=lambda one: one.speedup)


def table(trials: Sequence[Trial], failures: Mapping[str, str], chosen: Trial) -> str:
    """Return all candidates as a table for the user, the fastest first; `failures` has reasons by method."""
    rows = [("candidate", "processor time", "drift", "verdict")]
    for one in sorted(trials, key=lambda one: -one.speedup):
        drift = f"{one.report.difference.drift:.2g}" if one.report else ""
        rows.append((one.name, f"{1 / one.speedup:.2f} x fp32", drift, _verdict(one, one is chosen)))
    rows += [(method, "", "", f"can't be made: {reason}") for method, reason in failures.items()]
    widths = [max(len(row[column]) for row in rows) + 2 for column in range(3)]
    return "\n".join(
        "".join(f"{text:<{wide}}" for text, wide in zip(row, widths, strict=False)) + row[3] for row in rows
    )


def _verdict(trial: Trial, is_chosen: bool) -> str:
    if is_chosen:
        return "packed"
    if trial.report and not trial.report.accepted:
        return "drifts too far"
    if trial.method == FP32:
        return "slower"
    if trial.speedup <= 1:
        return "not faster than fp32"
    return "gains too little" if trial.speedup < LITTLE else "slower than what is packed"


def check_trial(trial: Trial, module: nn.Module, options: BuildOptions) -> str:
    """Return a warning about the trial that is to be packed, or an empty text.

    Args:
        trial: with its report.
        module: the original model, to advise on.
        options: the format of the packed model, and whether to accept any drift, or one that is not faster.

    Raises:
        ModelRefused: the drift is too large, or a quantised model is not faster than in fp32.
    """
    if trial.report is None:
        return ""
    target = str(options.model_format)
    if not options.accept_drift:
        refuse_drift(trial.report, quantised=trial.quantised is not None)
    if trial.quantised is None:
        return _beside_eager(trial.report) if target == EXPORT else ""
    fp32, speedup = trial.report.fp32, trial.speedup
    if fp32 is None or speedup >= LITTLE:
        return ""
    times = told_times(fp32.latency_ms, trial.report.packed.latency_ms)
    helps = what_helps(module, trial.method, target)
    if speedup > 1:
        return f"{trial.method} gains little: {times}; {helps}"
    if options.accept_slower:
        return f"warning: {trial.method} is not faster than fp32: {times}; {helps}"
    raise ModelRefused(
        f"{trial.method} is not faster than fp32 on this processor: {times}; {helps}; "
        "--accept-slower packs it all the same, for its size or for another processor"
    )


def _beside_eager(report: Report) -> str:
    """Return a warning if an exported program is slower than its eager model; else an empty text."""
    eager_ms, packed_ms = report.original.latency_ms, report.packed.latency_ms
    share = gain(eager_ms, packed_ms)
    if share * LITTLE >= 1:
        return ""
    times = told_times(eager_ms, packed_ms)
    return (
        f"as an exported program the model runs at {share:.2f} x its speed in eager mode: {times}; "
        f"--format {AOTI} compiles it, and {TORCHSCRIPT} runs it outside of Python"
    )


def what_helps(module: nn.Module, method: str, target: str) -> str:
    """Return why a method gains nothing with this model, and another method or format to try."""
    found = Counter(type(layer) for layer in without_parametrizations(module).modules())
    convolutions = sum(found[kind] for kind in _CONVOLUTIONS)
    in_fp32 = {kind.__name__: found[kind] for kind in _IN_FP32 if found[kind]}
    plain = f"--quantize {AUTO} tries the other methods and packs fp32 where none gains"
    if gains := METHODS[method].gains:
        return f"{method} gains {gains}; {plain}"
    if target == EXPORT:
        return (
            "an exported program computes its int8 layers in fp32 until it is compiled; --format "
            f"aoti compiles it, or {plain}"
        )
    if method == "int8-dynamic" and convolutions:
        return (
            f"int8-dynamic leaves the {convolutions} convolutions in fp32; --quantize int8-static with "
            f"--samples changes them, or {plain}"
        )
    if method == "int8-static" and target == TORCHSCRIPT and in_fp32:
        named = ", ".join(f"{count} {name}" for name, count in in_fp32.items())
        return (
            f"in TorchScript {named} compute in fp32 and convert from and to int8 each; --format {AOTI} "
            f"compiles them together with the int8 layers, or {plain}"
        )
    return plain
