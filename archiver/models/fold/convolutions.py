"""Folding of padding and batch normalisation into convolutions, before quantisation or compilation.

A separate padding before a convolution makes the int8 convolution many times slower, a batch normalisation
after it costs a pass over memory, and both hide the convolution from the quantiser. The folded model computes
the same function, up to the rounding of float32.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from torchere.archiver.models.fold.tracing import NO_BRANCH, NotTraceable, not_traceable, traced
from torchere.archiver.models.inputs.buffers import unchanged_buffers
from torchere.archiver.models.inputs.run import OperatorWatch, has_hooks
from torchere.archiver.models.inputs.sizes import Tensors
from torchere.archiver.models.measure.difference import answers, difference
from torchere.archiver.models.probe.row_independence import VARIATIONS

_SAME = 1e-4  # the largest drift of a folded model: only the order of sums differs


@dataclass(frozen=True)
class Folded:
    """A model as a graph of plain layers, and how many operations were folded."""

    module: fx.GraphModule  # eval mode; shares no tensor with the original model
    functional: int  # number of convolutions that were called as functions
    paddings: int
    normalisations: int

    @property
    def note(self) -> str:
        """One line that counts the folded operations; "" if there are none."""
        counts = (
            (self.functional, "functional convolutions"),
            (self.paddings, "paddings"),
            (self.normalisations, "batch normalisations"),
        )
        return ", ".join(f"{count} {what}" for count, what in counts if count)


def fold(module: nn.Module, example: Tensors) -> Folded:
    """Copy the model and fold paddings and batch normalisations into its convolutions.

    Modules of `torch.nn` stay modules; a custom layer that calls `F.conv2d` with parameters becomes a plain
    `nn.Conv2d`. The copy is run on the example and on variations of it; if its output differs from the
    model's, nothing is folded. Layers with hooks stay as they are.

    Args:
        module: eager; it is not modified.
        example: arguments of the model.

    Raises:
        NotTraceable: the forward branches on values, calls untraceable code or keeps state in place; the
            model has hooks of its own; or the traced graph gives other results, because tracing took another
            branch, such as that of an optional argument. `int8-dynamic` supports such a model if it has
            linear or recurrent layers.
    """
    model = copy.deepcopy(module).eval()
    folded = _folded(traced(copy.deepcopy(model), example), example)
    if answers_alike(model, folded.module, example):
        return folded
    plain = Folded(traced(copy.deepcopy(model), example), 0, 0, 0)
    if answers_alike(model, plain.module, example):
        return plain
    raise not_traceable(
        module,
        f"the forward of {type(module).__name__} answers otherwise when it is traced as a graph "
        "(by a branch that tracing does not see, or something random)",
    )


def folded_paddings(module: nn.Module, example: Tensors) -> Folded | None:
    """Call `fold` for a model that stays in fp32, which gains only by paddings; None if it has none to fold.

    Raises:
        NotTraceable: the model pads with a constant, and can't be traced as a graph.
    """
    if not any(isinstance(layer, _ConvNd) for layer in module.modules()):
        return None  # saves the copy that `fold` makes
    try:
        folded = fold(module, example)
    # Broad: tracing runs the model's code in a way that its author did not intend, and folding is optional.
    except Exception as error:
        watch = _Paddings()
        with torch.no_grad(), unchanged_buffers(module), watch:
            module(*copy.deepcopy(example))
        if not watch.found:
            return None
        if isinstance(error, NotTraceable):
            raise NotTraceable(error.reason, error.mend) from error
        raise NotTraceable(str(error), NO_BRANCH) from error
    return folded if folded.paddings else None


class _Paddings(OperatorWatch):
    """Records whether the operator that pads with a constant runs."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= func is torch.ops.aten.constant_pad_nd.default
        return func(*args, **(kwargs or {}))


def _folded(graph: fx.GraphModule, example: Tensors) -> Folded:
    functional = lift_functional_convolutions(graph)
    _number_paddings(graph)
    paddings = sum(_fold_padding(graph, node) for node in list(graph.graph.nodes))
    normalisations = fold_normalisations(graph, example)
    graph.graph.eliminate_dead_code()
    graph.delete_all_unused_submodules()
    graph.recompile()
    return Folded(graph, functional, paddings, normalisations)


