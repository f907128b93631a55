"""Layers of `torch.nn` for the operators of an exported program.

`torch.export` turns a layer into an operator that reads its weights: a linear layer becomes `aten.linear`.
Quantisers and foldings look for layers, and for functions of Python rather than operators, so they would find
nothing to change in such a program.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from torchere.archiver.models.fold.convolutions import answers_alike, free_name, parameter_at
from torchere.archiver.models.inputs.buffers import unchanged_buffers
from torchere.archiver.models.inputs.sizes import Tensors
from torchere.archiver.models.load.exported_program import make_traceable

_ATEN = torch.ops.aten
_CONVOLUTIONS = {
    _ATEN.conv1d.default: nn.Conv1d,
    _ATEN.conv1d.padding: nn.Conv1d,
    _ATEN.conv2d.default: nn.Conv2d,
    _ATEN.conv2d.padding: nn.Conv2d,
    _ATEN.conv3d.default: nn.Conv3d,
    _ATEN.conv3d.padding: nn.Conv3d,
}
_WEIGHTED = {_ATEN.linear.default, *_CONVOLUTIONS}  # the weight is the second argument
_RECURRENT: dict[Any, type[nn.LSTM | nn.GRU]] = {_ATEN.lstm.input: nn.LSTM, _ATEN.gru.input: nn.GRU}
_NORMALISATIONS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
# Functions and methods that take the operator's arguments in its order.
_FUNCTIONS: dict[Any, Callable[..., Any] | str] = {
    _ATEN.add.Tensor: operator.add,
    _ATEN.mul.Tensor: operator.mul,
    _ATEN.cat.default: torch.cat,
    _ATEN.relu.default: functional.relu,
    _ATEN.clamp.default: torch.clamp,
    _ATEN.elu.default: functional.elu,
    _ATEN.hardtanh.default: functional.hardtanh,
    _ATEN.hardswish.default: functional.hardswish,
    _ATEN.leaky_relu.default: functional.leaky_relu,
    _ATEN.max_pool1d.default: functional.max_pool1d,
    _ATEN.max_pool2d.default: functional.max_pool2d,
    _ATEN.avg_pool2d.default: functional.avg_pool2d,
    _ATEN.adaptive_avg_pool1d.default: functional.adaptive_avg_pool1d,
    _ATEN.adaptive_avg_pool2d.default: functional.adaptive_avg_pool2d,
    _ATEN.adaptive_avg_pool3d.default: functional.adaptive_avg_pool3d,
    _ATEN.mean.dim: torch.mean,
    _ATEN.pad.default: functional.pad,
    _ATEN.flatten.using_ints: torch.flatten,
    _ATEN.permute.default: torch.permute,
    _ATEN.transpose.int: torch.transpose,
    _ATEN.unsqueeze.default: torch.unsqueeze,
    _ATEN.squeeze.dim: torch.squeeze,
    _ATEN.reshape.default: torch.reshape,
    _ATEN.view.default: "view",
}
_SHARED = "shares_memory"  # key of a node's `meta`
_IN_PLACE = {
    _ATEN.add_.Tensor: _ATEN.add.Tensor,
    _ATEN.mul_.Tensor: _ATEN.mul.Tensor,
    _ATEN.clamp_.default: _ATEN.clamp.default,
    _ATEN.elu_.default: _ATEN.elu.default,
    _ATEN.relu_.default: _ATEN.relu.default,
    _ATEN.hardtanh_.default: _ATEN.hardtanh.default,
    _ATEN.hardswish_.default: _ATEN.hardswish.default,
    _ATEN.leaky_relu_.default: _ATEN.leaky_relu.default,
}


def with_layers(module: nn.Module, example: Tensors) -> nn.Module:
    """Return the module of an exported program with layers in place of operators that read weights.

    Linear layers, convolutions, embeddings, LSTM, GRU and batch normalisations become layers again, under the
    names that they had, with the same weights; activations, poolings and changes of shape become functions of
    torch.

    Args:
        module: of an exported program, without its guards; any other module is returned as it is, and so is
            one whose layers would not compute the same. It is not modified.
        example: arguments of the module.
    """
    if not isinstance(module, fx.GraphModule):
        return module
    try:
        graph = _with_layers(module)
    # Broad: a program may call an operator in a way that no layer can, and does without layers then.
    except Exception:
        return module
    with unchanged_buffers(module):  # which both share
        return graph if answers_alike(module, graph, example) else module


def _with_layers(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.GraphModule(module, _copied(module))
    with torch.no_grad():
        _compute_weights(graph)
    for node in list(graph.graph.nodes):
        node.meta.pop("nn_module_stack", None)  # names layers that the program no longer has
        node.meta[_SHARED] = _shares_memory(node)
        if isinstance(node.target, torch._ops.OpOverload):
            _change(graph, node)
    graph.graph.eliminate_dead_code()
    make_traceable(graph)
    return graph


def _shares_memory(node: fx.Node) -> bool:
    """Whether a change of the node's result in place may change another value."""
    returns = node.target._schema.returns if isinstance(node.target, torch._ops.OpOverload) else ()
    is_part = node.op == "get_attr" or node.target is operator.getitem
    return is_part or any(one.alias_info is not None for one in returns)


