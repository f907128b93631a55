"""What a row of the table is: contenders that give figures, and the goals these figures are held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from harness.figures import Goal
from harness.models import Workshop

Figures = dict[str, float]  # metric -> value; units are in the metric's name


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a measurement may use."""

    shop: Workshop
    seconds: float  # per load phase


Measure = Callable[[Conditions], Figures]


@dataclass(frozen=True, slots=True)
class Row:
    """One row. `contenders` are measured once each round, one after the other.

    `columns` are the metrics that are shown, with their headings; all are kept in the JSON.
    """

    key: str
    title: str
    method: str  # what is done, in sentences for the document
    contenders: Mapping[str, Measure]
    columns: Mapping[str, str]
    goals: tuple[Goal, ...]
