"""Answers as text for people. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchere.client import Tensor

_MOST_ROWS = 100  # of a table; more is printed as JSON


def body_text(body: bytes, content_type: str) -> str:
    """The answer of a handler: labels and scores as a table, JSON indented, text as it is."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return f"{len(body)} bytes of {content_type or 'unknown type'}"
    try:
        value = json.loads(text)
        if _is_scores(value):
            return _table([(name, f"{score:g}") for name, score in value.items()])
        return json.dumps(value, indent=2, ensure_ascii=False)
    except (ValueError, OverflowError, RecursionError):  # no JSON, or more than can be laid out
        return text


def tensors_text(tensors: Sequence[Tensor]) -> str:
    """Each output: its name, datatype and shape in a line, and its values below."""
    blocks = []
    for one in tensors:
        values: Any = one.numpy()  # NumPy's own text leaves out the middle of what is long
        if one.datatype == "BYTES":
            values = [element.decode("utf-8", "backslashreplace") for element in values.reshape(-1).tolist()]
        blocks.append(f"{one.name}  {one.datatype} {list(one.shape)}\n{values}")
    return "\n\n".join(blocks) or "no outputs"


def _is_scores(value: object) -> bool:
    return (
        isinstance(value, dict)
        and 0 < len(value) <= _MOST_ROWS
        and all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in value.values())
    )


def _table(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