def _copied(module: fx.GraphModule) -> fx.Graph:
    """Copy the graph, with plain inputs and outputs if these are tensors, tuples, lists and dicts.

    A program's graph has them flat, and specifications beside it, of which torch warns when they are copied.
    """
    graph = fx.Graph()
    flat: Any = graph.graph_copy(module.graph, {})
    inputs = tuple(graph.find_nodes(op="placeholder"))
    if getattr(module, "_in_spec", None) == pytree.tree_structure((inputs, {})):
        out_spec: Any = module._out_spec
        nested = pytree.tree_unflatten(list(flat), out_spec)
        if _is_plain(nested):
            graph.output(nested)
            return graph
    graph.output(flat)
    graph.set_codegen(module.graph._codegen)
    return graph


def _is_plain(output: Any) -> bool:
    if type(output) is dict:
        return all(map(_is_plain, output.values()))
    if type(output) in (tuple, list):
        return all(map(_is_plain, output))
    return output is None or isinstance(output, (fx.Node, int, float, bool))


def _change(graph: fx.GraphModule, node: fx.Node) -> None:
    """Replace an operator by a layer, a function or its input; leave one that is unknown as it is."""
    given = _arguments(node)
    layer = _layer(graph, node, given)
    if layer is not None:
        name = _name(graph, node, layer)
        source = given["input" if "input" in given else "indices"]
        _replace(node, lambda: graph.graph.call_module(name, (source,)))
        return
    if node.target in _RECURRENT:
        _change_recurrent(graph, node, given)
        return
    if node.target == _ATEN.dropout.default and given["train"] is False:
        node.replace_all_uses_with(given["input"])
        graph.graph.erase_node(node)
        return
    operation = node.target
    if operation in _IN_PLACE and _is_followed(node):
        operation = _IN_PLACE[operation]
        node.meta[_SHARED] = False
    function = _FUNCTIONS.get(operation)
    if isinstance(function, str):
        _replace(node, lambda: graph.graph.call_method(str(function), node.args))
    elif function is not None and not node.kwargs:  # `alpha` of a sum, the type of a mean
        _replace(node, lambda: graph.graph.call_function(function, node.args))


def _compute_weights(graph: fx.GraphModule) -> None:
    """Hold the value of each weight that is computed from weights, as a normalised one is."""
    values: dict[fx.Node, Any] = {}
    for node in list(graph.graph.nodes):
        inputs = node.all_input_nodes
        if node.op == "get_attr":
            if not any(map(_is_mutable, node.users)):  # it is the same at each call
                values[node] = parameter_at(graph, node)
        elif node.op == "call_function" and not _is_mutable(node) and inputs and values.keys() >= set(inputs):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    for node, value in values.items():
        weighs = any(user.target in _WEIGHTED and user.args[1] is node for user in node.users)
        if node.op == "get_attr" or not weighs:
            continue
        name = free_name(graph, f"{node.name}_weight")
        setattr(graph, name, nn.Parameter(value, requires_grad=False))
        with graph.graph.inserting_before(node):
            held = graph.graph.get_attr(name)
        node.replace_all_uses_with(held)


