"""Runs exported programs, including those with keyword inputs: `export(model, (x,), {"mask": mask})`.

Servers pass all inputs by position, in the order in which the program names them.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from torchere.archiver.models.load.weight_only import BY_PROCESSOR


def keyword_inputs(program: ExportedProgram) -> tuple[int, tuple[str, ...]]:
    """Return the number of positional inputs, and the names of the keyword inputs after them."""
    _, pair = _spec(program)
    positional, keywords = pair["children_spec"]
    return len(positional["children_spec"]), tuple(json.loads(keywords["context"]))


def take_by_position(program: ExportedProgram) -> None:
    """Make modules created from this program take all inputs by position; the graph stays as it is."""
    if not keyword_inputs(program)[1]:
        return
    version, pair = _spec(program)
    positional, keywords = pair["children_spec"]
    positional["children_spec"] += keywords["children_spec"]
    keywords["children_spec"], keywords["context"] = [], "[]"
    signature = program.module_call_graph[0].signature
    if signature is not None:
        signature.in_spec = pytree.treespec_loads(json.dumps([version, pair]))
    if program.example_inputs is not None:
        args, kwargs = program.example_inputs
        program.example_inputs = ((*args, *kwargs.values()), {})


def unguarded_module(program: ExportedProgram) -> torch.nn.Module:
    """Return the module of a program without its guards, which can't be traced."""
    return program.module(check_guards=False)


def holds_for_all_sizes(program: ExportedProgram) -> bool:
    """Whether no size that may vary has a condition, as of a branch that torch.export has followed."""
    # It has no public name. A torch without it is taken to have conditions.
    conditions: list[str] = getattr(program, "_guards_code", ["unknown"])
    return not conditions


def make_traceable(graph: torch.fx.GraphModule) -> None:
    """Rewrite the untraceable operations of an exported program's module; its results stay the same.

    The rewrite removes checks of input shapes and reads sizes from the tensors. It calls operators that take
    sizes through their torch functions, because tracing a direct call would make these sizes constant. Cases
    that are missed here are found when the packed model is tried with other sizes.
    """
    graph._forward_pre_hooks.clear()
    for node in list(graph.graph.nodes):
        if node.target is torch.ops.aten.sym_size.int:
            _call_method(node, "size")
        elif node.target is torch.ops.aten._assert_scalar.default or (
            node.op == "call_function" and node.target in (operator.le, operator.ge) and not node.users
        ):
            graph.graph.erase_node(node)
        elif isinstance(node.target, torch._ops.OpOverload) and _takes_sizes(node):
            name = node.target._schema.name.partition("::")[2]
            if hasattr(torch.Tensor, name):
                _call_method(node, name)
            else:
                node.target = getattr(torch, name, node.target)
    graph.recompile()


def _call_method(node: torch.fx.Node, name: str) -> None:
    with node.graph.inserting_before(node):
        made = node.graph.call_method(name, node.args, node.kwargs)
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)


def _takes_sizes(node: torch.fx.Node) -> bool:
    return any(isinstance(item.meta.get("val"), torch.SymInt) for item in node.all_input_nodes)


def _spec(program: ExportedProgram) -> Any:
    """Return the structure of `(args, kwargs)` as JSON, because its accessors differ by torch version."""
    return json.loads(pytree.treespec_dumps(program.call_spec.in_spec))


