"""`--quantize`: quantise a model by one method; for TorchScript, choose the engine that measures best."""

from __future__ import annotations

import contextlib
import io
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.convert.exported_program import refuse_attributes
from torchere.archiver.models.convert.torchscript import to_torchscript
from torchere.archiver.models.fold.attention import Opened, open_attention
from torchere.archiver.models.fold.convolutions import Folded, answers_alike, fold
from torchere.archiver.models.fold.exported_layers import with_layers
from torchere.archiver.models.fold.parametrizations import copied, without_parametrizations
from torchere.archiver.models.fold.tracing import NotTraceable
from torchere.archiver.models.inputs.run import DATATYPES, LoadedModel, copies
from torchere.archiver.models.inputs.sizes import FreeSize
from torchere.archiver.models.load.exported_program import holds_for_all_sizes, unguarded_module
from torchere.archiver.models.load.torchscript import load_script
from torchere.archiver.models.load.weight_only import (
    held_elsewhere,
    large_layers,
    torchao_kinds,
    weight_only,
)
from torchere.archiver.models.measure.cost import Samples, fewer_threads_when_busy
from torchere.archiver.models.quantize.candidates import (
    Candidate,
    Compile,
    Maker,
    Measured,
    choose,
    quiet,
)
from torchere.archiver.models.quantize.pt2e import check_torchao, exported, quantised_program
from torchere.archiver.models.quantize.reads import KEPT_AS_READ, read_elsewhere
from torchere.archiver.models.steps import Say, errors_only, refusing, silent
from torchere.archiver.quantization import AUTO, INT8_DRIFT, METHODS

_FLOAT32_IN_IT = (
    "its code makes tensors of float32, or casts to it: let it take the dtype of its inputs (dtype=x.dtype), "
    "or leave --quantize out"
)
_NO_PARAMETER = (
    "none of its layers with fewer bits has a bias, so that no parameter is left for code as "
    "next(self.parameters()): let it take the dtype of its inputs (x.dtype), or take another --quantize"
)
_BY_PT2E = ("int8-static", "int8-dynamic", "int8")  # in other formats than TorchScript
_WEIGHTS = {"int8-weight": 8, "int4-weight": 4}  # bits


@dataclass(frozen=True)
class Quantised:
    """A quantised model, with the chosen engine and all measurements."""

    module: nn.Module  # frozen TorchScript for format torchscript; eager for the others and for bf16
    notes: tuple[str, ...]  # lines for the user
    engine: str | None = None  # for `torchscript.quantized_engine` in model-config.yaml; None: no value
    measured: tuple[Measured, ...] = ()  # every engine that was tried
    kept: tuple[str, ...] = ()  # layers left in fp32, because they cause the most drift in int8
    script: bytes | None = None  # the TorchScript file that was measured, with int8 layers


@fewer_threads_when_busy()
def quantise(
    model: LoadedModel,
    method: str,
    samples: Samples,
    *,
    target: str = "torchscript",
    compiled: Compile = to_torchscript,
    max_drift: float = INT8_DRIFT,
    timed: Samples = (),
    say: Say = silent,
) -> Quantised:
    """Quantise the model without modifying it.

    Not thread-safe: temporarily sets torch's number of threads and its int8 engine.

    Args:
        model: eager, in fp32; for "int8-trained" also TorchScript.
        method: a key of `METHODS`, except those that choose from other methods (`tries`).
        samples: arguments of the model, each with a batch dimension if the model accepts batches. Without
            samples, engines are compared on `model.example`.
        target: the format of the packed model. TorchScript uses FX and PyTorch's int8 engines; the other
            formats use torchao's PT2E, which has no choice of engines.
        compiled: converts an int8 model to TorchScript.
        max_drift: with a larger drift, the layers that hurt most stay in fp32.
        timed: arguments of the model to time engines with; without any, the samples.
        say: takes lines about progress.

    Raises:
        ModelRefused: the method is unknown, or unsuitable for this model or machine, or the format loses
            state that the model keeps; the message gives a remedy.
        NoUsableEngine: no engine runs the quantised model.
    """
    check_method(method, target, has_samples=bool(samples))
    if METHODS[method].tries:
        raise ValueError(f"{method} chooses from {', '.join(METHODS[method].tries)}; quantise by one of them")
    if method != "int8-trained":
        _check_start(model.module, method)
    if method == "bf16":
        made = bf16(model.module)
        with refusing("running the model in bfloat16", _FLOAT32_IN_IT):
            made(*copies(model.example))
        return Quantised(made, ("weights and sums in bfloat16",))
    if method in _WEIGHTS:
        return _weight_only(model, method, target)
    if target == "torchscript":
        with quiet():
            # A model that was trained for int8 keeps the layers that it was trained with.
            opened = Opened(model.module, 0) if method == "int8-trained" else _plain(model)
            return _by_engine(Maker(method, model, opened, samples, compiled, max_drift, say, timed))
    if method == "int8-trained":
        return Quantised(model.module, ("exported as it was trained",))
    refuse_attributes(model.module, model.example)
    is_dynamic = method == "int8-dynamic"
    given = samples or [model.example]
    program = quantised_program(_plain(model).module, given, model.signature.inputs, is_dynamic, say)
    return Quantised(program, ("quantised by torchao PT2E for oneDNN",))


