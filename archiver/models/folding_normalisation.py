"""A batch normalisation moves into the convolution or linear layer before it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from torchere.archiver.models.folding_graph import calls_of, module_at, only_user_of, replace_module

_ROWS = 2  # dimensions of what a linear layer gives for rows
_NORMALISATIONS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: nn.BatchNorm1d,
    nn.Conv2d: nn.BatchNorm2d,
    nn.Conv3d: nn.BatchNorm3d,
    nn.Linear: nn.BatchNorm1d,
}


def fold_normalisations(graph: fx.GraphModule, example: tuple[torch.Tensor, ...]) -> int:
    """Fold every batch normalisation that alone reads a convolution, or a linear layer of rows; how many.

    A linear layer computes the last dimension, and a normalisation scales dimension 1: of what has three
    dimensions these are two. The graph is run on the example to see how many there are.
    """
    nodes = [node for node in graph.graph.nodes if _is_followed(graph, node)]
    linear = [node for node in nodes if isinstance(module_at(graph, node), nn.Linear)]
    ranks = _ranks(graph, example) if linear else {}
    folded = [node for node in nodes if node not in linear or ranks.get(node) == _ROWS]
    for node in folded:
        _fold(graph, node)
    return len(folded)


def _is_followed(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Whether the node is a layer that nothing but its normalisation reads."""
    following, layer = only_user_of(node), module_at(graph, node)
    if following is None or layer is None or calls_of(graph, node) > 1:
        return False
    normalisation: Any = module_at(graph, following)
    return type(normalisation) is _NORMALISATIONS.get(type(layer)) and normalisation.running_mean is not None


def _fold(graph: fx.GraphModule, node: fx.Node) -> None:
    layer: Any = module_at(graph, node)
    (following,) = node.users
    fuse: Any = fuse_linear_bn_eval if isinstance(layer, nn.Linear) else fuse_conv_bn_eval
    replace_module(graph, node, fuse(layer, module_at(graph, following)))
    following.replace_all_uses_with(node)
    graph.graph.erase_node(following)


class _Ranks(fx.Interpreter):
    """Runs a graph, and keeps how many dimensions each result has."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.found: dict[fx.Node, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        """See fx.Interpreter."""
        result = super().run_node(n)
        if isinstance(result, torch.Tensor):
            self.found[n] = result.dim()
        return result


def _ranks(graph: fx.GraphModule, example: tuple[torch.Tensor, ...]) -> dict[fx.Node, int]:
    """The dimensions of each result; those before the failure where the graph does not run."""
    run = _Ranks(graph)
    try:
        with torch.no_grad():
            run.run(*copy.deepcopy(example))
    # Broad: a graph that was traced wrongly may raise anything; it is compared with the model later.
    except Exception:
        return run.found
    return run.found
