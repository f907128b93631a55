"""Whether a TorchScript module changes itself while it answers: told from its code, before it runs.

Such a module (it counts, caches, or computes in a buffer of its own) answers wrongly when several threads run
it at once. TorchServe gives each worker its own, so that it works there.
"""

from __future__ import annotations

from typing import Any

import torch

# What is the module's own in the graph of `forward`, once the methods it calls are part of it.
_ITS_OWN = ("prim::GetAttr", "prim::Constant")
_CHANGES = ("prim::SetAttr", "prim::CallMethod")  # a method that can't be looked into may do anything


def changes_itself(module: torch.jit.ScriptModule) -> bool:
    """Whether `forward` of a module in eval mode may write to the module's tensors, lists or attributes.

    torch's own analysis of aliases says it, which is careful: true may be wrong, false is not.
    """
    graph: Any = module.inlined_graph  # a copy
    _take_as_not_training(graph)
    if any(graph.findAllNodes(kind, True) for kind in _CHANGES):
        return True
    aliases = graph.alias_db()
    own = [node.output() for kind in _ITS_OWN for node in graph.findAllNodes(kind, True)]
    return any(aliases.has_writers(value) for value in own if _can_change(value))


def _take_as_not_training(graph: Any) -> None:
    """Leave out what is for training only: batch normalisation would count its batches."""
    passes: Any = torch._C
    graph.setInsertPoint(next(graph.nodes(), graph.return_node()))
    false = graph.insertConstant(False)
    for node in graph.findAllNodes("prim::GetAttr", True):
        if node.s("name") == "training":
            node.output().replaceAllUsesWith(false)
    passes._jit_pass_constant_propagation_immutable_types(graph)
    passes._jit_pass_dce(graph)


def _can_change(value: Any) -> bool:
    """Modules and numbers are not asked for: an attribute of theirs is, itself."""
    return not str(value.type()).startswith(("__torch__.", "int", "float", "bool", "str", "NoneType"))
