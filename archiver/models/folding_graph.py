"""Small questions to a traced graph, and the two changes that foldings make to it."""

from __future__ import annotations

from typing import Any

from torch import fx, nn


def module_at(graph: fx.GraphModule, node: Any) -> nn.Module | None:
    """The layer that the node calls; None when it is something else."""
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return None
    return graph.get_submodule(str(node.target))


def only_user_of(node: fx.Node) -> fx.Node | None:
    """The one node that uses this one's result; None when there are more, or none."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def calls_of(graph: fx.GraphModule, node: fx.Node) -> int:
    """How often the layer of this node is called: one that is shared must not be changed for one caller."""
    return sum(other.op == "call_module" and other.target == node.target for other in graph.graph.nodes)


def replace_module(graph: fx.GraphModule, node: fx.Node, layer: nn.Module) -> None:
    """Let the node call another layer, under the same name."""
    parent, _, name = str(node.target).rpartition(".")
    setattr(graph.get_submodule(parent), name, layer)


def insert_module(graph: fx.GraphModule, node: fx.Node, layer: nn.Module, source: fx.Node) -> fx.Node:
    """Put a call of a new layer on `source` in the place of the node; returns the new node."""
    name = free_name(graph, f"{node.name}_layer")
    graph.add_module(name, layer)
    with graph.graph.inserting_before(node):
        added = graph.graph.call_module(name, (source,))
    node.replace_all_uses_with(added)
    graph.graph.erase_node(node)
    return added


def parameter_at(graph: fx.GraphModule, node: Any) -> Any:
    """The tensor that a `get_attr` node reads; None for any other node."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    value: Any = graph
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


def free_name(graph: fx.GraphModule, wish: str) -> str:
    """The name that is wished for, or one like it that nothing in the graph has."""
    name, number = wish, 1
    while hasattr(graph, name):
        name, number = f"{wish}_{number}", number + 1
    return name
