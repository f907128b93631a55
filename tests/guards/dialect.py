"""How many docstrings speak in riddles: those with "what", "whoever", "whatever", "nobody" or "somebody".

    python tests/guards/dialect.py [--list]

A docstring says what a thing does by a subject, a verb and the field's noun; these words stand where a noun
is missing. In the product 2 % of all docstrings may have one. Prints the share of each room, and with
`--list` the place and the first line of each; exit status 1 above the limit.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
ROOMS = ("archiver", "client", "handlers", "serving")
LIMIT = 0.02
_RIDDLES = re.compile(r"\b(what|whoever|whatever|nobody|somebody)\b", re.IGNORECASE)
_QUOTED = re.compile(r"`[^`]*`|\"[^\"]*\"")  # names and texts of others


class Docstring(NamedTuple):
    """One docstring of the product."""

    room: str  # its folder
    place: str  # file and line
    text: str

    @property
    def is_riddle(self) -> bool:
        """Whether one of the words stands in it, outside quotes."""
        return _RIDDLES.search(_QUOTED.sub("", self.text)) is not None


def docstrings() -> Iterator[Docstring]:
    """Every docstring of the product, file by file."""
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            if path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                continue
            relative = path.relative_to(ROOT)
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    text = ast.get_docstring(node)
                    if text:
                        line = getattr(node, "lineno", 1)
                        yield Docstring(str(relative.parent), f"{relative}:{line}", text)


def main(argv: list[str]) -> int:
    """Count and print; see the module."""
    found = list(docstrings())
    riddles = [each for each in found if each.is_riddle]
    all_of, bad_of = Counter(each.room for each in found), Counter(each.room for each in riddles)
    for room, count in sorted(all_of.items()):
        print(f"{room:<40}{bad_of[room]:>5} of {count:>5}{bad_of[room] / count:>8.1%}")
    if "--list" in argv:
        for each in riddles:
            print(f"{each.place}: {each.text.splitlines()[0]}")
    share = len(riddles) / len(found)
    print(f"{'all rooms':<40}{len(riddles):>5} of {len(found):>5}{share:>8.1%}, at most {LIMIT:.0%}")
    return share > LIMIT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
