"""The section `parallel` of a model config: over how many ranks a model is spread, and how. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SECTION = "parallel"
AUTO = "auto"
# What a plan says of a linear or embedding layer; the names are those of Hugging Face's plans.
STYLES = ("colwise", "rowwise", "colwise_rep", "colwise_gather_output", "rowwise_rep", "embedding_rowwise")
_COUNTS = ("tensor", "pipeline")


@dataclass(frozen=True, slots=True)
class Split:
    """The section `parallel` of a model config."""

    tensor: int = 1
    pipeline: int = 1
    plan: str | Mapping[str, str] = AUTO  # for `tensor`: styles by patterns of layers' names

    @property
    def ranks(self) -> int:
        """The number of processes."""
        return self.tensor * self.pipeline

    @staticmethod
    def read(config: Mapping[str, Any]) -> Split | None:
        """Return the section of a model config; None: the config has no such section, or another program's.

        Raises:
            ValueError: the section is wrong.
        """
        section = config.get(SECTION)
        if not isinstance(section, dict) or not section.keys() & {*_COUNTS}:
            return None
        if unknown := section.keys() - {*_COUNTS, "plan"}:
            named = ", ".join(sorted(map(str, unknown)))
            raise ValueError(f"{SECTION}: {named} is not known, expected tensor or pipeline, and plan")
        counts = [section.get(key, 1) for key in _COUNTS]
        if any(type(count) is not int or count < 1 for count in counts):
            raise ValueError(f"{SECTION}: tensor and pipeline are {counts}, expected whole numbers from 1")
        plan = section.get("plan", AUTO)
        if plan != AUTO and not (isinstance(plan, dict) and all(style in STYLES for style in plan.values())):
            raise ValueError(f"{SECTION}.plan: expected auto, or {', '.join(STYLES)} by patterns of names")
        return Split(counts[0], counts[1], plan)

    @staticmethod
    def parse(text: str) -> Split:
        """Return the value of the flag `--parallel`: `tensor=2,pipeline=2`, and styles as `up=colwise`.

        Raises:
            ValueError: it is wrong.
        """
        section: dict[str, Any] = {}
        plan: dict[str, str] = {}
        for part in text.split(","):
            name, equals, value = (word.strip() for word in part.partition("="))
            if not (name and equals and value) or name in section or name in plan:
                raise ValueError(
                    f"{text!r}; expected tensor=2, pipeline=2, or both with a comma between them"
                )
            if name in _COUNTS:
                section[name] = int(value[:9]) if value.isascii() and value.isdigit() else value
            else:
                plan[name] = value
        found = Split.read({SECTION: section | ({"plan": plan} if plan else {})})
        if found is None or found.ranks == 1 or (plan and found.tensor == 1):
            raise ValueError(f"{text!r}; expected two ranks or more: tensor=2, pipeline=2, or both")
        return found

    def line(self) -> str:
        """Return the section as a line of YAML."""
        members = [f"{name}: {count}" for name in _COUNTS if (count := getattr(self, name)) > 1]
        if self.plan != AUTO:
            members.append(f"plan: {json.dumps(self.plan)}")  # JSON's strings are YAML's
        return f"{SECTION}: {{{', '.join(members)}}}"
