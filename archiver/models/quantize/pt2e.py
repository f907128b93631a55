"""int8 for exported programs: torchao's PT2E adds quantise and dequantise steps to the exported graph.

AOTInductor compiles them to oneDNN's int8 kernels if freezing is on. An exported program that isn't compiled
computes in float between these steps: it is smaller, but not faster.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.convert.exported_program import by_parameter, exportable, hide_from
from torchere.archiver.models.fold.convolutions import fold
from torchere.archiver.models.fold.tracing import NotTraceable
from torchere.archiver.models.inputs.sizes import Tensors, without_ones
from torchere.archiver.models.load.weight_only import quiet_torchao
from torchere.archiver.models.measure.difference import answers
from torchere.archiver.models.steps import Say, counted, silent
from torchere.archiver.signature import ANY, TensorSpec

_LAYERS = {
    torch.ops.aten.conv1d.default,
    torch.ops.aten.conv2d.default,
    torch.ops.aten.conv3d.default,
    torch.ops.aten.linear.default,
}
_SUMS = {torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor}
# The classes of modules by which torchao finds layers, with the names that graphs have for them.
_MODULES = {f"{kind.__module__}.{kind.__qualname__}" for kind in (nn.Linear, nn.Conv2d)}
_PT2E = "torchao.quantization.pt2e.quantize_pt2e"
_QUANTIZER = "torchao.quantization.pt2e.quantizer.x86_inductor_quantizer"


def quantised_program(
    module: nn.Module,
    samples: Sequence[Tensors],
    inputs: Sequence[TensorSpec],
    dynamic: bool,
    say: Say = silent,
) -> nn.Module:
    """Return the model with int8 steps in its graph, ready to be exported or compiled.

    Args:
        module: eager, in fp32; it is not modified.
        samples: arguments to measure the range of activations on, at least one; if `dynamic`, only the first.
        inputs: the signature of the inputs, whose free dimensions stay free.
        dynamic: measure the range of activations at each call.
        say: takes a line about progress now and then.

    Raises:
        ModelRefused: torchao is not installed, or no layer of the model becomes int8.
    """
    with quiet_torchao():
        pt2e, quantizers = _torchao()
        graph: fx.GraphModule = exported(_folded(module, samples[0]), samples[0], inputs).module()
        _keep_normalisations(graph)
        _keep_sums(graph)
        _keep_inputs(graph)
        _set_hooks_apart(graph)
        quantizer = quantizers.X86InductorQuantizer()
        # 7-bit activations, because without VNNI the sum of two 8-bit products overflows.
        quantizer.set_global(
            quantizers.get_default_x86_inductor_quantization_config(is_dynamic=dynamic, reduce_range=True)
        )
        prepared = pt2e.prepare_pt2e(graph, quantizer)
        with torch.no_grad():
            given = samples[:1] if dynamic else samples
            if any(limit.multiple > 1 for spec in inputs for limit in spec.limits):
                # The guards of the exported graph refuse a size of one multiple, as `exported` doubles it.
                given = [tuple(map(without_ones, sample, inputs)) for sample in given]
            for sample in counted(given, len(given), "samples calibrated on", say):
                answers(prepared, sample)
        with _without_training(pt2e):
            converted: fx.GraphModule = pt2e.convert_pt2e(prepared)
    if not _is_quantised(converted):
        raise ModelRefused(_NO_LAYER.format("int8-dynamic" if dynamic else "int8-static"))
    _forget_unused(converted)
    return converted


# torchao's quantiser for x86 finds one-dimensional convolutions only before an nn.ReLU.
_NO_LAYER = (
    "{} changes linear layers and two-dimensional convolutions in exported programs, and found none to "
    "change in the model; take --format torchscript, where int8-static changes convolutions of one and three "
    "dimensions, too, and int8-dynamic LSTM and GRU layers, or leave --quantize out"
)


def _is_quantised(graph: fx.GraphModule) -> bool:
    return any(node.op == "call_function" and "dequantize" in str(node.target) for node in graph.graph.nodes)


def _folded(module: nn.Module, example: Tensors) -> nn.Module:
    """Fold paddings into convolutions, which PT2E does not do; return an untraceable model unchanged."""
    try:
        folded = fold(module, example).module
    except NotTraceable:
        return module
    # torchao tells the calls of linear layers apart, so their int8 weights are in the file once.
    call_each_once(folded, but=(nn.Linear,))
    return folded


def call_each_once(graph: fx.GraphModule, but: tuple[type[nn.Module], ...] = ()) -> dict[str, str]:
    """Give each call of a layer after the first a copy with the same weights; torch would merge the calls.

    Return the layer's name by the name of each copy. Layers whose type is in `but` are not copied.
    """
    called: set[str] = set()
    copies: dict[str, str] = {}
    for node in list(graph.graph.find_nodes(op="call_module")):
        name = str(node.target)
        layer = graph.get_submodule(name)
        if name in called and not isinstance(layer, but):
            node.target = f"{name}_{node.name}".replace(".", "_")
            node.meta.pop("nn_module_stack", None)  # otherwise it is exported under the old name
            graph.add_submodule(node.target, copy.copy(layer))
            copies[node.target] = name
        called.add(name)
    graph.recompile()
    return copies


def _keep_inputs(graph: fx.GraphModule) -> None:
    """Negate floating-point inputs twice, so that no compiled layer writes its result into them.

    AOTInductor lets an int8 layer of a residual add to the other operand in place, even if that is an input
    of the model (torch 2.13). It removes a clone but keeps negations, which cost next to nothing. An input
    that only convolutions and linear layers read is never such an operand.
    """
    for node in graph.graph.find_nodes(op="placeholder"):
        readers = {user.target for user in node.users}
        if not node.meta["val"].is_floating_point() or readers <= _LAYERS:
            continue
        with graph.graph.inserting_after(node):
            once = graph.graph.call_function(torch.ops.aten.neg.default, (node,))
        with graph.graph.inserting_after(once):
            twice = graph.graph.call_function(torch.ops.aten.neg.default, (once,))
        node.replace_all_uses_with(twice, lambda user, once=once: user is not once)
        for made in (once, twice):
            made.meta = {"val": node.meta["val"]}
    graph.recompile()


def _keep_normalisations(graph: fx.GraphModule) -> None:
    """Hide from torchao each batch normalisation that it would fold wrongly, behind an alias of its input.

    torchao changes the layer for all nodes that read it, but a weight or bias that layers share only for the
    first normalisation. In a transposed convolution with groups it changes the wrong channels.
    """
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.batch_norm.default):
        layer = node.args[0]
        changed = [layer, *(one for one in layer.all_input_nodes if one.op == "get_attr")]
        if any(len(one.users) > 1 for one in changed) or _has_groups(layer):
            hide_from(node, layer)
    graph.recompile()


def _keep_sums(graph: fx.GraphModule) -> None:
    """Hide a layer from torchao if a number is added to its output: torchao would expect a second tensor."""
    for node in list(graph.graph.nodes):
        if node.target in _SUMS and not all(isinstance(operand, fx.Node) for operand in node.args[:2]):
            hide_from(node, node.all_input_nodes[0])
    graph.recompile()


def _has_groups(node: fx.Node) -> bool:
    transposed = str(node.target).startswith("aten.conv_transpose")
    return transposed and node.args[6:7] not in ((), (1,))


def _set_hooks_apart(graph: fx.GraphModule) -> None:
    """Attribute the operators of a layer's hooks to the module around it.

    torchao takes the last operator of a layer's module for the layer.
    """
    for node in graph.graph.nodes:
        around = dict(node.meta.get("nn_module_stack") or {})
        if around and node.target not in _LAYERS and around.popitem()[1][1] in _MODULES:
            node.meta["nn_module_stack"] = around


def _forget_unused(graph: fx.GraphModule) -> None:
    """Delete the unused fp32 weights, which int8 weights replace: an exported program would hold both."""
    used = {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    held = [*graph.named_parameters(remove_duplicate=False), *graph.named_buffers(remove_duplicate=False)]
    for name in {name for name, _ in held} - used:
        owner, _, own = name.rpartition(".")
        delattr(graph.get_submodule(owner), own)


def exported(
    module: nn.Module, sample: Tensors, inputs: Sequence[TensorSpec]
) -> torch.export.ExportedProgram:
    """Return the exported program of the model, with the free dimensions of the inputs free."""
    free = [[at for at, size in enumerate(spec.shape) if size == ANY] for spec in inputs]
    given = tuple(map(without_ones, sample, inputs))
    sizes: list[dict[int, Any]] = [dict.fromkeys(its, torch.export.Dim.AUTO) for its in free]
    with torch.no_grad(), exportable(module):
        return torch.export.export(module, given, dynamic_shapes=by_parameter(module, sizes))


@contextlib.contextmanager
def _without_training(pt2e: Any) -> Iterator[None]:
    """Keep torchao from looking for normalisations of quantised training, which no archive holds.

    If a normalisation is left in the graph, torchao exports 96 patterns for that, which takes 15 s.
    """
    kept = getattr(pt2e, "_fold_conv_bn_qat", None)
    pt2e._fold_conv_bn_qat = lambda graph: graph
    try:
        yield
    finally:
        pt2e._fold_conv_bn_qat = kept


def _torchao() -> tuple[Any, Any]:
    try:
        return importlib.import_module(_PT2E), importlib.import_module(_QUANTIZER)
    except ModuleNotFoundError as error:
        raise ModelRefused(_MISSING.format(error.name)) from error


_MISSING = (
    "int8 for exported programs needs torchao, and {} is not installed; pip install 'torchere[quantize]', or "
    "use --format torchscript"
)


def check_torchao() -> None:
    """Raise ModelRefused if torchao is not installed; does not import it, which takes seconds."""
    if importlib.util.find_spec("torchao") is None:
        raise ModelRefused(_MISSING.format("torchao"))
