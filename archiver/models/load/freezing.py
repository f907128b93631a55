"""Freezes TorchScript, and finds the writes that torch's optimiser of frozen modules loses."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

import torch

CONVOLUTIONS = ("aten::_convolution", "aten::conv2d", "aten::conv3d")  # as traced, as scripted
_OF_SHAPE = ("aten::dim", "aten::size")  # the same after a fold; scripted normalisations check their inputs
# As in the schema `fill_(Tensor(a!) self, Scalar value)`. `append.t(t[](a!) self, ...)` changes no tensor.
_WRITE = re.compile(r"Tensor\(\w+!\)")
_FOLDS = ("conv_bn", "conv_add_or_sub", "conv_mul_or_div")


def frozen(module: Any, *, fold_linear: bool = False) -> torch.jit.ScriptModule:
    """Freeze the module in eval mode, and fold normalisations and constants into the layers before them.

    A module that is frozen already is returned as it is.

    Args:
        module: TorchScript.
        fold_linear: fold batch normalisation into linear layers, too, if only the normalisation reads their
            outputs: torch changes these for all readers. It scales their last dimension, which is right for
            rows only, because the channels of [N, C, L] are in the middle.
    """
    if not module._c.hasattr("training"):  # the Python object has it also after `eval()` of a frozen module
        made: torch.jit.ScriptModule = module
        return made
    made = torch.jit.freeze(module.eval(), optimize_numerics=False)
    if not made._c._has_method("forward"):  # for example, an int8 recurrent layer that is scripted by itself
        return made
    names = (*_FOLDS, "linear_bn") if fold_linear and _normalised_alone(made.graph) else _FOLDS
    folds = [getattr(torch._C, f"_jit_pass_fold_frozen_{name}") for name in names]
    while any([fold(made.graph) for fold in folds]):  # a list, so that each runs
        pass
    return made


def _normalised_alone(graph: Any) -> bool:
    """Return whether no linear layer's output is read both by a batch normalisation and elsewhere."""
    normalised = [next(node.inputs()) for node in _nodes(graph) if node.kind() == "aten::batch_norm"]
    linear = [value for value in normalised if value.node().kind() == "aten::linear"]
    return all(sum(use.user.kind() not in _OF_SHAPE for use in value.uses()) == 1 for value in linear)


def loses_writes(graph: Any) -> bool:
    """Return whether a traced convolution would be moved in front of a write, as `y[:, 0] = 0`, to its input.

    `torch.jit.optimize_for_inference` rewrites `aten::_convolution`, and puts it right behind the last of its
    inputs, also out of a loop. Convolutions as scripted stay where they are.
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
            aliases = aliases or graph.alias_db()  # only now, because most models have no such write
            if _may_write(aliases, order.nodes[write], given):
                return True
    return False


def _may_write(aliases: Any, write: Any, values: list[Any]) -> bool:
    written = [*list(write.inputs())[:1], *write.outputs()]  # the outputs are for `out=`
    return any(aliases.may_contain_alias(one, value) for one in written for value in values)


def _nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


class _Order:
    """The nodes of a graph in the order in which they end, inner ones before the node that has them.

    Attributes:
        nodes: all of them.
        starts: for each value by name, the index of the first node after the one that makes it.
        loops: for each node with inner nodes, the index of the first of these and its own.
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
                self.nodes.append(inner.paramNode())  # so that values of the turn start after the loop does
                self.starts.update({value.debugName(): len(self.nodes) for value in inner.inputs()})
                self._add(inner)
            if len(self.nodes) > first:
                self.loops.append((first, len(self.nodes)))
            self.nodes.append(node)
            self.starts.update({value.debugName(): len(self.nodes) for value in node.outputs()})
