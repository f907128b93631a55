"""The section `parallel` of a model config: over how many ranks a model is spread, and how. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SECTION = "parallel"
AUTO = "auto"
# The ways in which a plan may split a linear or embedding layer, by their names in Hugging Face's plans.
STYLES = ("colwise", "rowwise", "colwise_rep", "colwise_gather_output", "rowwise_rep", "embedding_rowwise")
_COUNTS = ("tensor", "pipeline")
_WEIGHTS = "weights"
_BATCHED = "batched"
_S3 = re.compile(r"s3://[^/?#\s]+/[^?#\s]+")


@dataclass(frozen=True, slots=True)
class Split:
    """The section `parallel` of a model config."""

    tensor: int = 1
    pipeline: int = 1
    plan: str | Mapping[str, str] = AUTO  # for `tensor`: styles by patterns of layers' names
    weights: str = ""  # s3://bucket/key of a safetensors file, or of a folder; "": they are in the archive
    batched: bool = True  # for `pipeline`: the rows of the inputs are independent, and may run in parts

    @property
    def ranks(self) -> int:
        """The number of processes."""
        return self.tensor * self.pipeline

    @staticmethod
    def read(config: Mapping[str, Any]) -> Split | None:
        """Return the section of a model config; None if the section is missing or belongs to another program.

        Raises:
            ValueError: the section is wrong.
        """
        section = config.get(SECTION)
        if not isinstance(section, dict):
            return None
        weights = section.get(_WEIGHTS, "")
        if not section.keys() & {*_COUNTS} and not str(weights).startswith("s3://"):
            return None
        if unknown := section.keys() - {*_COUNTS, "plan", _WEIGHTS, _BATCHED}:
            named = ", ".join(sorted(map(str, unknown)))
            raise ValueError(
                f"{SECTION}: {named} is not known, expected tensor or pipeline, and plan, {_BATCHED} or "
                f"{_WEIGHTS}"
            )
        counts = [section.get(key, 1) for key in _COUNTS]
        if any(type(count) is not int or count < 1 for count in counts):
            raise ValueError(f"{SECTION}: tensor and pipeline are {counts}, expected whole numbers from 1")
        plan = section.get("plan", AUTO)
        if plan != AUTO and not (isinstance(plan, dict) and all(style in STYLES for style in plan.values())):
            raise ValueError(f"{SECTION}.plan: expected auto, or {', '.join(STYLES)} by patterns of names")
        if weights != "" and not (
            isinstance(weights, str) and _S3.fullmatch(weights) and ".." not in weights
        ):
            raise ValueError(f"{SECTION}.{_WEIGHTS} is {weights!r:.200}, expected s3://bucket/key")
        batched = section.get(_BATCHED, True)
        if not isinstance(batched, bool):
            raise ValueError(f"{SECTION}.{_BATCHED} is {batched!r:.200}, expected true or false")
        split = Split(counts[0], counts[1], plan, weights, batched)
        if weights and split.ranks == 1:
            raise ValueError(f"{SECTION}.{_WEIGHTS} is for two ranks or more, expected tensor or pipeline: 2")
        return split

    @staticmethod
    def parse(text: str) -> Split:
        """Parse the value of `--parallel`: `tensor=2,pipeline=2`, and styles of layers such as `up=colwise`.

        `weights=s3://bucket/key` names weights that are not in the archive.

        Raises:
            ValueError: the flag's value is wrong.
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
            elif name == _WEIGHTS:
                section[name] = value
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
        if self.weights:
            members.append(f"{_WEIGHTS}: {json.dumps(self.weights)}")
        if not self.batched:
            members.append(f"{_BATCHED}: false")
        return f"{SECTION}: {{{', '.join(members)}}}"
