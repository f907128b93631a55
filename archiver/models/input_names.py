"""What the inputs of a model are called: as the parameters of its `forward`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from torchere.archiver.errors import ModelRefused


def input_names(module: Any, count: int) -> tuple[str, ...]:
    """Names of the first `count` inputs: the parameters of `forward`, or `input_0`, ... without such.

    `module` None is a model that keeps no names.
    """
    found: list[str] = []
    if isinstance(module, torch.jit.ScriptModule):
        schema: Any = module.forward
        found = [argument.name for argument in schema.schema.arguments[1:]]
    elif module is not None:
        parameters = inspect.signature(module.forward).parameters.values()
        plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        found = [parameter.name for parameter in parameters if parameter.kind in plain]
        _refuse_keyword_only(parameters, count - len(found))
    if len(found) < count:
        return ("input",) if count == 1 else tuple(f"input_{index}" for index in range(count))
    return tuple(found[:count])


def inputs_up_to(module: Any, given: Sequence[str] | None, least: int) -> int:
    """How many inputs of `forward` there are up to the last one of `given`; at least `least`."""
    if given is None or module is None or isinstance(module, torch.jit.ScriptModule):
        return least
    known = list(inspect.signature(module.forward).parameters)
    return max([least, *(known.index(name) + 1 for name in given if name in known)])


def _refuse_keyword_only(parameters: Iterable[inspect.Parameter], missing: int) -> None:
    kinds = {parameter.kind for parameter in parameters}
    named = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    if missing > 0 and named and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise ModelRefused(
            f"forward takes {', '.join(named)} by keyword only, and a server gives inputs in their order; "
            "take the * out of its parameters"
        )
