"""Static int8 by FX graph mode: 8-bit weights and activations, with ranges from calibration samples.

Three decisions, each measured on EfficientNet-Lite0 (docs/quantization.md):

- Weights have 7 bits. Processors without VNNI add pairs of 8-bit products in 16 bits, which overflow with
  2 x 255 x 127 but not with 2 x 255 x 64. The processor that serves an archive often differs from the one
  that packs it. Depthwise convolutions have 8 bits: oneDNN does not add pairs for them, and 7 bits cost the
  most accuracy in a kernel of few taps. FBGEMM does (`ADD_PAIRS`).
- The saturation of the integer format takes the place of ReLU6 (`clipped_by_format`).
- Only layers that gain are quantised. Normalisations, softmax and similar layers stay in fp32: they take
  little of the time, and lose the most accuracy with 8 bits.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.ao.quantization import (
    FakeQuantizeBase,
    FixedQParamsFakeQuantize,
    FixedQParamsObserver,
    MinMaxObserver,
    ObserverBase,
    PerChannelMinMaxObserver,
    QConfig,
    QConfigMapping,
)
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx
from torch.nn import functional

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.fold.convolutions import (
    Folded,
    Recorder,
    calls_of,
    free_name,
    insert_module,
    module_at,
    parameter_at,
    replace_module,
)
from torchere.archiver.models.inputs.run import has_hooks
from torchere.archiver.models.inputs.sizes import Tensors
from torchere.archiver.models.measure.difference import answers
from torchere.archiver.models.quantize.pt2e import call_each_once
from torchere.archiver.models.steps import Say, counted, silent

WEIGHT_LIMIT = 64  # 7 bits: -64 ... 63
DEPTHWISE_LIMIT = 128  # 8 bits: -128 ... 127
# Engines that compute depthwise convolutions by FBGEMM; x86 does so without VNNI, and above 100 groups.
ADD_PAIRS = ("fbgemm", "x86")
_LEVELS: dict[str, Any] = {"dtype": torch.quint8, "quant_min": 0, "quant_max": 255}
_RELU6_SCALE = 6 / 255
_COARSE = 2.0  # a range this many times as wide as the values' own costs a bit
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_KEPT_IN_FP32: tuple[Any, ...] = (
    *_TRANSPOSED,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.LSTM,
    nn.GRU,
    nn.MultiheadAttention,
    nn.GELU,
    nn.SiLU,
    nn.Softmax,
    nn.Sigmoid,
    nn.Tanh,
    functional.conv1d,  # calls that folding did not replace: torch packs only calls with all arguments
    functional.conv2d,
    functional.conv3d,
    functional.conv_transpose1d,
    functional.conv_transpose2d,
    functional.conv_transpose3d,
    functional.layer_norm,
    functional.group_norm,
    functional.instance_norm,
    functional.batch_norm,
    functional.embedding,
    functional.gelu,
    functional.prelu,
    functional.silu,
    functional.softmax,
    functional.scaled_dot_product_attention,
    torch.softmax,
    torch.sigmoid,
    torch.tanh,
    torch.matmul,
    torch.bmm,
    "softmax",
    "sigmoid",
    "tanh",
    "matmul",
)
# torch quantises these functions, or fuses them with the layer before, only if they have the second spelling.
_SPELLINGS: dict[Any, Any] = {
    torch.relu: functional.relu,
    torch.relu_: functional.relu,
    torch.max_pool1d: functional.max_pool1d,
    torch.max_pool2d: functional.max_pool2d,
    "relu": functional.relu,
    "relu_": functional.relu,
    "add": operator.add,
    "add_": operator.add,
    "mul": operator.mul,
    "mul_": operator.mul,
}


@dataclass(frozen=True)
class Calibrated:
    """A model calibrated on the samples; `convert` makes a new int8 model of it at each call."""

    prepared: fx.GraphModule
    layers: int  # number of layers whose weights become int8
    note: str
    copies: Mapping[str, str]  # names of copies of layers with several calls, with the layers' names

    def convert(self) -> fx.GraphModule:
        """Return the int8 model, its weights packed for the engine of `torch.backends.quantized`."""
        converted = convert_fx(copy.deepcopy(self.prepared))
        layers: dict[str, Any] = dict(converted.named_modules())
        weights = {
            name: _weight(layer) for name, layer in self.prepared.named_modules(remove_duplicate=False)
        }
        for name, original in self.copies.items():
            # torch folds the normalisation after each call into the weights of that call.
            is_same = weights.get(name) is weights.get(original)
            if is_same and hasattr(layers.get(name), "_packed_params"):  # so that the file has them once
                layers[name]._packed_params = layers[original]._packed_params
        return converted


def _weight(layer: nn.Module) -> Any:
    return getattr(next(layer.children(), layer), "weight", None)  # a layer with its ReLU has two children


def calibrate(
    folded: Folded,
    samples: Sequence[Tensors],
    kept: Collection[str] = (),
    say: Say = silent,
) -> Calibrated:
    """Run a folded model on every sample to measure the range of each activation.

    Args:
        folded: in fp32; it is not modified.
        samples: arguments of the model; at least one, better a hundred that resemble real requests.
        kept: layers of the folded model that stay in fp32.
        say: takes a line about progress now and then.

    Raises:
        ModelRefused: there is no layer that can be int8.
    """
    graph = copy.deepcopy(folded.module)
    copies = call_each_once(graph)
    kept = {*kept, *(name for name, original in copies.items() if original in kept)}
    kept |= _wrap_unsupported(graph)
    _fix_dtypes(graph, samples[0])
    _call_prelu(graph)
    _spell_alike(graph)
    _hold_weights(graph, kept)
    clipped = clipped_by_format(graph, kept)
    mapping = _configuration(graph, clipped)
    for name in (*kept, *_clips_behind(graph, kept)):
        mapping.set_module_name(name, None)
    custom = PrepareCustomConfig().set_non_traceable_module_classes([_InFp32])
    if joined := joined_apart(graph):
        mapping.set_module_name(joined, None)
        custom.set_non_traceable_module_names([joined])
    _leave_coarse_sums(graph, mapping, samples[0])
    prepared = prepare_fx(graph, mapping, samples[0], prepare_custom_config=custom)
    _observe_what_is_not_clipped(prepared, clipped)
    _leave_whole_numbers(prepared, samples[0])
    with torch.no_grad():
        for sample in counted(samples, len(samples), "samples calibrated on", say):
            answers(prepared, sample)
    layers = {
        id(layer.weight)
        for layer in prepared.modules()
        if hasattr(layer, "weight") and getattr(layer, "qconfig", None) is not None
    }
    if not layers:
        raise ModelRefused(
            "no layer of the model can be int8; expected a convolution or a linear layer whose weights the "
            "model's own code does not read (an exported program has none after run_decompositions()): leave "
            "--quantize out, or take --quantize bf16"
        )
    clips = f"{len(clipped) // 2} ReLU6 made the range of the format" if clipped else ""
    note = "; ".join(part for part in (folded.note, clips) if part)
    return Calibrated(prepared, len(layers), note, copies)


class _InFp32(nn.Module):
    """Hides a layer from torch's quantisation, so that the layer stays as it is."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the layer."""
        return self.layer(*inputs, **named)


