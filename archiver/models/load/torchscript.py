"""Optimises TorchScript for the processor it is loaded on: `torchscript.optimize_for_inference`.

oneDNN multiplies fastest by weights in its own memory order. An `nn.Linear` of TorchScript brings its weights
into that order in every call, and writes its output before the activation behind it reads it again; here the
weights are reordered once, and the activation is computed with the product. A convolution brings its input
into oneDNN's layout, and its output back; `torch.jit.optimize_for_inference` leaves the layers between
convolutions in that layout.
"""

from __future__ import annotations

from typing import Any

import torch

_LINEAR = "aten::linear"
_CONVOLUTIONS = ("aten::_convolution", "aten::conv2d", "aten::conv3d")  # as traced, as scripted
# Activations by their operator, as oneDNN's linear layer calls them (torch's native/mkldnn/Linear.cpp).
_ACTIVATIONS = {"aten::relu": "relu", "aten::relu_": "relu", "aten::gelu": "gelu", "aten::silu": "swish"}
_ROWS = 32  # batch size the order is chosen for; it serves all, and orders for 1 to 1024 were equally fast


def has_convolutions(module: torch.jit.ScriptModule) -> bool:
    """Return whether the module has convolutions."""
    return _has(module, *_CONVOLUTIONS)


def has_linear_layers(module: torch.jit.ScriptModule) -> bool:
    """Return whether the module has linear layers."""
    return _has(module, _LINEAR)


def _has(module: torch.jit.ScriptModule, *kinds: str) -> bool:
    graph: Any = module.inlined_graph
    return any(graph.findAllNodes(kind, True) for kind in kinds)


def optimized(module: torch.jit.ScriptModule, most_packed_bytes: int | None = None) -> torch.jit.ScriptModule:
    """Return the module for this processor: same results but for summation order and NaN. Can't be saved.

    NaN becomes 0 in a ReLU that is computed with the layer before it, as in torch's own convolutions. The
    weights of linear layers and convolutions are copied, and those of the file are released. The given module
    may be changed and must not be used again. As thread-safe as the module.

    Args:
        module: on the CPU, in eval mode; only its `forward` remains.
        most_packed_bytes: how many bytes of weights of linear layers are copied at most; None: all of them.

    Raises:
        RuntimeError: this module, or this build of torch, does not allow it.
    """
    frozen: torch.jit.ScriptModule = torch.jit.freeze(module) if hasattr(module, "training") else module
    try:
        _pack_linear_layers(frozen.graph, most_packed_bytes)
    except (AttributeError, TypeError) as err:  # torch does not promise this interface
        raise RuntimeError(f"this build of torch has other linear layers of oneDNN: {err}") from err
    if not has_convolutions(frozen):
        return frozen
    fast: torch.jit.ScriptModule = torch.jit.optimize_for_inference(frozen)
    return fast


def _pack_linear_layers(graph: Any, most_bytes: int | None) -> None:
    left = float("inf") if most_bytes is None else most_bytes
    aliases = graph.alias_db()
    # Collect all before any is replaced: torch's alias information is about the unchanged graph.
    layers = [(node, _weight(node, aliases)) for node in graph.findAllNodes(_LINEAR, True)]
    packed: dict[tuple[object, ...], torch.Tensor] = {}  # a layer that is used again has one copy
    for node, weight in layers:
        if weight is None:
            continue
        key = (weight.data_ptr(), weight.shape, weight.stride())
        if key not in packed and weight.nbytes <= left:
            left -= weight.nbytes
            packed[key] = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)
        if key in packed:
            _pack(graph, node, packed[key])
    torch._C._jit_pass_dce(graph)  # removes the weights that were packed


def _weight(node: Any, aliases: Any) -> torch.Tensor | None:
    """Return the layer's weights if nothing writes to them and oneDNN takes them and the bias; else None.

    `aten::linear` takes more: weights of no size, a bias that is broadcast or has strides. oneDNN would fail
    or, with a bias that is one number or has strides, compute something else.
    """
    _, weight_of, bias_of, *others = node.inputs()
    weight, bias = _constant(weight_of), _constant(bias_of)
    if others or weight is None or weight.dim() != 2 or not weight.numel() or aliases.has_writers(weight_of):
        return None
    if bias is None:
        return weight if str(bias_of.type()) == "NoneType" else None
    return weight if bias.shape == weight.shape[:1] and bias.is_contiguous() else None


def _constant(value: Any) -> torch.Tensor | None:
    """Return the float32 tensor on the CPU that the graph holds as this value; None for any other value."""
    found = value.toIValue() if value.node().kind() == "prim::Constant" else None
    if not isinstance(found, torch.Tensor) or found.layout is not torch.strided:
        return None
    return found if found.dtype is torch.float32 and found.device.type == "cpu" else None


def _pack(graph: Any, node: Any, weight: torch.Tensor) -> None:
    """Replace a node, and the activation that alone reads its output, by oneDNN's layer."""
    rows, _, bias = node.inputs()
    activation = _activation(node)
    options = list(activation.inputs())[1:] if activation else []  # gelu has one: the name of its formula
    with graph.insert_point_guard(node):  # else nodes would be inserted beside a destroyed one
        packed = _inserted(graph, "prim::Constant")
        packed.t_("value", weight)
        scalars = _inserted(graph, "prim::ListConstruct")  # parameters of activations that have some
        scalars.output().setType(torch._C.ListType(torch._C.OptionalType(torch._C.NumberType.get())))
        name = graph.insertConstant(_ACTIVATIONS[activation.kind()] if activation else "none")
        formula = graph.insertConstant(options[0].toIValue() if options else None)
        arguments = [rows, packed.output(), bias, name, scalars.output(), formula]
        layer = _inserted(graph, "mkldnn::_linear_pointwise", arguments)
    for replaced in filter(None, (activation, node)):
        replaced.output().replaceAllUsesWith(layer.output())
        replaced.destroy()


def _activation(node: Any) -> Any:
    """Return the activation that alone reads a layer's output; None if oneDNN can't compute it with it."""
    users = [use.user for use in node.output().uses()]
    if len(users) != 1 or users[0].kind() not in _ACTIVATIONS:
        return None
    options = list(users[0].inputs())[1:]
    return users[0] if all(option.node().kind() == "prim::Constant" for option in options) else None


def _inserted(graph: Any, kind: str, inputs: list[Any] | None = None) -> Any:
    return graph.insertNode(graph.create(kind, inputs or [], 1))
