"""ReLU6 behind a convolution becomes ReLU, for the number format of int8 can do the rest.

When the activations behind a ReLU6 are quantised over exactly 0 ... 6, the format's own saturation is the
upper limit: it costs nothing, no level is spent on values that are cut off, and the ReLU that is left is
fused into the convolution.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from torchere.archiver.models.folding_graph import calls_of, insert_module, module_at

_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
_LIMITS = (0.0, 6.0)
_ARGUMENTS = {  # names of the limits, in the order of the function's arguments
    functional.hardtanh: ("min_val", "max_val"),
    torch.clamp: ("min", "max"),
}


def clipped_by_format(graph: fx.GraphModule, kept: Collection[str] = ()) -> tuple[str, ...]:
    """Put ReLU in the place of each ReLU6 that directly follows a layer with weights.

    Behind a layer that is `kept` in fp32 it stays, as a module.

    The graph then computes something else, unless the activations of the layers whose names are returned (the
    layers with weights, and the ReLUs) are quantised over 0 ... 6.
    """
    names: list[str] = []
    for node in list(graph.graph.nodes):
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or not _is_relu6(graph, node):
            continue
        alone = isinstance(module_at(graph, source), _LAYERS) and calls_of(graph, source) == 1
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
    if isinstance(layer, nn.Hardtanh):  # nn.ReLU6 is one
        return (layer.min_val, layer.max_val) == _LIMITS
    if node.op == "call_function" and node.target is functional.relu6:
        return True
    if node.op == "call_function" and node.target in _ARGUMENTS:
        return _limits(node, _ARGUMENTS[node.target]) == _LIMITS
    return node.op == "call_method" and node.target == "clamp" and _limits(node, ("min", "max")) == _LIMITS


def _limits(node: fx.Node, names: tuple[str, str]) -> tuple[Any, ...]:
    given = {**dict(zip(names, node.args[1:], strict=False)), **node.kwargs}
    return tuple(given.get(name) for name in names)
