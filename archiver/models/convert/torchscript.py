"""`--format torchscript`: trace or script the model, then freeze it, which fuses layers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.fold.attention import Encoder
from torchere.archiver.models.inputs.buffers import refuse_lost_state, unchanged_buffers
from torchere.archiver.models.inputs.run import (
    Named,
    OperatorWatch,
    Run,
    copies,
    has_hooks,
    named_results,
    seeded,
    shapes,
)
from torchere.archiver.models.inputs.sizes import FreeSize, Tensors
from torchere.archiver.models.load.exported_program import make_traceable
from torchere.archiver.models.load.freezing import frozen
from torchere.archiver.models.load.module import traceable_lengths
from torchere.archiver.models.load.source import input_names
from torchere.archiver.models.load.torchscript import check_states, has_linear_layers
from torchere.archiver.models.probe.free_sizes import examples_of_size
from torchere.archiver.models.probe.isolation import ModelEndedProcess, isolated
from torchere.archiver.models.probe.precision import COARSE, FINE, Precision, differing, precision_of
from torchere.archiver.models.probe.row_independence import VARIATIONS
from torchere.archiver.models.steps import Say, line_of, silent


def to_torchscript(
    module: torch.nn.Module,
    example: Tensors,
    *,
    sizes: Sequence[FreeSize] = (),
    script: bool = False,
    only_trace: bool = False,
    say: Say = silent,
) -> torch.jit.ScriptModule:
    """Compile a module to frozen TorchScript; freezing folds batch normalisation into the preceding layer.

    Args:
        module: in eval mode; TorchScript is frozen, unless it is frozen already.
        example: the inputs of the trace. Tracing keeps only the branches that this example takes.
        sizes: the sizes that differ between requests; the trace is also compared at other values of them.
        script: compile the source of the module, with its branches and loops, instead of tracing.
        only_trace: do not compile the source if tracing fails or gives other results.
        say: receives a line if tracing may have made a value constant, or the source was compiled instead.

    Raises:
        ModelRefused: the trace differs from the module (see `trace`, `tell_unused`), and the compiled source
            differs, too, or does not compile.
        Exception: any error of torch's compiler.
    """
    forget_stale_operators()
    with readable_properties(module):
        if isinstance(module, torch.jit.ScriptModule):
            made = _frozen(module, example)
        elif script:
            made = _frozen(torch.jit.script(module), example)
        else:
            made = _traced_or_scripted(module, example, sizes, only_trace, say)
    check_states(made)
    return made


def forget_stale_operators() -> None:
    """Remove stale entries from the table in which torch's compiler looks up operators.

    The keys are the `id`s of operator objects. When a library adds an overload to an operator, as the import
    of torch's int8 operators does, torch makes a new object, but the table keeps the `id` of the old one. If
    an attribute of a module gets this `id`, the compiler takes it for the operator, and refuses the module.
    """
    table: dict[int, str] = getattr(getattr(torch.jit, "_builtins", None), "_builtin_table", None) or {}
    for key, name in list(table.items()):
        namespace, _, own_name = name.partition("::")
        if namespace in ("aten", "prim"):  # functions of Python have some of these names, too
            continue
        present = getattr(vars(getattr(torch.ops, namespace)).get(own_name), "_op", None)
        if present is not None and id(present) != key:
            del table[key]


def _frozen(compiled: torch.jit.ScriptModule, example: Tensors) -> torch.jit.ScriptModule:
    watch = _NormalisedRows()
    has_forward = compiled._c._has_method("forward")
    if has_forward and has_linear_layers(compiled) and "aten::batch_norm" in str(compiled.inlined_graph):
        # Run a copy, because the module may keep tensors, and could not write into those of inference mode
        # later. `watch` sees `aten::linear` only in this mode; otherwise autograd splits the operator first.
        run = copy.deepcopy(compiled.eval())
        with torch.inference_mode(), watch:
            run(*copies(example))
    return frozen(compiled, fold_linear=watch.only_rows)


class _NormalisedRows(OperatorWatch):
    """Records whether all batch normalisations of linear layers' outputs get inputs [rows, features]."""

    only_rows = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "batch_norm" in func.name() and args[0].dim() != 2 and hasattr(args[0], "is_of_linear_layer"):
            self.only_rows = False
        result = func(*args, **(kwargs or {}))
        # Freezing removes `detach`, and then folds a normalisation after it into the linear layer.
        if func.name() == "aten::linear" or (
            func.name() == "aten::detach" and hasattr(args[0], "is_of_linear_layer")
        ):
            result.is_of_linear_layer = True  # kept on the tensor, as its `id` may be reused
        return result