def answers_alike(model: nn.Module, graph: fx.GraphModule, example: Tensors) -> bool:
    """Compare the results on the example, and on those variations of it that the model accepts."""
    with torch.inference_mode():
        if not _is_alike(answers(model, example), graph, example):
            return False
        for vary in VARIATIONS:  # the model's state is not restored between them: a graph may lack it
            inputs = tuple(map(vary, example))
            try:
                wanted = answers(model, inputs)
            # Broad: the model's own code may refuse such values with any error.
            except Exception:
                continue
            if not _is_alike(wanted, graph, inputs):
                return False
    return True


def _is_alike(wanted: Tensors, graph: fx.GraphModule, inputs: Tensors) -> bool:
    try:
        return difference([(wanted, answers(graph, inputs))]).drift <= _SAME
    # Broad: an incorrectly traced graph may raise any error.
    except Exception:
        return False


def module_at(graph: fx.GraphModule, node: Any) -> nn.Module | None:
    """Return the layer that the node calls; None if the node does not call a layer."""
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return None
    return graph.get_submodule(str(node.target))


def calls_of(graph: fx.GraphModule, node: fx.Node) -> int:
    """Count the calls of the node's layer, because a shared layer must not be changed for one caller."""
    return sum(other.op == "call_module" and other.target == node.target for other in graph.graph.nodes)


def replace_module(graph: fx.GraphModule, node: fx.Node, layer: nn.Module) -> None:
    """Replace the layer that the node calls; its name stays the same."""
    parent, _, name = str(node.target).rpartition(".")
    setattr(graph.get_submodule(parent), name, layer)


def insert_module(graph: fx.GraphModule, node: fx.Node, layer: nn.Module, source: fx.Node) -> fx.Node:
    """Replace the node with a call of a new layer on `source`; return the new node."""
    name = free_name(graph, f"{node.name}_layer")
    graph.add_module(name, layer)
    with graph.graph.inserting_before(node):
        added = graph.graph.call_module(name, (source,))
    node.replace_all_uses_with(added)
    graph.graph.erase_node(node)
    return added


def parameter_at(graph: fx.GraphModule, node: Any) -> Any:
    """Return the tensor that a `get_attr` node reads; None for any other node."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    return attrgetter(str(node.target))(graph)


def free_name(graph: fx.GraphModule, wish: str) -> str:
    """Return `wish`, with a number appended if the graph already has an attribute of this name."""
    name, number = wish, 1
    while hasattr(graph, name):
        name, number = f"{wish}_{number}", number + 1
    return name


# `F.conv2d(x, self.weight, ...)` in a layer of the model's own becomes a plain `nn.Conv2d`.
#
# Architectures that pad by themselves (EfficientNet-Lite's `Conv2dStaticSamePadding` is one) subclass
# `Conv2d` and call the function; quantisers and foldings look for the layer.

_DEFAULTS: dict[str, Any] = {
    "bias": None,
    "stride": 1,
    "padding": 0,
    "dilation": 1,
    "groups": 1,
}
_ORDER = ("input", "weight", *_DEFAULTS)


def lift_functional_convolutions(graph: fx.GraphModule) -> int:
    """Turn each `F.conv2d` call whose weight is a parameter into a layer; return the number of new layers.

    A call whose bias or settings are computed is not replaced.
    """
    lifted = 0
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node.target not in (functional.conv2d, torch.conv2d):
            continue
        arguments = {**_DEFAULTS, **dict(zip(_ORDER, node.args, strict=False)), **node.kwargs}
        layer = _layer(graph, arguments)
        if layer is not None and isinstance(arguments["input"], fx.Node):
            insert_module(graph, node, layer, arguments["input"])
            lifted += 1
    return lifted


def _layer(graph: fx.GraphModule, arguments: dict[str, Any]) -> nn.Conv2d | None:
    weight, bias = parameter_at(graph, arguments["weight"]), parameter_at(graph, arguments["bias"])
    settings = {name: arguments[name] for name in ("stride", "padding", "dilation", "groups")}
    computed: list[fx.Node] = []
    fx.node.map_arg(settings, computed.append)
    if not isinstance(weight, nn.Parameter) or computed:
        return None
    if arguments["bias"] is not None and bias is None:
        return None
    layer = nn.Conv2d(
        weight.shape[1] * settings["groups"],
        weight.shape[0],
        (weight.shape[2], weight.shape[3]),
        **settings,
        bias=bias is not None,
        dtype=weight.dtype,
    )
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None and layer.bias is not None:
            layer.bias.copy_(bias)
    return layer.eval()


# `ZeroPad2d` or `F.pad` before a convolution moves into the convolution.
#
# A plain convolution pads both ends of an axis alike. If the padding is uneven, the kernel grows by taps of
# zero. For example, a stride of 2 often comes with one more pixel on the right and at the bottom. The kernel
# then gets one more row and column of zeros in front, and all sides are padded by the larger number. The
# other taps still meet the same pixels, and the result has the same size.


@dataclass(frozen=True, slots=True)
class Axis:
    """The padding and the additional kernel taps of one axis of a convolution with folded padding."""

    padding: int  # at both ends
    front: int  # rows of zero taps before the kernel
    behind: int  # rows of zero taps after the kernel


def folded_axis(before: int, after: int, dilation: int) -> Axis | None:
    """Fold a padding of `before` and `after` pixels into an axis of a convolution; None if impossible.

    It is impossible if a padding is negative, or if the difference is not a multiple of the dilation.
    """
    if before < 0 or after < 0 or (after - before) % dilation:
        return None
    taps = abs(after - before) // dilation
    return Axis(max(before, after), taps if after > before else 0, taps if before > after else 0)


def _fold_padding(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Fold the node if it is a padding whose result only convolutions read; return whether it was folded."""
    source, sides = _padding_of(graph, node)
    readers = list(node.users)
    if not isinstance(source, fx.Node) or not readers:
        return False
    folded = [_grown(module_at(graph, reader), sides) for reader in readers]
    if None in folded or any(calls_of(graph, reader) > 1 for reader in readers):
        return False
    # The convolutions will read the padding's input later, when a node between may have changed it in place.
    if any(node < user < max(readers) for user in source.users):
        return False
    for reader, layer in zip(readers, folded, strict=True):
        if layer is not None:
            replace_module(graph, reader, layer)
    node.replace_all_uses_with(source)
    graph.graph.erase_node(node)
    return True


