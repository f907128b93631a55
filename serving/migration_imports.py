"""Which of TorchServe's own modules a handler's source asks for, and which of them are not here."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator

from torchere.handlers.ts_alias import ALIASES, NOT_SHIPPED

MAX_SOURCE_BYTES = 4 * 2**20


def missing_imports(source: str) -> list[str]:
    """One sentence for each `ts` name that the source imports and that is not here.

    >>> missing_imports("from ts.torch_handler.base_handler import BaseHandler")
    []

    Raises:
        SyntaxError: it is no Python of this version.
    """
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            wanted = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            wanted = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        found += [f"line {node.lineno}: {why}" for why in map(_missing, wanted) if why]
    return found


def _missing(wanted: tuple[str, str]) -> str:
    module, name = wanted
    if module != "ts" and not module.startswith("ts."):
        return ""
    for path in (module, f"{module}.{name}"):
        if path in NOT_SHIPPED:
            return f"{path} is not part of torchere: {NOT_SHIPPED[path]}"
    if module not in ALIASES:
        return f"{module} is an internal of TorchServe and not part of torchere"
    if name in ("", "*") or f"{module}.{name}" in ALIASES or name in _names(module):
        return ""
    return f"{module} has no {name} in torchere"


def _names(module: str) -> Iterator[str]:
    """The names that an alias module has."""
    for source in ALIASES[module]:
        ours, _, names = source.partition(":")
        if names:
            name, _, alias = names.partition("=")
            yield alias or name
        else:
            yield from vars(importlib.import_module(f"torchere.handlers.{ours}"))