def _wrap_unsupported(graph: fx.GraphModule) -> set[str]:
    """Wrap the layers that torch would change by fusing or converting them; return their names.

    Fused and converted layers have no hooks, and int8 convolutions support only two kinds of padding. Folding
    a normalisation into a transposed convolution does not support groups.
    """
    names = set()
    for node in graph.graph.find_nodes(op="call_module"):
        layer: Any = graph.get_submodule(str(node.target))
        has_groups = isinstance(layer, _TRANSPOSED) and layer.groups > 1
        is_padded = getattr(layer, "padding_mode", "zeros") not in {"zeros", "reflect"}
        if has_hooks(layer) or is_padded or has_groups:
            replace_module(graph, node, _InFp32(layer))
            names.add(str(node.target))
    return names


def _fix_dtypes(graph: fx.GraphModule, example: Tensors) -> None:
    """Replace each `tensor.dtype` by its value in fp32: otherwise `mask.to(x.dtype)` would ask for int8."""
    dtypes = Recorder(graph, lambda result: result if isinstance(result, torch.dtype) else None)
    for node, dtype in dtypes.run_on(example).items():

        def fixed(one: Any, node: fx.Node = node, dtype: torch.dtype = dtype) -> Any:
            return dtype if one is node else one

        for user in list(node.users):
            user.args = fx.node.map_aggregate(user.args, fixed)
            user.kwargs = fx.node.map_aggregate(user.kwargs, fixed)
        graph.graph.erase_node(node)
    graph.recompile()


