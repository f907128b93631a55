"""The section `parallel` of a model config: over how many ranks a model is spread, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SECTION = "parallel"
AUTO = "auto"
# What a plan says of a linear or embedding layer; the names are those of Hugging Face's plans.
STYLES = ("colwise", "rowwise", "colwise_rep", "colwise_gather_output", "rowwise_rep", "embedding_rowwise")


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
        if not isinstance(section, dict) or not section.keys() & {"tensor", "pipeline"}:
            return None
        if unknown := section.keys() - {"tensor", "pipeline", "plan"}:
            named = ", ".join(sorted(map(str, unknown)))
            raise ValueError(f"{SECTION}: {named} is not known, expected tensor or pipeline, and plan")
        counts = [section.get(key, 1) for key in ("tensor", "pipeline")]
        if any(type(count) is not int or count < 1 for count in counts):
            raise ValueError(f"{SECTION}: tensor and pipeline are {counts}, expected whole numbers from 1")
        if min(counts) > 1:
            raise ValueError(f"{SECTION}: tensor and pipeline are both above 1, expected one of them")
        plan = section.get("plan", AUTO)
        if plan != AUTO and not (isinstance(plan, dict) and all(style in STYLES for style in plan.values())):
            raise ValueError(f"{SECTION}.plan: expected auto, or {', '.join(STYLES)} by patterns of names")
        return Split(counts[0], counts[1], plan)
