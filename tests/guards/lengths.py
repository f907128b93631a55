#!/usr/bin/env python3
"""Fails when a file passes 500 lines or a function 60: the size of a file is the size of an idea.

Run by `make check`. Generated code is left out. Docstrings count: a contract that long wants splitting, too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
ROOMS = ("archiver", "client", "handlers", "serving", "benchmarks", "examples")
GENERATED = ("_pb2.py", "_pb2_grpc.py")


def main() -> int:
    """Print every offender; exit status 1 when there is one."""
    root = Path(__file__).resolve().parents[2]
    found = [path for room in ROOMS for path in sorted((root / room).rglob("*.py"))]
    files = [path for path in found if not path.name.endswith(GENERATED)]
    problems = [problem for path in files for problem in problems_in(path, path.relative_to(root))]
    print("\n".join(problems) or f"{len(files)} files within the limits")
    return 1 if problems else 0


def problems_in(path: Path, shown: Path) -> Iterator[str]:
    """Each file or function of one file that is too long, in words."""
    text = path.read_text(encoding="utf-8")
    lines = text.count("\n")
    if lines > MAX_FILE_LINES:
        yield f"{shown}: {lines} lines, at most {MAX_FILE_LINES}: split it by idea"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno:
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{shown}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"


if __name__ == "__main__":
    sys.exit(main())
