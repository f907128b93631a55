"""Freezes TorchScript, and finds the writes that torch's optimiser of frozen modules loses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

CONVOLUTIONS = ("aten::_convolution", "aten::conv2d", "aten::conv3d")  # as traced, as scripted
_OF_SHAPE = ("aten::dim", "aten::size")  # the same after a fold; scripted normalisations check their inputs
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
    """Return whether a convolution reads values written through a view, as by `y[:, 0] = 0`.

    `torch.jit.optimize_for_inference` may join such a convolution with the one before the write, and then
    removes the write.
    """
    aliases = graph.alias_db()
    views: list[Any] = []
    written: list[Any] = []  # and all values computed from these
    for node in _nodes(graph):
        given, made = list(node.inputs()), list(node.outputs())
        if any(_shares(aliases, one, written) for one in given):
            if node.kind() in CONVOLUTIONS:
                return True
            written += made
        if "!)" in node.schema():  # a write, such as `fill_(Tensor(a!) self, Scalar value)`
            written += [one for one in given[:1] if _shares(aliases, one, views)]
        else:
            views += [one for one in made if _shares(aliases, one, given)]
    return False


def _shares(aliases: Any, value: Any, others: list[Any]) -> bool:
    return any(aliases.may_contain_alias(value, other) for other in others)


def _nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)
