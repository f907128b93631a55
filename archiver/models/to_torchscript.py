"""`--format torchscript`: traced or scripted, frozen, with what freezing fuses."""

from __future__ import annotations

import operator
from typing import Any

import torch

from torchere.archiver.models.dynamic import Tensors
from torchere.archiver.models.steps import Say, silent
from torchere.archiver.models.tracing import tell_unused, trace


def to_torchscript(
    module: torch.nn.Module, example: Tensors, *, script: bool = False, say: Say = silent
) -> torch.jit.ScriptModule:
    """The module as frozen TorchScript; batch normalisation is folded into what is before it.

    Args:
        module: in eval mode; TorchScript is frozen, unless it is frozen already.
        example: what it is traced on. Tracing keeps the branches that this example takes.
        script: compile the source of the module, branches and loops with it, instead of tracing.
        say: takes a line when tracing may have lost something.

    Raises:
        ModelRefused: tracing has lost something: see `trace`.
        Exception: whatever torch's compiler has to say.
    """
    if isinstance(module, torch.jit.ScriptModule):
        compiled: Any = module
    elif script:
        compiled = torch.jit.script(module)
    else:
        if isinstance(module, torch.fx.GraphModule):
            _make_traceable(module)
        compiled = trace(module, example, say)
    frozen: torch.jit.ScriptModule = (
        torch.jit.freeze(compiled.eval()) if hasattr(compiled, "training") else compiled
    )
    if not script and not isinstance(module, torch.jit.ScriptModule):
        tell_unused(module, frozen, example, say)
    return frozen


def _make_traceable(graph: torch.fx.GraphModule) -> None:
    """Change what tracing can't follow in a module made of an exported program; it computes the same.

    Checks of input shapes go; sizes are asked of tensors, and operators that take sizes are called by their
    names in torch: operators called directly would take this example's sizes for constants. What is missed
    here is found when the packed model is tried with other sizes.
    """
    graph._forward_pre_hooks.clear()
    for node in list(graph.graph.nodes):
        if node.target is torch.ops.aten.sym_size.int:
            node.target = torch.Tensor.size
        elif node.target is torch.ops.aten._assert_scalar.default or (
            node.op == "call_function" and node.target in (operator.le, operator.ge) and not node.users
        ):
            graph.graph.erase_node(node)
        elif isinstance(node.target, torch._ops.OpOverload) and _takes_sizes(node):
            name = node.target._schema.name.partition("::")[2]
            node.target = getattr(torch.Tensor, name, None) or getattr(torch, name, node.target)
    graph.recompile()


def _takes_sizes(node: torch.fx.Node) -> bool:
    return any(isinstance(item.meta.get("val"), torch.SymInt) for item in node.all_input_nodes)
