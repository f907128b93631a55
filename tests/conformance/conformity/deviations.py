"""The one table of answers that differ from the recorded ones on purpose: `deviations.yaml`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
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
class Deviations:
    """The table: by case for REST and gRPC, and the members that our JSON objects have beside theirs."""

    rest: Mapping[str, Deviation]
    grpc: Mapping[str, Deviation]
    members: Mapping[str, str]  # to the section

    def sections(self) -> Iterator[str]:
        """Every section that is referred to."""
        yield from (deviation.section for table in (self.rest, self.grpc) for deviation in table.values())
        yield from self.members.values()


@lru_cache
def deviations() -> Deviations:
    """Read the table; ValueError when an entry names no section or no answer."""
    raw = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return Deviations(_entries(raw["rest"]), _entries(raw["grpc"]), raw["members"])


def _entries(raw: Mapping[str, Mapping[str, Any]]) -> dict[str, Deviation]:
    for name, entry in raw.items():
        if set(entry) != {"section", "answer"}:
            raise ValueError(f"{TABLE.name}: {name} has {sorted(entry)}, expected section and answer")
    return {name: Deviation(entry["section"], entry["answer"]) for name, entry in raw.items()}


def documented_sections() -> list[str]:
    """The anchors of all headings of docs/differences.md, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+)$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings]
