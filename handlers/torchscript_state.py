"""Detects TorchScript modules that change their own state in `forward`, by static analysis.

Such a module (it counts, caches, or computes in its own buffer) gives wrong results if several threads run it
at once. In TorchServe it works, because each worker has its own copy.
"""

from __future__ import annotations

from typing import Any

import torch

# The nodes for the module's own state in the graph of `forward`, with the methods it calls inlined.
_ITS_OWN = ("prim::GetAttr", "prim::Constant")
_CHANGES = ("prim::SetAttr", "prim::CallMethod")  # a method that can't be inlined may do anything


def changes_itself(module: torch.jit.ScriptModule) -> bool:
    """Whether `forward` of a module in eval mode may write to the module's tensors, lists or attributes.

    The answer is from torch's alias analysis, which is conservative: True may be wrong, False is not.
    """
    graph: Any = module.inlined_graph  # a copy
    _take_as_not_training(graph)
    if any(graph.findAllNodes(kind, True) for kind in _CHANGES):
        return True
    aliases = graph.alias_db()
    own = [node.output() for kind in _ITS_OWN for node in graph.findAllNodes(kind, True)]
    return any(aliases.has_writers(value) for value in own if _can_change(value))


def _take_as_not_training(graph: Any) -> None:
    """Remove the code for training only, such as the batch counter of batch normalisation."""
    passes: Any = torch._C
    graph.setInsertPoint(next(graph.nodes(), graph.return_node()))
    false = graph.insertConstant(False)
    for node in graph.findAllNodes("prim::GetAttr", True):
        if node.s("name") == "training":
            node.output().replaceAllUsesWith(false)
    passes._jit_pass_constant_propagation_immutable_types(graph)
    passes._jit_pass_dce(graph)


def _can_change(value: Any) -> bool:
    """Whether a value can be written to: not a module, whose attributes are checked, nor a scalar or text."""
    return not str(value.type()).startswith(("__torch__.", "int", "float", "bool", "str", "NoneType"))
