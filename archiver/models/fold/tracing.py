"""Tracing of a model as a graph of operations, before layers are folded or quantised.

Passes over a graph treat each node as a separate value. If no node reads the result of a change in place,
such as `y.clamp_(0, 1)`, they would delete the change, and quantise the value before it. So here the nodes
after a change are made to read its result.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import operator
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.inputs.run import has_hooks
from torchere.archiver.models.inputs.sizes import Tensors
from torchere.archiver.models.load.module import traceable_lengths
from torchere.archiver.models.steps import line_of

NO_BRANCH = "take the branch out of its forward, as torch.where"
_NO_HOOKS = "let its forward do their work"
_NO_CHANGE = "let it make a new value (y = y.clamp(0, 1)), and keep no state"


class NotTraceable(ModelRefused):
    """The model's forward can't be traced as one graph of operations.

    `reason` is the text without advice, and `mend` is the advice for a model that stays in fp32.
    """

    def __init__(self, reason: str, advice: str, mend: str = NO_BRANCH) -> None:
        super().__init__(f"{reason}; {advice}")
        self.reason, self.mend = reason, mend


def not_traceable(module: nn.Module, reason: str, mend: str = NO_BRANCH) -> NotTraceable:
    """Return the error for a model that is to be quantised, with advice that suits its layers."""
    if any(isinstance(layer, (nn.Linear, nn.LSTM, nn.GRU)) for layer in module.modules()):
        return NotTraceable(reason, "use int8-dynamic, which needs no graph", mend)
    return NotTraceable(reason, f"{mend}, or leave --quantize out", mend)


def traced(module: nn.Module, example: Tensors) -> fx.GraphModule:
    """Trace the module with as many inputs as the example has; the module's class may be replaced meanwhile.

    Raises:
        NotTraceable: the forward can't be traced, or changes a tensor in place in a way that a graph loses;
            or the module has hooks of its own, which are outside of its forward.
    """
    name = type(module).__name__
    if has_hooks(module):
        raise not_traceable(module, f"{name} has hooks, which a graph of its forward loses", _NO_HOOKS)
    try:
        with traceable_lengths(module):
            graph = fx.symbolic_trace(_with_inputs(module, len(example)))
        lost = _follow_changes(graph, example)
    # Broad: tracing runs the model's own code on proxies of tensors, which may raise any error.
    except Exception as error:
        raise not_traceable(
            module,
            f"the forward of {name} can't be traced as a graph ({type(error).__name__}: {line_of(error)})",
        ) from error
    if lost:
        raise not_traceable(module, f"the forward of {name} changes {lost}, which a graph loses", _NO_CHANGE)
    return graph


def _with_inputs(module: nn.Module, count: int) -> nn.Module:
    """Give the module a class whose forward has only the first `count` parameters; the rest keep defaults.

    FX would turn a flag that the example lacks into a symbol, and fail where the forward branches on it. The
    `concrete_args` of FX fix such parameters, but keep them as inputs of the graph, which checks the values.
    """
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(module.forward).parameters.values())
    if len(parameters) == count and all(parameter.kind in kinds for parameter in parameters):
        return module
    names = [parameter.name for parameter in parameters if parameter.kind in kinds][:count]
    names += [f"input_{index}" for index in range(len(names), count)]  # of `*inputs`
    kind: Any = type(module)
    code = f"def forward(self, {', '.join(names)}): return original(self, {', '.join(names)})"
    made: dict[str, Any] = {"original": kind.forward}
    exec(code, made)  # FX reads the number and the names of parameters from a function's code
    module.__class__ = type(
        kind.__name__, (kind,), {"forward": made["forward"], "__module__": kind.__module__}
    )
    return module


def _follow_changes(graph: fx.GraphModule, example: Tensors) -> str | None:
    """Let each node that reads a changed value read the result of the change.

    The graph is run on a copy of the example, to see which nodes change memory, and which nodes share it.

    Returns:
        Text about a change that can't be followed, to end "the forward changes"; None if there is none.
    """
    run = _Changes(graph)
    with torch.inference_mode(False), torch.no_grad():  # inference mode does not count changes
        run.run(*copy.deepcopy(example))
    for value, change in reversed(run.followed):  # a second change of a value follows the first
        value.replace_all_uses_with(change, partial(operator.lt, change))
    graph.recompile()
    return run.lost


class _Changes(fx.Interpreter):
    """Runs a graph, and records the changed values that are read later, each with the node of its change."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.followed: list[tuple[fx.Node, fx.Node]] = []
        self.lost: str | None = None

    def run_node(self, n: fx.Node) -> Any:
        """See fx.Interpreter."""
        given = [tensor for node in n.all_input_nodes for tensor in _tensors(self.env[node])]
        versions = [tensor._version for tensor in given]
        result = super().run_node(n)
        pairs = zip(given, versions, strict=True)
        if changed := [tensor for tensor, version in pairs if tensor._version != version]:
            self._follow(n, result, changed)
        return result

    def _follow(self, change: fx.Node, result: Any, changed: list[torch.Tensor]) -> None:
        if _overlap(changed, [*self.module.parameters(), *self.module.buffers()]):
            self.lost = f"in place ({change.name}) a tensor that stays from call to call"
        for node, value in self.env.items():  # values that are read later, and some that are not
            is_read = any(user > change for user in node.users)
            if not (is_read and _overlap(changed, _tensors(value))):
                continue
            if value is result:
                self.followed.append((node, change))
            else:
                self.lost = (
                    f"in place ({change.name}) a value that it also reads under another name ({node.name})"
                )


def _tensors(value: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(value) if isinstance(one, torch.Tensor)]


def _overlap(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Return whether one of `some` and one of `others` share an element, or, if dtypes differ, a storage."""
    for one, other in itertools.product(some, others):
        if one.untyped_storage()._cdata != other.untyped_storage()._cdata:
            continue
        places = [_places(tensor) for tensor in (one, other)]
        if one.dtype != other.dtype or torch.isin(*places).any():
            return True
    return False


def _places(tensor: torch.Tensor) -> torch.Tensor:
    """Return the offset of each element in the tensor's storage, which other tensors may share."""
    length = tensor.untyped_storage().nbytes() // tensor.element_size()
    return torch.arange(length).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