def _call_prelu(graph: fx.GraphModule) -> None:
    """Replace PReLU layers by calls of `functional.prelu`, which stay in fp32.

    torch converts a PReLU layer to int8 even if its configuration says fp32, and that conversion fails on
    slopes of one dimension, because it looks for a channel dimension.
    """
    for node in list(graph.graph.nodes):
        if not isinstance(module_at(graph, node), nn.PReLU):
            continue
        with graph.graph.inserting_before(node):
            slopes = graph.graph.get_attr(f"{node.target}.weight")
            called = graph.graph.call_function(functional.prelu, (node.args[0], slopes))
        node.replace_all_uses_with(called)
        graph.graph.erase_node(node)
    graph.recompile()


def _spell_alike(graph: fx.GraphModule) -> None:
    """Replace calls by those that torch quantises; a traced graph reads no value from before a change."""
    for node in list(graph.graph.nodes):
        is_call = node.op in ("call_function", "call_method")
        if not is_call or node.target not in _SPELLINGS or (node.kwargs and not callable(node.target)):
            continue  # the keyword of a method is `alpha`
        with graph.graph.inserting_before(node):
            called = graph.graph.call_function(_SPELLINGS[node.target], node.args, node.kwargs)
        node.replace_all_uses_with(called)
        graph.graph.erase_node(node)
    graph.recompile()


def _hold_weights(graph: fx.GraphModule, kept: Collection[str]) -> None:
    """Let code that reads weights of kept layers find them: torch fuses activations into these, too."""
    for node in graph.graph.find_nodes(op="get_attr"):
        if str(node.target).rpartition(".")[0] in kept:
            name = free_name(graph, str(node.target).replace(".", "_"))
            setattr(graph, name, parameter_at(graph, node))
            node.target = name
    graph.recompile()


def _observe_what_is_not_clipped(prepared: fx.GraphModule, clipped: Sequence[str]) -> None:
    """Measure the range of unclipped values that a clipped layer reads, such as the model's input.

    FX gives an unconfigured value the configuration of the layer that reads it, which would clip the value to
    0 ... 6.
    """
    fixed = [
        (node, observer)
        for node in prepared.graph.nodes
        if isinstance(observer := module_at(prepared, node), FixedQParamsFakeQuantize)
    ]
    # By identity: operations that only move values (a pooling, a reshape) share the observer of their input.
    right = {id(observer) for node, observer in fixed if str(node.args[0].target) in clipped}
    for node, observer in fixed:
        if id(observer) not in right:
            replace_module(prepared, node, MinMaxObserver(**_LEVELS))


def _leave_whole_numbers(prepared: fx.GraphModule, sample: Tensors) -> None:
    """Remove the observers of integer tensors: FX adds one before each operation that reshapes its input."""

    def is_whole(result: Any) -> bool | None:
        """Return True for masks and indices, else None."""
        return True if isinstance(result, torch.Tensor) and not result.is_floating_point() else None

    # The copy runs, because each run calibrates the observers.
    names = {node.name for node in Recorder(copy.deepcopy(prepared), is_whole).run_on(sample)}
    for node in list(prepared.graph.nodes):
        if node.name in names and isinstance(module_at(prepared, node), (ObserverBase, FakeQuantizeBase)):
            node.replace_all_uses_with(node.args[0])
            prepared.graph.erase_node(node)
    prepared.recompile()


