"""Reads YAML that others wrote: bounded, and never more than data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import yaml

MAX_CHARACTERS = 1 << 20
MAX_VALUES = 1 << 20  # with what aliases repeat: it may be sent on without aliases
MAX_DEPTH = 50
MAX_NUMBER_CHARACTERS = 400  # reading and printing a longer one takes Python long, or it will not


def read_yaml(text: str) -> Any:
    """The document in `text`, as PyYAML's safe loader makes it; None for an empty one.

    Raises:
        ValueError: it is not YAML, or longer, larger, deeper or more self-referring than is sane; its text is
            one line that says why.
    """
    try:
        _check_shape(text)
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError, ValueError) as err:  # Value: 30 February, too
        raise ValueError(_why(err)) from err
    except (AttributeError, LookupError) as err:  # so PyYAML says that a text is not what its tag is for
        raise ValueError("a value is not what its tag says") from err


class _Loader(yaml.SafeLoader):
    """YAML's own, without the numbers that are a bomb (`1:1:1:...` is one, to the base of 60)."""


def _bounded_number(kind: str) -> Callable[[Any, Any], Any]:
    construct = yaml.SafeLoader.yaml_constructors[kind]

    def constructed(loader: _Loader, node: yaml.Node) -> Any:
        if len(node.value) > MAX_NUMBER_CHARACTERS:
            problem = f"a number of {len(node.value)} characters"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return construct(loader, node)

    return constructed


for _kind in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
    _Loader.add_constructor(_kind, _bounded_number(_kind))


def _check_shape(text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"{len(text)} characters, at most {MAX_CHARACTERS} are read")
    values = 0
    sizes: dict[str | None, int] = {}  # of what has an anchor
    opened: list[tuple[str | None, int]] = []  # collections: the anchor, and the values before it
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            if any(event.anchor == anchor for anchor, _ in opened):
                raise ValueError(f"{event.anchor} is part of itself")
            values += sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.NodeEvent):
            values += 1
            sizes[event.anchor] = 1
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, values - 1))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            sizes[anchor] = values - before
        if values > MAX_VALUES or len(opened) > MAX_DEPTH:
            raise ValueError(f"more than {MAX_VALUES} values, aliases spelt out, or {MAX_DEPTH} levels")


def _why(err: Exception) -> str:
    problem, mark = getattr(err, "problem", None), getattr(err, "problem_mark", None)
    if problem and mark:  # of a parser: the rest of its text is drawn over several lines
        return f"{problem} in line {mark.line + 1}, column {mark.column + 1}"
    return " ".join(str(err).split())
