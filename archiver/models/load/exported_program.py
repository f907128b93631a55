"""Exported programs with keyword inputs, as of `export(model, (x,), {"mask": mask})`.

Servers pass all inputs by position, in the order in which the program names them.
"""

from __future__ import annotations

import json
from typing import Any

from torch.export import ExportedProgram
from torch.utils import _pytree as pytree


def keyword_inputs(program: ExportedProgram) -> tuple[int, tuple[str, ...]]:
    """Return the number of positional inputs, and the names of the keyword inputs after them."""
    _, pair = _spec(program)
    positional, keywords = pair["children_spec"]
    return len(positional["children_spec"]), tuple(json.loads(keywords["context"]))


def take_by_position(program: ExportedProgram) -> None:
    """Make the modules of this program take all inputs by position; the graph stays as it is."""
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
    """Return the structure of `(args, kwargs)` as JSON: the object's accessors differ between versions."""
    return json.loads(pytree.treespec_dumps(program.call_spec.in_spec))
