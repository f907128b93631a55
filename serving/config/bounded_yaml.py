"""Parser for untrusted YAML: limits size and depth, and creates plain data only."""

from __future__ import annotations

from typing import Any

import yaml

MAX_CHARACTERS = 1 << 20
MAX_VALUES = 1 << 20  # with aliases expanded, because the data may be serialized without aliases
MAX_DEPTH = 50
_CHARACTERS_OF_A_VALUE = 16  # a longer text counts as several values
MAX_NUMBER_CHARACTERS = 400  # Python converts longer numbers slowly or rejects them
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def read_yaml(text: str) -> Any:
    """Return the document in `text`, as parsed by PyYAML's safe loader; None for an empty document.

    Raises:
        ValueError: `text` is not YAML, exceeds a limit, or contains itself; the message is the reason, on one
            line.
    """
    try:
        _check_shape(text)
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as err:
        raise ValueError(_why(err)) from err  # ValueError: 30 February; OverflowError: 1:1:...:1. in base 60
    except (AttributeError, LookupError) as err:  # raised by PyYAML for a value that does not match its tag
        raise ValueError("a value does not have the type of its tag") from err


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, with a limit on the length of numbers (such as base-60 `1:1:1:...`)."""

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        value = super().construct_scalar(node)  # for a mapping, the value of its key `=`
        if node.tag in _NUMBERS and len(value) > MAX_NUMBER_CHARACTERS:
            problem = f"a number of {len(value)} characters"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return value


def _check_shape(text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"{len(text)} characters, at most {MAX_CHARACTERS} are read")
    values = 0
    sizes: dict[str | None, int] = {}  # number of values in the node of each anchor
    opened: list[tuple[str | None, int]] = []  # anchor of each open collection, and values before it
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            if any(event.anchor == anchor for anchor, _ in opened):
                raise ValueError(f"{event.anchor} is part of itself")
            values += sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.NodeEvent):
            # Once serialized, aliases of a long text take as much memory as those of many values.
            size = 1 + len(getattr(event, "value", "")) // _CHARACTERS_OF_A_VALUE
            values += size
            sizes[event.anchor] = size
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, values - 1))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            sizes[anchor] = values - before
        if values > MAX_VALUES or len(opened) > MAX_DEPTH:
            raise ValueError(
                f"more than {MAX_VALUES} values, with long texts and aliases spelt out, or {MAX_DEPTH} levels"
            )


def _why(err: Exception) -> str:
    problem, mark = getattr(err, "problem", None), getattr(err, "problem_mark", None)
    if problem and mark:  # a parser error, whose full text has several lines
        return f"{problem} in line {mark.line + 1}, column {mark.column + 1}"
    return " ".join(str(err).split())