def _weight_only(model: LoadedModel, method: str, target: str) -> Quantised:
    plain = _plain(model).module
    layers = large_layers(plain)
    read = held_elsewhere(plain, layers)
    if target != "export":  # the other formats would hold the weight that is read in fp32, too
        reads = read_elsewhere(plain, model.example, layers)
        read.update(name for name, has_values in reads.items() if has_values)
    made, note = weight_only(plain, _WEIGHTS[method], read)
    if read:
        note = f"{note}; {KEPT_AS_READ} {', '.join(sorted(read))}"
    advice = _NO_PARAMETER if next(made.parameters(), None) is None else ""
    with refusing(f"running the model with weights of {_WEIGHTS[method]} bits", advice):
        made(*copies(model.example))
    return Quantised(made, (note,))


def shared_scale(model: LoadedModel, method: str) -> tuple[str, ...]:
    """Return a warning about dynamic int8 if a batch has floating-point rows of several clients; else ().

    A model of tokens gets no warning, because an embedding gives all tokens activations of about one size.
    """
    takes_fractions = any(tensor.is_floating_point() for tensor in model.example)
    if method != "int8-dynamic" or not model.signature.batched or not takes_fractions:
        return ()
    return (
        "all rows of a batch share one scale: a request with numbers far larger than usual, or infinity, "
        "spoils the answers to others in its batch; unless clients are trusted, take int8-static, or a "
        "batchSize of 1 in model-config.yaml",
    )


def one_size(method: str, samples: Samples, sizes: Sequence[FreeSize]) -> tuple[str, ...]:
    """Return a warning for each free size that is equal in all samples of int8-static.

    int8 would clip a value that grows with a size, such as a sum over the tokens of a text, to the range that
    it has in the samples.
    """
    alike = [free for free in sizes if len({free.size_in(one) for one in samples}) == 1]
    return tuple(
        f"all samples have {free.name} of {free.size_in(samples[0])}, which may vary: int8 knows the ranges "
        "of that size only; give --samples of all sizes that requests have"
        for free in alike
        if method == "int8-static" and not free.is_batch(samples[0])
    )


def check_method(method: str, target: str, *, has_samples: bool) -> None:
    """Check a method as far as possible before the model is read.

    Raises:
        ModelRefused: it is not a key of `METHODS`, not for this format, or needs samples or torchao, which
            are missing.
    """
    if method not in METHODS:
        raise ModelRefused(f"--quantize is {method!r}; expected one of {', '.join(METHODS)}")
    if method == "int4-weight" and target == "torchscript":
        raise ModelRefused(
            "int4-weight brings the weights into the order of the processor when a server loads them, which "
            "TorchScript can't; take --format export or aoti, or int8-weight"
        )
    is_pt2e = method in _BY_PT2E and target != "torchscript"
    if is_pt2e:
        check_torchao()
    is_static = method == "int8-static" or (method == "int8" and is_pt2e)
    if is_static and not has_samples:
        raise ModelRefused(
            f"{method} needs samples to see how large activations are, and there are none; give some that "
            "are like real requests with --samples"
        )


def check_quantised(module: nn.Module, method: str | None, target: str) -> str:
    """Check a model and its weights; return a line about weights of torchao for the user, or "".

    Raises:
        ModelRefused: torchao made them, and `method` or the format `target` would change them; or `method`
            does not start from such a model.
    """
    quantised = torchao_kinds(module)
    if method and (quantised or (method != "int8-trained" and not METHODS[method].tries)):
        _check_start(module, method)
    if quantised and target == "torchscript":
        raise ModelRefused(
            f"the model's weights are quantised by torchao ({quantised}), and TorchScript would hold them in "
            "fp32; take --format export or aoti, which keep their bits"
        )
    return f"weights of torchao ({quantised}) keep their bits; a server needs no torchao" if quantised else ""


