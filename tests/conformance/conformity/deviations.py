"""The one table of answers that differ from the recorded ones on purpose: `deviations.yaml`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

TABLE = Path(__file__).parents[1] / "deviations.yaml"
DOCUMENT = Path(__file__).parents[3] / "docs" / "differences.md"


@dataclass(frozen=True, slots=True)
class Deviation:
    """What is answered instead: the recorded members that have other values, and where it is explained."""

    section: str  # anchor of a heading in docs/differences.md
    answer: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Which differences of generated requests a section explains."""

    section: str
    case: re.Pattern[str]  # to be found in "profile: case"
    line: re.Pattern[str]  # to be found in a line of the difference


@dataclass(frozen=True, slots=True)
class Deviations:
    """The whole table."""

    rest: Mapping[str, Deviation]  # by the recorded case
    grpc: Mapping[str, Deviation]
    members: Mapping[str, str]  # of JSON objects, beside the recorded ones; to the section
    explanations: Sequence[Explanation]  # of what differential.py finds

    def sections(self) -> Iterator[str]:
        """Every section that is referred to."""
        yield from (deviation.section for table in (self.rest, self.grpc) for deviation in table.values())
        yield from self.members.values()
        yield from (explanation.section for explanation in self.explanations)

    def section_for(self, case: str, lines: Sequence[str]) -> str | None:
        """The section that explains a difference; None when there is none for one of its lines.

        Where the status or code differs, the rest of the answer follows from it and is not looked at.
        """
        looked_at = lines[:1] if lines[0].startswith(("status ", "code ")) else lines
        sections = [self._section_of_line(case, line) for line in looked_at]
        return None if None in sections else sections[0]

    def _section_of_line(self, case: str, line: str) -> str | None:
        return next(
            (each.section for each in self.explanations if each.case.search(case) and each.line.search(line)),
            None,
        )


@lru_cache
def deviations() -> Deviations:
    """Read the table; ValueError when an entry names no section or no answer."""
    raw = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    explanations = [
        Explanation(entry["section"], re.compile(entry["case"]), re.compile(entry["line"]))
        for entry in raw["differential"]
    ]
    return Deviations(_entries(raw["rest"]), _entries(raw["grpc"]), raw["members"], explanations)


def _entries(raw: Mapping[str, Mapping[str, Any]]) -> dict[str, Deviation]:
    for name, entry in raw.items():
        if set(entry) != {"section", "answer"}:
            raise ValueError(f"{TABLE.name}: {name} has {sorted(entry)}, expected section and answer")
    return {name: Deviation(entry["section"], entry["answer"]) for name, entry in raw.items()}


def documented_sections() -> list[str]:
    """The anchors of all headings of docs/differences.md, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+)$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings]
