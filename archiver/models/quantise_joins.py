"""What joins the outputs of a model stays in fp32: in int8, all that is joined has one scale.

A detector's boxes go to 640 and its scores to 1; with one scale for both, every score is rounded to 0.
"""

from __future__ import annotations

import torch
from torch import fx, nn

from torchere.archiver.models.folding_graph import free_name, module_at

_JOINS = (torch.cat, torch.concat, torch.concatenate, torch.stack)
_WEIGHED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def joined_apart(graph: fx.GraphModule) -> str | None:
    """Put the joining of outputs, and all behind it, into a module of its own; its name, None without any.

    That is from each call of `torch.cat` or `torch.stack` on that no layer with weights reads any more. The
    graph is changed, and computes the same.
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
    """The joins of outputs and what takes their results, in order."""
    read: set[fx.Node] = set()  # by a layer with weights, if only after other steps
    for node in reversed(graph.graph.nodes):
        if any(user in read or isinstance(module_at(graph, user), _WEIGHED) for user in node.users):
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
    """The module that gives what the graph gives, and the nodes it takes."""
    inside = set(behind)
    taken = [one for node in (*behind, output) for one in node.all_input_nodes if one not in inside]
    given = tuple(dict.fromkeys(taken))
    tail = fx.Graph()
    copied = {node: tail.placeholder(f"given_{index}") for index, node in enumerate(given)}
    for node in behind:
        copied[node] = tail.node_copy(node, copied.__getitem__)
    tail.output(fx.node.map_arg(output.args[0], copied.__getitem__))
    return fx.GraphModule(graph, tail), given