def _check_start(module: nn.Module, method: str) -> None:
    if quantised := torchao_kinds(module):
        raise ModelRefused(
            f"--quantize {method}: the model's weights are quantised already, by torchao ({quantised}); "
            "leave --quantize out, which keeps them with --format export or aoti, or start from the model in "
            "fp32"
        )
    kinds = {weight.dtype for weight in module.parameters() if weight.is_floating_point()}
    if kinds and torch.float32 not in kinds:
        found = " and ".join(sorted(DATATYPES.get(kind, str(kind)) for kind in kinds))
        raise ModelRefused(
            f"--quantize {method} starts from weights of FP32, and all of the model's are {found}; make them "
            "FP32 in its class (self.float()), or leave --quantize out"
        )
    if isinstance(module, torch.jit.ScriptModule):
        why, do = (
            ("which can't be cast safely: it may hold constants of float32", "cast")
            if method == "bf16"
            else ("whose layers can't be changed any more", "quantise")
        )
        raise ModelRefused(
            f"the model is TorchScript, {why}; {do} the eager model that it was made from (torchere archive "
            "--model-file or --factory)"
        )


def _plain(model: LoadedModel) -> Opened:
    """Return the model with layers and weights that quantisers find."""
    return open_attention(without_parametrizations(model.module), model.example)


_SHAPES = "torch.fx.experimental.symbolic_shapes"


def _folded(maker: Maker) -> Folded:
    """Fold the model, or its exported program if the model can't be traced."""
    try:
        return fold(maker.opened.module, maker.samples[0])
    except NotTraceable as refusal:
        folded = _folded_program(maker)
        if folded is None:
            raise
        maker.say(f"{refusal.reason}: its exported program is quantised")
        return folded


def _folded_program(maker: Maker) -> Folded | None:
    """Fold the exported program of the model; return None if that fails, or answers otherwise.

    torch.export follows a loop over chunks of a tensor, at which tracing fails. A program that holds for some
    sizes only, because of a branch on one, is not taken.
    """
    module, example = maker.opened.module, maker.model.example
    try:
        # torch prints the graph up to the place where the export fails, which users need not see.
        with errors_only(_SHAPES), contextlib.redirect_stderr(io.StringIO()):
            program = exported(module, example, maker.model.signature.inputs)
        if not holds_for_all_sizes(program):
            return None
        folded = fold(with_layers(unguarded_module(program), example), maker.samples[0])
    # Broad: torch.export runs the model's own code.
    except Exception:
        return None
    return folded if answers_alike(module, folded.module, example) else None


def _by_engine(maker: Maker) -> Quantised:
    method = maker.method
    with refusing(method, f"--quantize {AUTO} tries all methods that suit the model"):
        if method == "int8-static":
            maker = replace(maker, folded=_folded(maker))
        made = maker.candidate()
    chosen = choose(made.measured)
    module = load_script(io.BytesIO(made.packed), check=False, engine=chosen.engine)
    notes = _notes(method, made, chosen)
    return Quantised(module, notes, chosen.engine, made.measured, made.kept, made.packed)


def _notes(method: str, candidate: Candidate, chosen: Measured) -> tuple[str, ...]:
    ranked = sorted(candidate.measured, key=lambda one: (bool(one.failure), one.latency_ms))
    return (
        f"{method}: {candidate.note}",
        "engines: " + ", ".join(one.note for one in ranked) + " (processor time of one call)",
        f"chosen: {method} on {chosen.engine}, drift {chosen.drift:.2g}",
    )


class InBfloat16(nn.Module):
    """A wrapper that computes in bfloat16 with float32 inputs and outputs, to keep the model's signature."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = copied(module).to(torch.bfloat16).eval()

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Round floating-point inputs and run the model; tokens and masks are passed unchanged."""
        return _cast(self.module(*(_cast(one, torch.bfloat16) for one in inputs)), torch.float32)


def bf16(module: nn.Module, has_bf16: bool | None = None) -> nn.Module:
    """Convert a copy of the model to bfloat16.

    Args:
        module: eager, in fp32; it is not modified.
        has_bf16: whether the processor multiplies bfloat16; None queries this machine.

    Raises:
        ModelRefused: the processor has no such instruction.
    """
    if not (processor_has_bf16() if has_bf16 is None else has_bf16):
        raise ModelRefused(
            f"bf16 would be slower than fp32 here: this {platform.machine()} processor has "
            f"{torch.backends.cpu.get_cpu_capability()} and no bfloat16 instructions; expected AVX512-BF16, "
            "AMX or Arm BF16. Pack on such a machine, or take --quantize auto"
        )
    return InBfloat16(module)


def processor_has_bf16() -> bool:
    """Return whether this processor multiplies bfloat16."""
    capabilities: Any = getattr(torch.cpu, "get_capabilities", dict)  # torch 2.10 has no such function
    found = capabilities() or {"avx512_bf16": torch.cpu._is_avx512_bf16_supported()}
    return any(bool(found.get(name)) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: _cast(part, dtype) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(_cast(part, dtype) for part in value)
    return value