def _traced_or_scripted(
    module: torch.nn.Module, example: Tensors, sizes: Sequence[FreeSize], only_trace: bool, say: Say
) -> torch.jit.ScriptModule:
    if isinstance(module, torch.fx.GraphModule):
        make_traceable(module)
    try:
        made = _frozen(trace(module, example, say, sizes), example)
        with unchanged_buffers(module):  # the trace has the same buffers
            tell_unused(module, made, example, say)
        return made
    # Broad: the tracer runs the model's own code, and the compiler may support code that the tracer does not.
    except Exception as error:
        if only_trace:
            raise
        refusal = error
    try:
        scripted = torch.jit.script(module)
        with unchanged_buffers(module), unchanged_buffers(scripted):
            _refuse_other_answers(module, scripted, example, sizes)
        made = _frozen(scripted, example)
    # Broad: see above. The error of the trace has the advice.
    except Exception as error:
        raise _both(refusal, error) from refusal
    say(f"the source was compiled, as with --script, because tracing fails: {line_of(refusal)}")
    return made


def _both(traced: Exception, scripted: Exception) -> ModelRefused:
    text = str(traced).removesuffix(f"; {_WAYS_OUT}")
    if not isinstance(traced, ModelRefused):
        text = f"tracing failed: {line_of(traced)}"
    return ModelRefused(
        f"{text}; nor does its source compile, as with --script: {line_of(scripted)}; change that in the "
        f"model, or take --format export, which says what it can't keep; {AS_PYTHON}"
    )


@contextmanager
def readable_properties(module: torch.nn.Module) -> Iterator[None]:
    """Make properties that raise look missing in the block, because torch's compiler reads every attribute.

    A LightningModule without its Trainer raises RuntimeError, and the compiler expects only AttributeError.
    """
    raising = {
        (owner, name): item
        for part in module.modules()
        for owner in type(part).__mro__
        for name, item in vars(owner).items()
        if isinstance(item, property) and owner is not torch.nn.Module and _raises(part, item)
    }
    for owner, name in raising:
        setattr(owner, name, property(_missing))
    try:
        yield
    finally:
        for (owner, name), item in raising.items():
            setattr(owner, name, item)


def _raises(part: torch.nn.Module, item: property) -> bool:
    try:
        if item.fget is not None:
            item.fget(part)
    except AttributeError:
        return False
    # Broad: the property is the model's own code.
    except Exception:
        return True
    return False


def _missing(part: torch.nn.Module) -> None:
    raise AttributeError(f"a property of {type(part).__name__} that can't be read now")


# Advice for models that neither converter supports: the advice for one would only name the other.
AS_PYTHON = (
    "where neither works, serve it as Python: a class by --format keep with --model-file, others by a "
    "--handler of your own that loads them from --extra-files"
)
_BAKED = "We can't record the data flow of Python values"  # torch's warning for a value read from a tensor
# Code of torch and of the archiver is made for tracing; `_refuse_other_answers` finds errors of such code.
_MADE_FOR_IT = (Path(torch.__file__).parent, Path(__file__).parents[2])
_WAYS_OUT = "--script keeps branches and loops, and --format export refuses those it can't keep"


def trace(
    module: torch.nn.Module, example: Tensors, say: Say, sizes: Sequence[FreeSize] = ()
) -> torch.jit.ScriptModule:
    """Trace the module on the example, and check that the trace gives the same results for other inputs.

    Results without a TorchScript type (nested dicts, None) are returned as one flat dict, with the output
    names of a signature as keys.

    Raises:
        ModelRefused: the trace gives other results than the module for other values or sizes of the inputs.
        Exception: any error of torch's tracer.
    """
    with torch.no_grad():
        with unchanged_buffers(module):
            is_plain = _is_plain(module(*copies(example)))
            refuse_lost_state(module, example, "a trace")
        with (
            unchanged_buffers(module),
            _plain_encoders(module),
            traceable_lengths(module),
            _baked() as places,
        ):
            made: Any = torch.jit.trace(  # type: ignore[no-untyped-call]
                module if is_plain else _Flat(module), copies(example), strict=False, check_trace=False
            )
    with unchanged_buffers(module):  # the trace has the same buffers
        _refuse_other_answers(module, made, example, sizes, ends=bool(places))
    if places:
        count = "one place" if len(places) == 1 else f"{len(places)} places"
        say(
            f"tracing fixed values that the model's code takes out of tensors, in {count} "
            f"(first: {places[0]}); a few others were tried and answered right; {_WAYS_OUT}"
        )
    traced: torch.jit.ScriptModule = made
    return traced


def tell_unused(module: torch.nn.Module, frozen: torch.jit.ScriptModule, example: Tensors, say: Say) -> None:
    """Report the inputs that the graph does not use.

    Raises:
        ModelRefused: the module uses such an input, and the trace made its value constant.
    """
    graph: Any = frozen.graph
    values = list(graph.inputs())[1:]  # the first is the module itself
    for index, (name, value) in enumerate(zip(input_names(module, len(values)), values, strict=True)):
        if value.uses():
            continue
        if _matters(module, example, index):
            raise ModelRefused(
                f"tracing took the input {name!r} for a constant that no request could change; {_WAYS_OUT}"
            )
        say(f"the answer does not depend on the input {name!r}, which clients must send all the same")