def _is_mutable(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_followed(node: fx.Node) -> bool:
    """Whether nothing but the readers of the result of a change in place sees the change."""
    changed = node.args[0]
    is_own = isinstance(changed, fx.Node) and not changed.meta.get(_SHARED, True) and len(changed.users) == 1
    return is_own and bool(node.users)


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of the operator by name, defaults included."""
    named: Any = node.target
    defaults = {one.name: one.default_value for one in named._schema.arguments}
    return {**defaults, **dict(zip(defaults, node.args, strict=False)), **node.kwargs}


def _replace(node: fx.Node, make: Callable[[], fx.Node]) -> None:
    with node.graph.inserting_before(node):
        made = make()
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)


def _layer(graph: fx.GraphModule, node: fx.Node, given: dict[str, Any]) -> nn.Module | None:
    """Make the layer of the operator; None: it reads no weights of the program, or its settings vary."""
    held = {name: parameter_at(graph, value) for name, value in given.items()}
    weight, bias = held.get("weight"), held.get("bias")
    settings: list[fx.Node] = []
    fx.node.map_arg([given[name] for name in given if name not in _TENSORS], settings.append)
    lacks_bias = given.get("bias") is not None and bias is None
    # A weight that is no parameter, as that of a filter, is no layer's in the model either.
    if not isinstance(weight, nn.Parameter) or lacks_bias or settings:
        return None
    layer: nn.Module | None = None
    if node.target == _ATEN.linear.default and weight.dim() == 2:
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    elif node.target in _CONVOLUTIONS:
        layer = _convolution(_CONVOLUTIONS[node.target], weight, bias, given)
    elif node.target == _ATEN.embedding.default and not given["scale_grad_by_freq"] and not given["sparse"]:
        layer = nn.Embedding(weight.shape[0], weight.shape[1], device="meta")
    elif node.target == _ATEN.batch_norm.default and not given["training"]:
        layer = _normalisation(node, weight, held, given["eps"])
    if layer is None:
        return None
    layer.weight = weight
    if bias is not None:
        layer.bias = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias, requires_grad=False)
    return layer.eval()


_TENSORS = {"input", "indices", "weight", "bias", "running_mean", "running_var"}


def _convolution(
    kind: Callable[..., nn.Module], weight: torch.Tensor, bias: Any, given: dict[str, Any]
) -> nn.Module:
    dimensions = weight.dim() - 2
    settings = {
        name: tuple(value) * (dimensions if len(value) == 1 else 1) if isinstance(value, list) else value
        for name, value in ((name, given[name]) for name in ("stride", "padding", "dilation"))
    }
    return kind(
        weight.shape[1] * given["groups"],
        weight.shape[0],
        tuple(weight.shape[2:]),
        **settings,
        groups=given["groups"],
        bias=bias is not None,
        device="meta",
    )


def _normalisation(node: fx.Node, weight: torch.Tensor, held: dict[str, Any], eps: float) -> nn.Module | None:
    value = node.meta.get("val")
    kind = _NORMALISATIONS.get(value.dim()) if isinstance(value, torch.Tensor) else None
    statistics = {name: held[name] for name in ("running_mean", "running_var")}
    if kind is None or None in statistics.values() or held["bias"] is None:
        return None
    layer = kind(weight.shape[0], eps=eps, device="meta")
    layer.num_batches_tracked = torch.zeros((), dtype=torch.long)  # not on the device of the others, "meta"
    for name, tensor in statistics.items():
        setattr(layer, name, tensor)
    return layer


def _change_recurrent(graph: fx.GraphModule, node: fx.Node, given: dict[str, Any]) -> None:
    """Replace the operator of an LSTM or GRU, whose readers each take one tensor of its result."""
    weights = [parameter_at(graph, one) for one in given["params"]]
    is_lstm = node.target == _ATEN.lstm.input
    states = tuple(given["hx"]) if is_lstm else (given["hx"],)
    begins_with_zeros = all(one.target == _ATEN.zeros.default for one in states)
    layers = given["num_layers"] * (2 if given["bidirectional"] else 1)
    plain = len(weights) == layers * (4 if given["has_biases"] else 2)  # projections have more
    if not plain or not all(isinstance(one, nn.Parameter) for one in weights):
        return
    layer: Any = _RECURRENT[node.target](
        weights[0].shape[1],
        weights[1].shape[1],
        given["num_layers"],
        bias=given["has_biases"],
        batch_first=given["batch_first"],
        bidirectional=given["bidirectional"],
        device="meta",
    )
    for name, tensor in zip(layer._flat_weights_names, weights, strict=True):
        setattr(layer, name, tensor)
    name = _name(graph, node, layer.eval())
    with graph.graph.inserting_before(node):
        begin = () if begins_with_zeros else (states if is_lstm else states[0],)
        made = graph.graph.call_module(name, (given["input"], *begin))
        last = graph.graph.call_function(operator.getitem, (made, 1))
    for reader in list(node.users):
        place: Any = reader.args[1]
        with graph.graph.inserting_before(reader):
            source, key = (last, place - 1) if is_lstm and place else (made, place)
            taken = graph.graph.call_function(operator.getitem, (source, key))
        reader.replace_all_uses_with(taken)
        graph.graph.erase_node(reader)
    graph.graph.erase_node(node)


def _name(graph: fx.GraphModule, node: fx.Node, layer: nn.Module) -> str:
    """Add the layer to the graph, under its name in the model if nothing else is there; return its name."""
    first = next(layer.parameters())
    weight: Any = next(one for one in node.all_input_nodes if parameter_at(graph, one) is first)
    owner, _, _ = str(weight.target).rpartition(".")
    found = graph.get_submodule(owner)
    if type(found) is type(layer) and _is_same(found, layer):
        return owner  # of an earlier call
    if owner and type(found) is nn.Module and found.state_dict().keys() <= layer.state_dict().keys():
        graph.set_submodule(owner, layer)
        return owner
    name = free_name(graph, f"{node.name}_layer")
    graph.add_submodule(name, layer)
    return name


def _is_same(found: nn.Module, layer: nn.Module) -> bool:
    ours, theirs = layer.state_dict(keep_vars=True), found.state_dict(keep_vars=True)
    alike = ours.keys() == theirs.keys() and all(theirs[name] is tensor for name, tensor in ours.items())
    return alike and found.extra_repr() == layer.extra_repr()