def _padding_of(graph: fx.GraphModule, node: fx.Node) -> tuple[Any, tuple[int, ...]]:
    """Return the input of a zero-padding node and its pixels (left, right, top, bottom); or (None, ())."""
    layer: Any = module_at(graph, node)
    pads = isinstance(layer, nn.ZeroPad2d) or (isinstance(layer, nn.ConstantPad2d) and layer.value == 0)
    if pads and not has_hooks(layer):
        return node.args[0], tuple(layer.padding)
    if node.op != "call_function" or node.target is not functional.pad:
        return None, ()
    given = {**dict(zip(("input", "pad", "mode", "value"), node.args, strict=False)), **node.kwargs}
    sides: Any = given.get("pad")
    plain = isinstance(sides, (tuple, list)) and all(isinstance(side, int) for side in sides)
    if not plain or len(sides) != 4 or given.get("mode", "constant") != "constant" or given.get("value"):
        return None, ()
    return given["input"], tuple(sides)


def _grown(layer: nn.Module | None, sides: tuple[int, ...]) -> nn.Module | None:
    """Return the convolution with the padding folded in; None if it can't be folded."""
    if type(layer) is not nn.Conv2d or has_hooks(layer):
        return None
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return None
    left, right, top, bottom = sides
    high, wide = _by_axis(layer, layer.padding)
    return _padded(layer, ((top + high, bottom + high), (left + wide, right + wide)))


def _by_axis(layer: Any, setting: Sequence[int]) -> tuple[int, ...]:
    """Return a setting of the convolution with one number per axis; torch also takes just one, `(2,)`."""
    return tuple(setting) * len(layer.kernel_size) if len(setting) == 1 else tuple(setting)


def _padded(layer: Any, paddings: Sequence[tuple[int, int]]) -> nn.Module | None:
    """Return the convolution with these paddings of zeros, before and after each axis; None if impossible."""
    dilations = _by_axis(layer, layer.dilation)
    axes = [folded_axis(*ends, dilation) for ends, dilation in zip(paddings, dilations, strict=True)]
    if None in axes:
        return None
    found = [axis for axis in axes if axis is not None]
    taps = [taps for axis in reversed(found) for taps in (axis.front, axis.behind)]
    kernel = functional.pad(layer.weight.detach(), taps)
    grown = type(layer)(
        layer.in_channels,
        layer.out_channels,
        tuple(kernel.shape[2:]),
        stride=layer.stride,
        padding=tuple(axis.padding for axis in found),
        dilation=layer.dilation,
        groups=layer.groups,
        bias=layer.bias is not None,
        padding_mode=layer.padding_mode,
        dtype=kernel.dtype,
    )
    with torch.no_grad():
        grown.weight.copy_(kernel)
        if layer.bias is not None:
            grown.bias.copy_(layer.bias)
    made: nn.Module = grown.eval()
    return made


# The paddings "same" and "valid" are replaced by numbers, because int8 convolutions take only numbers.

