"""Measures one row: so many rounds, in each of which every contender has its turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from harness.errors import Failed, Unavailable
from harness.rows import Conditions, Figures, Row


@dataclass(slots=True)
class Measured:
    """What came of a row. `samples` has one figure a round for each metric, None where there is none.

    `missing` says why a contender has none at all, or lost a round.
    """

    row: Row
    samples: dict[str, dict[str, list[float | None]]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def turns(names: list[str], number: int) -> list[str]:
    """The order of a round: each begins with another contender, so that none is always first."""
    start = number % len(names) if names else 0
    return names[start:] + names[:start]


def measure(
    row: Row,
    conditions: Conditions,
    count: int,
    order: Callable[[list[str], int], list[str]] = turns,
) -> Measured:
    """Run the rounds; prints a line for each turn. A contender that can't be had is asked once only.

    `order` gives the contenders of a round, by its number from 0, in their order.
    """
    measured = Measured(row)
    width = max(map(len, row.contenders), default=0)
    out: set[str] = set()
    taken: dict[str, list[Figures]] = {name: [] for name in row.contenders}
    for number in range(count):
        for name in order(list(row.contenders), number):
            if name in out:
                continue
            print(f"[{row.key}] round {number + 1}/{count} {name:<{width}}  ", end="", flush=True)
            figures: Figures = {}
            try:
                figures = row.contenders[name](conditions)
            except Unavailable as reason:
                out.add(name)
                measured.missing[name] = str(reason)
            except Exception as reason:  # one contender's accident must not lose the figures of the others
                told = str(reason) if isinstance(reason, Failed) else repr(reason)
                measured.missing[name] = f"round {number + 1}: {told}"
            taken[name].append(figures)
            print(
                line(figures, row.columns) if figures else f"nothing: {measured.missing[name][:300]}",
                flush=True,
            )
    measured.samples = {name: _by_metric(rounds) for name, rounds in taken.items() if any(rounds)}
    return measured


def line(figures: Figures, columns: Mapping[str, str]) -> str:
    """What one turn gave, in short."""
    return "  ".join(f"{heading} {figures[key]:.4g}" for key, heading in columns.items() if key in figures)


def _by_metric(taken: list[Figures]) -> dict[str, list[float | None]]:
    metrics = list(dict.fromkeys(metric for figures in taken for metric in figures))
    return {metric: [figures.get(metric) for figures in taken] for metric in metrics}