class _Flat(torch.nn.Module):
    """A wrapper that returns the results of a module as one dict by output name."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run the module and return its results by output name (`named_results`)."""
        return dict(named_results(self.module(*inputs)))


@contextmanager
def _plain_encoders(module: torch.nn.Module) -> Iterator[None]:
    """Replace torch's encoders in the block by `Encoder`, whose trace is correct wherever the padding is.

    Torch's encoder skips padding if it is at the end of every row. A trace would keep this branch, and mix up
    the tokens of rows whose padding is not at the end.
    """
    changed = [
        (parent, name, layer)
        for parent in module.modules()
        for name, layer in parent._modules.items()
        if type(layer) is torch.nn.TransformerEncoder and layer.use_nested_tensor and not has_hooks(layer)
    ]
    for parent, name, layer in changed:
        parent._modules[name] = Encoder(layer).eval()
    try:
        yield
    finally:
        for parent, name, layer in changed:
            parent._modules[name] = layer


def _is_plain(result: Any) -> bool:
    """Return whether TorchScript has a type for the result of a model."""
    if isinstance(result, dict):
        return all(isinstance(item, torch.Tensor) for item in result.values())
    if isinstance(result, (tuple, list)):
        return all(_is_plain(item) for item in result)
    return isinstance(result, torch.Tensor)


@contextmanager
def _baked() -> Iterator[list[str]]:
    """Yield a list; at block exit it gets the values that the trace made constant, with their locations."""
    places: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", torch.jit.TracerWarning)  # type: ignore[attr-defined]
        yield places
    for warning in caught:
        is_made_for_it = any(Path(warning.filename).is_relative_to(folder) for folder in _MADE_FOR_IT)
        if _BAKED in str(warning.message) and not is_made_for_it:
            what = str(warning.message).partition(" might cause")[0]
            places.append(f"{what[:1].lower()}{what[1:]}, {warning.filename}:{warning.lineno}")


def _refuse_other_answers(
    module: torch.nn.Module,
    made: torch.jit.ScriptModule,
    example: Tensors,
    sizes: Sequence[FreeSize],
    ends: bool = False,
) -> None:
    """Raise ModelRefused if the results differ for other values or sizes; `ends`: see `sizes_to_compare`."""
    for variation in VARIATIONS:
        inputs = tuple(variation(tensor) for tensor in example)
        wanted = _answers(module, inputs)
        if wanted is not None and _contradicts(module, inputs, wanted, _answers(made, inputs)):
            raise ModelRefused(
                "tracing kept the branches and loops that the example takes, and for other values of the "
                f"inputs the model takes others; {_WAYS_OUT}"
            )
    if not sizes:
        return

    def work(tell: Say, say: Say) -> str:
        for free in sizes:
            for size in free.sizes_to_compare(example, ends):
                if _fixes(module, made, examples_of_size(example, free, size), tell):
                    raise ModelRefused(
                        f"tracing fixed the size of {free.name}: the example has {free.size_in(example)}, "
                        f"and when it is {size} the model answers differently; {_WAYS_OUT}"
                    )
        return ""

    try:
        isolated(work, silent)
    except ModelEndedProcess:
        return  # `signature_of` tries these sizes, too, and raises the error


def _fixes(module: torch.nn.Module, made: Run, resized: Iterator[Tensors], tell: Say) -> bool:
    """Return whether the trace differs on the first inputs in `resized` that the module accepts.

    These inputs are all of one size. If the trace fails, `signature_of` finds the sizes that it accepts.
    """
    for inputs in resized:
        tell(shapes(inputs))
        wanted = _answers(module, inputs)
        if wanted is not None:
            found = _answers(made, inputs)
            return found is not None and _contradicts(module, inputs, wanted, found)
    return False


def _contradicts(module: torch.nn.Module, inputs: Tensors, wanted: Named, found: Named | None) -> bool:
    """Return whether the results differ although the module gives equal results for equal inputs.

    If equal inputs give different results, the module keeps state, which `signature_of` reports.
    """
    if not _differ(wanted, found) or _differ(wanted, _answers(module, inputs)):
        return False
    # A trace runs fused operators, which in bfloat16 may round a value to the next step.
    return precision_of(module, inputs) is not COARSE or _differ(wanted, found, COARSE)


def _matters(module: torch.nn.Module, example: Tensors, index: int) -> bool:
    wanted = seeded(module, example)
    for variation in VARIATIONS:
        inputs = (*example[:index], variation(example[index]), *example[index + 1 :])
        if _differ(wanted, _answers(module, inputs)):
            return True
    return False


def _answers(run: Run, inputs: Tensors) -> Named | None:
    """Run the model with a fixed seed and return its results; None if it fails."""
    try:
        return seeded(run, inputs)
    except ModelRefused:
        return None


def _differ(wanted: Named, found: Named | None, precision: Precision = FINE) -> bool:
    return found is None or len(found) != len(wanted) or differing(wanted, found, precision) is not None
