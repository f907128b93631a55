"""Freezes TorchScript, and finds the writes that torch's optimiser of frozen modules loses."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

import torch

CONVOLUTIONS = ("aten::_convolution", "aten::conv2d", "aten::conv3d")  # the first traced, the others scripted
_OF_SHAPE = ("aten::dim", "aten::size")  # folds keep shapes; scripted normalisations check those of inputs
# A tensor that an operator writes to: `fill_(Tensor(a!) self, ...)`. `append.t(t[](a!) self, ...)` has none.
_WRITE = re.compile(r"Tensor\(\w+!\)")
_FOLDS = ("conv_bn", "conv_add_or_sub", "conv_mul_or_div")


def frozen(module: Any, *, fold_linear: bool = False) -> torch.jit.ScriptModule:
    """Freeze the module in eval mode, and fold normalisations and constants into the layers before them.

    A module that is frozen already is returned as it is.

    Args:
        module: TorchScript.
        fold_linear: also fold batch normalisation into linear layers, if only the normalisation reads their
            outputs, because torch changes these for all readers. It scales the last dimension, which is right
            for outputs [N, C] only, because the channels of [N, C, L] are in the middle.
    """
    if not module._c.hasattr("training"):  # `eval()` of a frozen module sets it on the Python object only
        made: torch.jit.ScriptModule = module
        return made
    made = torch.jit.freeze(module.eval(), optimize_numerics=False)
    if not made._c._has_method("forward"):  # for example, an int8 recurrent layer that is scripted by itself
        return made
    names = (*_FOLDS, "linear_bn") if fold_linear and _normalised_alone(made.graph) else _FOLDS
    folds = [getattr(torch._C, f"_jit_pass_fold_frozen_{name}") for name in names]
    while any([fold(made.graph) for fold in folds]):  # a list, so that every fold runs
        pass
    _empty_types(made.graph)
    return made


def _empty_types(graph: Any) -> None:
    """Empty each constant of `x.to(constant)`, which takes its type and device; it may be a whole weight."""
    for node in graph.findAllNodes("aten::to", True):
        value = node.inputsAt(1).toIValue()
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized:
            with graph.insert_point_guard(node):
                node.replaceInput(1, graph.insertConstant(value.new_empty(0)))


def _normalised_alone(graph: Any) -> bool:
    """Return whether no linear layer's output is read both by a batch normalisation and elsewhere."""
    normalised = [next(node.inputs()) for node in _nodes(graph) if node.kind() == "aten::batch_norm"]
    linear = [value for value in normalised if value.node().kind() == "aten::linear"]
    return all(sum(use.user.kind() not in _OF_SHAPE for use in value.uses()) == 1 for value in linear)


def loses_writes(graph: Any) -> bool:
    """Return whether a traced convolution would move before a write to its input, such as `y[:, 0] = 0`.

    `torch.jit.optimize_for_inference` rewrites `aten::_convolution`, and puts it directly after the last of
    its inputs, even if that moves it out of a loop. Scripted convolutions stay where they are.
    """
    order = _Order(graph)
    writes = [at for at, node in enumerate(order.nodes) if _WRITE.search(node.schema())]
    aliases = None
    for at, node in enumerate(order.nodes):
        if node.kind() != CONVOLUTIONS[0]:
            continue
        given = list(node.inputs())[:3]  # input, weight and bias
        start = max(order.starts.get(value.debugName(), 0) for value in given)
        end = max([at, *(last for first, last in order.loops if start <= first <= at < last)])
        for write in writes[bisect_left(writes, start) : bisect_left(writes, end)]:
            aliases = aliases or graph.alias_db()  # computed only here: most models have no such write
            if _may_write(aliases, order.nodes[write], given):
                return True
    return False


def _may_write(aliases: Any, write: Any, values: list[Any]) -> bool:
    written = [*list(write.inputs())[:1], *write.outputs()]  # with `out=`, the output is written to
    return any(aliases.may_contain_alias(one, value) for one in written for value in values)


def _nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


class _Order:
    """The nodes of a graph in the order in which they end, inner nodes before the node that contains them.

    Attributes:
        nodes: all nodes in this order.
        starts: for each value by name, the index of the first node after the one that makes it.
        loops: for each node with inner nodes, the index of the first inner node and the node's own index.
    """

    def __init__(self, graph: Any) -> None:
        self.nodes: list[Any] = []
        self.starts: dict[str, int] = {}
        self.loops: list[tuple[int, int]] = []
        self._add(graph)

    def _add(self, block: Any) -> None:
        for node in block.nodes():
            first = len(self.nodes)
            for inner in node.blocks():
                self.nodes.append(inner.paramNode())  # so that an iteration's values start inside the loop
                self.starts.update({value.debugName(): len(self.nodes) for value in inner.inputs()})
                self._add(inner)
            if len(self.nodes) > first:
                self.loops.append((first, len(self.nodes)))
            self.nodes.append(node)
            self.starts.update({value.debugName(): len(self.nodes) for value in node.outputs()})