_PLAIN = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _number_paddings(graph: fx.GraphModule) -> None:
    """Turn the paddings `same` and `valid` into numbers; if a layer can't pad so, also pad before it."""
    for node in list(graph.graph.nodes):
        layer: Any = module_at(graph, node)
        if type(layer) not in _PLAIN or not isinstance(layer.padding, str) or has_hooks(layer):
            continue
        ends = [_ends(layer, axis) for axis in range(len(layer.kernel_size))]
        numbered, is_zeros = _padded(layer, ends), layer.padding_mode == "zeros"
        if numbered is None and is_zeros and calls_of(graph, node) == 1:
            with graph.graph.inserting_before(node):
                sides = [side for pair in reversed(ends) for side in pair]
                before = graph.graph.call_function(functional.pad, (node.args[0], sides))
            node.args = (before, *node.args[1:])
            numbered = _padded(layer, [(0, 0)] * len(ends))
        if numbered is not None and (is_zeros or numbered.weight.shape == layer.weight.shape):
            replace_module(graph, node, numbered)


def _ends(layer: Any, axis: int) -> tuple[int, int]:
    """Return the padding before and after an axis, as torch computes it: the larger half comes after."""
    if layer.padding == "valid":
        return 0, 0
    total = _by_axis(layer, layer.dilation)[axis] * (layer.kernel_size[axis] - 1)
    return total // 2, total - total // 2


_ROWS = 2  # number of dimensions of a linear layer's output [rows, features]
_NORMALISATIONS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: nn.BatchNorm1d,
    nn.Conv2d: nn.BatchNorm2d,
    nn.Conv3d: nn.BatchNorm3d,
    nn.Linear: nn.BatchNorm1d,
}


def fold_normalisations(graph: fx.GraphModule, example: Tensors) -> int:
    """Fold each batch normalisation that is the only reader of a convolution or linear layer; count them.

    A linear layer computes the last dimension of its output, and the normalisation scales dimension 1, so the
    two are folded only if the output has two dimensions, which a run of the graph on the example shows.
    """
    nodes = [node for node in graph.graph.nodes if _is_followed(graph, node)]
    linear = [node for node in nodes if isinstance(module_at(graph, node), nn.Linear)]
    ranks = _ranks(graph, example) if linear else {}
    folded = [node for node in nodes if node not in linear or ranks.get(node) == _ROWS]
    for node in folded:
        _fold_norm(graph, node)
    return len(folded)


def _is_followed(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether the node is a layer whose only reader is a batch normalisation that fits it."""
    layer = module_at(graph, node)
    if layer is None or len(node.users) != 1 or calls_of(graph, node) > 1:
        return False
    normalisation: Any = module_at(graph, *node.users)
    if type(normalisation) is not _NORMALISATIONS.get(type(layer)) or normalisation.running_mean is None:
        return False
    return not has_hooks(layer) and not has_hooks(normalisation)


def _fold_norm(graph: fx.GraphModule, node: fx.Node) -> None:
    layer: Any = module_at(graph, node)
    (following,) = node.users
    fuse: Any = fuse_linear_bn_eval if isinstance(layer, nn.Linear) else fuse_conv_bn_eval
    replace_module(graph, node, fuse(layer, module_at(graph, following)))
    following.replace_all_uses_with(node)
    graph.graph.erase_node(following)


class Recorder(fx.Interpreter):
    """Runs a graph, and records `fact(result)` for each node in `found`, unless that is None."""

    def __init__(self, graph: fx.GraphModule, fact: Callable[[Any], Any]) -> None:
        super().__init__(graph)
        self.found: dict[fx.Node, Any] = {}
        self._fact = fact

    def run_on(self, example: Tensors) -> dict[fx.Node, Any]:
        """Run the graph on a copy of the example, without gradients, and return `found`."""
        with torch.no_grad():
            self.run(*copy.deepcopy(example))
        return self.found

    def run_node(self, n: fx.Node) -> Any:
        """See fx.Interpreter."""
        result = super().run_node(n)
        if (fact := self._fact(result)) is not None:
            self.found[n] = fact
        return result


def _ranks(graph: fx.GraphModule, example: Tensors) -> dict[fx.Node, int]:
    """Return the number of dimensions of each result; if the graph fails, of the results before that."""
    run = Recorder(graph, lambda result: result.dim() if isinstance(result, torch.Tensor) else None)
    # Broad: an incorrectly traced graph may raise any error; it is compared with the model later.
    with contextlib.suppress(Exception):
        run.run_on(example)
    return run.found