def _writes_to_buffer(node: fx.Node) -> bool:
    """Whether the node writes to a tensor of the module; torch.export adds such nodes for changed buffers."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return False
    written = node.args[0] if node.args else None
    return isinstance(written, fx.Node) and written.op == "get_attr"


class ServedProgram(torch.nn.Module):
    """An exported program as a server runs it: inputs by position or by keyword, as it was exported.

    torch's module of a program checks its inputs in Python at each call and looks each weight up in its
    modules, which took longer than running a small model. The checks read types and shapes only, so each
    combination of these is checked once, and later calls run the graph alone
    (docs/decisions/0029-exported-programs-as-fast-as-eager.md). Thread-safe, as the program is.
    `keeps_state` is true if a run changes a buffer, which the next run may read.
    """

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__()
        self.checked: Any = program.module()
        self._direct = _without_checks(self.checked)
        self._out_spec: Any = self.checked._out_spec
        self._is_tensor = self._out_spec == pytree.tree_structure(0)
        self._positional, self._keywords = keyword_inputs(program)
        self.keeps_state = any(map(_writes_to_buffer, self.checked.graph.nodes))
        self._passed: set[tuple[Any, ...]] = set()  # types and shapes of inputs that torch has accepted

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program; torch's own checks refuse inputs that it does not accept."""
        plain = args and not kwargs and all([type(one) is torch.Tensor for one in args])
        if not plain or torch.compiler.is_compiling():
            return self._with_checks(*args, **kwargs)
        kind = tuple([(one.dtype, one.shape, one.device) for one in args])
        if kind in self._passed:
            found = self._direct(*args)
            return found[0] if self._is_tensor else pytree.tree_unflatten(found, self._out_spec)
        result = self._with_checks(*args)
        if len(self._passed) >= _MOST_KINDS:
            self._passed.clear()
        self._passed.add(kind)
        return result

    def _with_checks(self, *args: Any, **kwargs: Any) -> Any:
        if self._keywords and not kwargs and len(args) == self._positional + len(self._keywords):
            kwargs = dict(zip(self._keywords, args[self._positional :], strict=True))
            args = args[: self._positional]
        return self.checked(*args, **kwargs)

    def _apply(
        self, *args: Any, **kwargs: Any
    ) -> Any:  # torch calls it for `to` and `half`; it may replace weights
        applied = super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._direct = _without_checks(self.checked)
        return applied


_MOST_KINDS = 4096  # limit on the types and shapes that are remembered, because clients choose the shapes


def _without_checks(module: fx.GraphModule) -> Callable[..., Any]:
    """Return the module's graph as a function from flat inputs to flat outputs, without checks.

    The function holds the module's own tensors, so the module sees the graph's writes to a buffer.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    first = next((node for node in graph.nodes if node.op == "placeholder"), None)
    held: dict[str, Any] = {}  # the module's tensors, by the names of their placeholders
    for node in list(graph.nodes):
        if node.op == "get_attr":
            with graph.inserting_before(first):
                node.replace_all_uses_with(graph.placeholder(f"held_{len(held)}"))
            held[f"held_{len(held)}"] = operator.attrgetter(node.target)(module)
        elif node.target is torch.ops.aten.dropout.default and node.args[2] is False:
            node.replace_all_uses_with(node.args[0])
        elif node.target not in ("_guards_fn", torch.ops.aten._assert_tensor_metadata.default):
            continue
        graph.erase_node(node)
    _order_weights(graph, held, first)
    return functools.partial(fx.GraphModule(module, graph).forward, *held.values())


def _order_weights(graph: fx.Graph, held: dict[str, Any], first: fx.Node | None) -> None:
    """Reorder 4-bit weights for this processor, once instead of at each call."""
    found = [node for node in graph.nodes if node.target is BY_PROCESSOR and _is_constant(node, held)]
    for node in found:
        name = f"held_{len(held)}"
        with torch.no_grad():
            held[name] = _value_of(node, held)
        with graph.inserting_before(first):
            node.replace_all_uses_with(graph.placeholder(name))
    if found:
        graph.eliminate_dead_code()


def _is_constant(node: fx.Node, held: Mapping[str, Any]) -> bool:
    if node.op == "placeholder":
        return node.target in held
    return node.op == "call_function" and all(_is_constant(one, held) for one in node.all_input_nodes)


def _value_of(node: fx.Node, held: Mapping[str, Any]) -> Any:
    if node.op == "placeholder":
        return held[str(node.target)]
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: _value_of(one, held))
    return node.target(*args, **kwargs)  # type: ignore[operator]
