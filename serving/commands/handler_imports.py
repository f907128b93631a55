"""Reads the imports in the Python of an archive, without running it: names of TorchServe, and packages."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Collection, Iterable, Iterator

from torchere.handlers.ts_compat.alias import ALIASES, NOT_SHIPPED

_OURS = frozenset({"ts", "torchere"})


def missing_imports(source: str) -> list[str]:
    """Return one sentence for each name in `ts` that the source imports but torchere does not provide.

    >>> missing_imports("from ts.torch_handler.base_handler import BaseHandler")
    []

    Raises:
        SyntaxError: the source is not valid for this Python version.
    """
    found = ((line, _missing(module, name)) for line, module, name in _imported(ast.walk(ast.parse(source))))
    return [f"line {line}: {why}" for line, why in found if why]


def _imported(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str, str]]:
    """Yield the line, module and name (of `import module`: "") of each import among these nodes."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.lineno, node.module, alias.name) for alias in node.names)


def _missing(module: str, name: str) -> str:
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
    """Yield the names that an alias module exports."""
    for source in ALIASES[module]:
        ours, _, names = source.partition(":")
        if names:
            name, _, alias = names.partition("=")
            yield alias or name
        else:
            yield from vars(importlib.import_module(f"torchere.handlers.{ours}"))


def not_installed(source: str, files: Collection[str]) -> list[str]:
    """Return one sentence for each package that the source needs when it is imported, and that is not here.

    Imports in functions, and in `try` or `if`, do not count: the source may do without.

    Args:
        source: the text of a Python file of an archive.
        files: the names of all files of the archive, which it may import.

    Raises:
        SyntaxError: the source is not valid for this Python version.
    """
    beside = {part.removesuffix(".py") for name in files for part in name.split("/")}
    known = _OURS | beside | sys.stdlib_module_names
    found: dict[str, str] = {}
    for line, module, _ in _imported(ast.parse(source).body):
        root = module.partition(".")[0]
        if root not in known and root not in found and not _is_installed(root):
            found[root] = (
                f"line {line}: {root} is not installed here; install it beside the server, or pack the "
                "archive with its requirements and set install_py_dep_per_model=true"
            )
    return list(found.values())


def _is_installed(root: str) -> bool:
    try:
        return importlib.util.find_spec(root) is not None
    except (ImportError, ValueError):  # ValueError: imported, and without a spec
        return root in sys.modules