def _configuration(graph: fx.GraphModule, clipped: Sequence[str]) -> QConfigMapping:
    # Fake-quantised, not only observed: layers after a ReLU6 must be calibrated on values clipped at 6.
    fixed = FixedQParamsFakeQuantize.with_args(  # type: ignore[no-untyped-call]
        observer=FixedQParamsObserver.with_args(scale=_RELU6_SCALE, zero_point=0, **_LEVELS)
    )
    observed = MinMaxObserver.with_args(**_LEVELS)
    mapping = QConfigMapping().set_global(_qconfig(observed, WEIGHT_LIMIT))
    for kept in _KEPT_IN_FP32:
        mapping.set_object_type(kept, None)
    depthwise = {name for name, layer in graph.named_modules() if is_depthwise(layer)}
    for name in sorted({*clipped, *depthwise}):
        limit = DEPTHWISE_LIMIT if name in depthwise else WEIGHT_LIMIT
        mapping.set_module_name(name, _qconfig(fixed if name in clipped else observed, limit))
    return mapping


def _leave_coarse_sums(graph: fx.GraphModule, mapping: QConfigMapping, example: Tensors) -> None:
    """Leave additions and multiplications in fp32 that int8 would round coarsely, such as `x * 255`.

    If one operand is a number, FX gives the other and the result one scale, for the range of both.
    """
    values = Recorder(graph, _number_or_range).run_on(example)
    for function in (operator.add, torch.add, operator.mul, torch.mul):
        for index, node in enumerate(graph.graph.find_nodes(op="call_function", target=function)):
            if _is_coarse(node, values):
                mapping.set_module_name_object_type_order("", function, index, None)


