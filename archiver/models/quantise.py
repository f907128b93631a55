"""`--quantize`: a model in fewer bits, by the method and on the engine that measure best on its samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.engines import (
    Measured,
    choose,
    rebuilt,
)
from torchere.archiver.models.folding_attention import Opened, open_attention
from torchere.archiver.models.loaded import LoadedModel
from torchere.archiver.models.quantise_bf16 import bf16
from torchere.archiver.models.quantise_candidates import Candidate, Maker, Samples, some_of
from torchere.archiver.models.quantise_exported import quantised_program
from torchere.archiver.models.quantise_traced import Compile, quiet, traced
from torchere.archiver.models.running import DATATYPES
from torchere.archiver.models.steps import refusing
from torchere.archiver.models.verify import MAX_DRIFT

METHODS: dict[str, str] = {
    "int8-dynamic": "weights of linear, LSTM and GRU layers in 8 bits; needs no samples",
    "int8-static": "weights and activations in 8 bits; needs samples that are like real requests",
    "int8": "both of these, and the faster one that agrees",
    "int8-trained": "the model was trained for int8 (QAT), or is int8 already; only the engine is chosen",
    "bf16": "bfloat16, where the processor has it",
}
FORMATS = ("torchscript", "export", "aoti")


@dataclass(frozen=True)
class Quantised:
    """A quantised model, and how it came about."""

    module: nn.Module  # frozen TorchScript for format torchscript; eager for the others and for bf16
    method: str  # the one that was taken: "int8-static" or "int8-dynamic" where "int8" was asked for
    engine: str | None  # what `torchscript.quantized_engine` in model-config.yaml must say; None: nothing
    measured: tuple[Measured, ...]  # every engine that was tried
    notes: tuple[str, ...]  # lines for people
    kept: tuple[str, ...] = ()  # layers that went back to fp32, because in int8 they hurt most


def quantise(
    model: LoadedModel,
    method: str,
    samples: Samples,
    *,
    target: str = "torchscript",
    compiled: Compile = traced,
    max_drift: float = MAX_DRIFT["int8"],
) -> Quantised:
    """Quantise the model; it is left as it is.

    Not thread-safe: sets torch's number of threads and its int8 engine for a while.

    Args:
        model: eager, in fp32; for "int8-trained" also TorchScript.
        method: a key of `METHODS`.
        samples: arguments of the model, each with a batch of its own if it takes batches. Without any,
            `model.example` is what engines are compared on.
        target: the format that it will be packed in. TorchScript takes FX and PyTorch's int8 engines; the
            others take torchao's PT2E, and have no engine to choose.
        compiled: makes TorchScript of an int8 model; tracing unless given.
        max_drift: engines whose answers are further off are not chosen while there are better ones.

    Raises:
        ModelRefused: the method is unknown, or not for this model or machine; the text says what to do.
        NoUsableEngine: no engine runs it.
    """
    check_method(method)
    if target not in FORMATS:
        raise ModelRefused(f"--format is {target!r}; expected one of {', '.join(FORMATS)}")
    if method != "int8-trained":
        _check_weights(model, method)
    if method == "bf16":
        made = bf16(model.module)
        with refusing("running the model in bfloat16 (take casts to float32 out of its code)"):
            made(*(tensor.clone() for tensor in model.example))
        return Quantised(made, method, None, (), ("weights and sums in bfloat16",))
    if target == "torchscript":
        with quiet():
            return _by_engine(model, method, samples, compiled, max_drift)
    if method == "int8-trained":
        return Quantised(model.module, method, None, (), ("exported as it was trained",))
    is_dynamic = method == "int8-dynamic"
    given = samples or ([model.example] if is_dynamic else [])
    # Not for AOTInductor: of int8 layers in a residual it adds to the model's input in place (torch 2.13).
    opened = model.module if target == "aoti" else open_attention(model.module, model.example).module
    program = quantised_program(opened, given, model.signature.batched, is_dynamic)
    taken = method if is_dynamic else "int8-static"
    return Quantised(program, taken, None, (), ("quantised by torchao PT2E for oneDNN",))


def shared_scale(model: LoadedModel, method: str) -> tuple[str, ...]:
    """What is told of dynamic int8 where the rows of a batch are numbers of any size, and other clients'.

    Of tokens nothing is: what a layer makes of an embedding is about as large for all of them.
    """
    takes_fractions = any(tensor.is_floating_point() for tensor in model.example)
    if method != "int8-dynamic" or not model.signature.batched or not takes_fractions:
        return ()
    return (
        "all rows of a batch share one scale: a request with numbers far larger than usual, or infinity, "
        "spoils the answers to others in its batch; unless clients are trusted, take int8-static, or a "
        "batchSize of 1 in model-config.yaml",
    )


def check_method(method: str) -> None:
    """Raises `ModelRefused` for what is no key of `METHODS`."""
    if method not in METHODS:
        raise ModelRefused(f"--quantize is {method!r}; expected one of {', '.join(METHODS)}")


def _check_weights(model: LoadedModel, method: str) -> None:
    kinds = {weight.dtype for weight in model.module.parameters() if weight.is_floating_point()}
    if kinds and torch.float32 not in kinds:
        found = " and ".join(sorted(DATATYPES.get(kind, str(kind)) for kind in kinds))
        raise ModelRefused(
            f"--quantize {method} starts from weights of FP32, and all of the model's are {found}; make them "
            "FP32 in its class (self.float()), or leave --quantize out"
        )


def _by_engine(
    model: LoadedModel,
    method: str,
    samples: Samples,
    compiled: Compile,
    max_drift: float,
) -> Quantised:
    given = list(samples) or [model.example]
    is_trained = method == "int8-trained"  # with the layers that it was trained with
    opened = Opened(model.module, 0) if is_trained else open_attention(model.module, model.example)
    maker = Maker(model, opened, samples, compiled, some_of(model, given), max_drift)
    candidates, refusals = _candidates(method, maker)
    tried = tuple(one for candidate in candidates.values() for one in candidate.measured)
    chosen = choose(tried, max_drift)
    taken = candidates[chosen.method]
    module = rebuilt(taken.packed, chosen.engine)
    refused = [f"not taken: {one}" for one in refusals if samples]  # int8-static wants some
    notes = (*refused, *_notes(candidates, chosen, maker.fp32_ms()))
    return Quantised(module, chosen.method, chosen.engine, tried, notes, taken.kept)


def _candidates(method: str, maker: Maker) -> tuple[dict[str, Candidate], list[ModelRefused]]:
    """The model by each method that `method` stands for; by "int8" those that work, and why others do not."""
    methods = ("int8-static", "int8-dynamic") if method == "int8" else (method,)
    candidates: dict[str, Candidate] = {}
    refusals: list[ModelRefused] = []
    for name in methods:
        try:
            with refusing(name):
                candidates[name] = maker.candidate(name)
        except ModelRefused as refusal:
            refusals.append(refusal)
    if not candidates:
        raise refusals[0]
    return candidates, refusals


def _notes(candidates: dict[str, Candidate], chosen: Measured, fp32_ms: float) -> tuple[str, ...]:
    lines = []
    for method, candidate in candidates.items():
        lines.append(f"{method}: {candidate.note}")
        ranked = sorted(candidate.measured, key=lambda one: (bool(one.failure), one.latency_ms))
        lines.append(
            "engines: " + ", ".join(one.note for one in ranked) + f"; fp32 {fp32_ms:.3g} ms (1 thread)"
        )
    lines.append(f"chosen: {chosen.method} on {chosen.engine}, drift {chosen.drift:.2g}")
    if chosen.latency_ms > fp32_ms:
        lines.append(
            "int8 is slower than fp32 on this processor; it is smaller, and elsewhere perhaps faster"
        )
    return tuple(lines)
