"""Exported programs with inputs by keyword, as of `export(model, (x,), {"mask": mask})`.

Servers give all inputs by position, in the order in which the program names them.
"""

from __future__ import annotations

import json
from typing import Any

from torch.export import ExportedProgram
from torch.utils import _pytree as pytree


def keyword_inputs(program: ExportedProgram) -> tuple[int, tuple[str, ...]]:
    """How many inputs the program takes by position, and the names of those behind them, by keyword."""
    _, pair = _spec(program)
    positional, keywords = pair["children_spec"]
    return len(positional["children_spec"]), tuple(json.loads(keywords["context"]))


def take_by_position(program: ExportedProgram) -> None:
    """Let the modules of this program take all their inputs by position; the graph stays as it is."""
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


def _spec(program: ExportedProgram) -> Any:
    """The structure of `(args, kwargs)` as JSON: the accessors of the object differ between versions."""
    return json.loads(pytree.treespec_dumps(program.call_spec.in_spec))