def _is_coarse(node: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
    # FX takes a computed number for a tensor, and loses keywords, `alpha` among them.
    if node.kwargs or any(isinstance(values.get(one), (int, float)) for one in node.all_input_nodes):
        return True
    if all(isinstance(one, fx.Node) for one in node.args):
        return False
    lows, highs = zip(*(values.get(one, (0.0, 0.0)) for one in (*node.all_input_nodes, node)), strict=True)
    least = min(high - low for low, high in zip(lows, highs, strict=True))
    return bool(max(highs) - min(lows) > _COARSE * least)


def _number_or_range(result: Any) -> Any:
    """Return a number as it is, a floating-point tensor's range extended to 0, or None for other results."""
    if isinstance(result, torch.Tensor) and result.is_floating_point() and result.numel():
        return min(float(result.min()), 0.0), max(float(result.max()), 0.0)
    return result if isinstance(result, (int, float)) else None


def _clips_behind(graph: fx.GraphModule, kept: Collection[str]) -> list[str]:
    """Return the clipping layers after a kept layer: in int8 they would waste levels on clipped values."""
    nodes = [node for node in graph.graph.nodes if isinstance(module_at(graph, node), nn.Hardtanh)]
    return [str(node.target) for node in nodes if str(getattr(node.args[0], "target", "")) in kept]


def is_depthwise(layer: nn.Module) -> bool:
    """Return whether the layer is a convolution with a kernel for each channel."""
    return isinstance(layer, nn.Conv2d) and layer.groups == layer.in_channels > 1


def _qconfig(activation: Any, weight_limit: int) -> Any:
    weight = PerChannelMinMaxObserver.with_args(
        dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric,
        quant_min=-weight_limit,
        quant_max=weight_limit - 1,
    )
    return QConfig(activation=activation, weight=weight)  # type: ignore[no-untyped-call]


# ReLU6 after a convolution becomes ReLU, because the saturation of int8 can be the upper limit.
#
# When the activations after a ReLU6 are quantised over exactly 0 ... 6, the format's own saturation is the
# upper limit: it costs nothing, no level is spent on clipped values, and the remaining ReLU is fused into the
# convolution.

LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
_LIMITS = (0.0, 6.0)
_ARGUMENTS = {  # names of the limits, in the order of the arguments of a function or method
    functional.hardtanh: ("min_val", "max_val"),
    torch.clamp: ("min", "max"),
    "clamp": ("min", "max"),
}


def clipped_by_format(graph: fx.GraphModule, kept: Collection[str] = ()) -> tuple[str, ...]:
    """Replace each ReLU6 that directly follows a layer with weights by a ReLU; return the layer names.

    After a layer that is `kept` in fp32, it becomes an `nn.ReLU6` module instead.

    The graph computes the same only if the activations of the returned layers (the layers with weights, and
    the ReLUs) are quantised over 0 ... 6.
    """
    names: list[str] = []
    for node in list(graph.graph.nodes):
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or not _is_relu6(graph, node):
            continue
        alone = isinstance(module_at(graph, source), LAYERS) and calls_of(graph, source) == 1
        if alone and len(source.users) == 1:
            if str(source.target) in kept:
                insert_module(graph, node, nn.ReLU6(), source)
                continue
            relu = insert_module(graph, node, nn.ReLU(), source)
            names += [str(source.target), str(relu.target)]
    graph.recompile()
    return tuple(names)


def _is_relu6(graph: fx.GraphModule, node: fx.Node) -> bool:
    layer = module_at(graph, node)
    if isinstance(layer, nn.Hardtanh):  # nn.ReLU6 is a subclass of nn.Hardtanh
        return (layer.min_val, layer.max_val) == _LIMITS
    if node.op not in ("call_function", "call_method"):
        return False
    names = _ARGUMENTS.get(node.target, ())
    given = {**dict(zip(names, node.args[1:], strict=False)), **node.kwargs}
    return node.target is functional.relu6 or tuple(given.get(name) for name in names) == _LIMITS


# Operations that join the outputs of a model stay in fp32: in int8, joined values have one scale.
#
# A detector's boxes go to 640 and its scores to 1; with one scale for both, every score is rounded to 0.

_JOINS = (torch.cat, torch.concat, torch.concatenate, torch.stack)


def joined_apart(graph: fx.GraphModule) -> str | None:
    """Move the concatenations of outputs, and all steps after them, into a separate module; return its name.

    Such a concatenation is a call of `torch.cat` or `torch.stack` whose result no layer with weights reads,
    directly or indirectly; if there is none, return None. The graph is modified, and computes the same.
    """
    behind = _behind_joins(graph)
    if not behind:
        return None
    output = next(node for node in graph.graph.nodes if node.op == "output")
    tail, given = _tail(graph, behind, output)
    name = free_name(graph, "joined_outputs")
    graph.add_module(name, tail)
    with graph.graph.inserting_before(output):
        output.args = (graph.graph.call_module(name, given),)
    graph.graph.eliminate_dead_code()
    graph.delete_all_unused_submodules()
    graph.recompile()
    return name


def _behind_joins(graph: fx.GraphModule) -> list[fx.Node]:
    """Return the concatenations of outputs and all nodes that depend on them, in order."""
    read: set[fx.Node] = set()  # nodes that a layer with weights reads, directly or indirectly
    for node in reversed(graph.graph.nodes):
        if any(user in read or isinstance(module_at(graph, user), LAYERS) for user in node.users):
            read.add(node)
    behind: dict[fx.Node, None] = {}
    for node in graph.graph.nodes:
        joins = node.op == "call_function" and node.target in _JOINS and node not in read
        if node.op != "output" and (joins or any(one in behind for one in node.all_input_nodes)):
            behind[node] = None
    return list(behind)


def _tail(
    graph: fx.GraphModule, behind: list[fx.Node], output: fx.Node
) -> tuple[fx.GraphModule, tuple[fx.Node, ...]]:
    """Return a module of the nodes `behind` that computes the graph's output, and its input nodes."""
    inside = set(behind)
    taken = [one for node in (*behind, output) for one in node.all_input_nodes if one not in inside]
    given = tuple(dict.fromkeys(taken))
    tail = fx.Graph()
    copied = {node: tail.placeholder(f"given_{index}") for index, node in enumerate(given)}
    for node in behind:
        copied[node] = tail.node_copy(node, copied.__getitem__)
    tail.output(fx.node.map_arg(output.args[0], copied.__getitem__))
    return fx.GraphModule(graph, tail), given
