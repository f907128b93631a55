"""Write `docs/bad-inputs.md`: hostile and broken inputs, the answers of the server, and tests that try them.

    python tests/hostile/bad_inputs.py

The rows are in `bad_inputs.yaml`. A row needs a test that exists, or a reason for having none.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
ROWS = Path(__file__).with_name("bad_inputs.yaml")
PAGE = ROOT / "docs/bad-inputs.md"
# How many groups of inputs each letter has: none may be left out.
GROUPS = {"H": 12, "J": 7, "T": 8, "G": 7, "I": 3, "A": 12, "U": 7, "N": 9, "B": 10, "P": 8, "S": 3, "M": 6}
HEAD = """# Bad inputs

Inputs that are hostile or broken, and the server's answers. Every row names the tests that try it, or the
reason why none does; all of them run in `make test`. Written by `python tests/hostile/bad_inputs.py` from
`tests/hostile/bad_inputs.yaml`: add a row there, and a test, for an input that is missing.

Parsers are fuzzed, too: `make fuzz` (targets in `tests/fuzz/`), and cases that were found are kept as tests.
How to report a hole is in [SECURITY.md](../SECURITY.md).
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One input; it has tests, a reason for having none, or both if they try a part of it."""

    id: str
    input: str
    answer: str = ""
    tests: tuple[str, ...] = ()
    skipped: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """The inputs of one kind."""

    letter: str
    title: str
    rows: tuple[Row, ...]


def sections() -> list[Section]:
    """Read the sections, in their order."""
    said: list[dict[str, Any]] = yaml.safe_load(ROWS.read_text(encoding="utf-8"))
    return [
        Section(
            each["letter"],
            each["title"],
            tuple(_row(row) for row in each["rows"]),
        )
        for each in said
    ]


def _row(said: dict[str, Any]) -> Row:
    texts = {name: str(value) for name, value in said.items() if name != "tests"}
    return Row(**texts, tests=tuple(said.get("tests", ())))


def problems(found: list[Section]) -> Iterator[str]:
    """What is wrong with the rows, in words."""
    for section in found:
        for row in section.rows:
            place = f"{section.title}, {row.id}"
            if not row.tests and not row.skipped:
                yield f"{place}: neither a test nor a reason for having none"
            if bool(row.tests) != bool(row.answer):
                yield f"{place}: an answer needs a test, and a test an answer"
            yield from (f"{place}: there is no test {test}" for test in row.tests if not exists(test))
    ids = {row.id for section in found for row in section.rows}
    for letter, count in GROUPS.items():
        yield from (f"{letter}{n} is missing" for n in range(1, count + 1) if f"{letter}{n}" not in ids)


def exists(test: str) -> bool:
    """Tell whether there is a test of that name: `path::function`."""
    path, _, name = test.partition("::")
    return name in functions(path)


@cache
def functions(path: str) -> frozenset[str]:
    """The names of the test functions of a file; none if there is no such file."""
    file = ROOT / path
    if not file.is_file():
        return frozenset()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return frozenset(
        node.name for node in tree.body if isinstance(node, kinds) and node.name.startswith("test_")
    )


def page(found: list[Section]) -> str:
    """The text of the page."""
    rows = [row for section in found for row in section.rows]
    tests = {test for row in rows for test in row.tests}
    skipped = sum(1 for row in rows if not row.tests)
    lines = [HEAD, f"{len(rows)} rows, {len(tests)} tests; {skipped} rows are skipped with a reason.\n"]
    for section in found:
        lines += [f"\n## {section.title}\n", "| | Input | Answer | Tried by |", "| --- | --- | --- | --- |"]
        lines += [_line(row) for row in section.rows]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    answer = row.answer or "-"
    tried = "<br>".join(_link(test) for test in row.tests)
    if row.skipped:
        tried += ("<br>" if tried else "") + f"skipped: {row.skipped}"
    cells = [row.id, row.input, answer, tried]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _link(test: str) -> str:
    path, _, name = test.partition("::")
    return f"[{Path(path).name}](../{path})`::{name}`"


def main() -> int:
    """Write the page; exit status 1, and nothing written, if a row is wrong."""
    found = sections()
    wrong = list(problems(found))
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 1
    PAGE.write_text(page(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
