"""The tables: figures of each contender, and how each goal came out. For terminals and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from harness.figures import Goal, Spread, Verdict, judge, spread
from harness.results import Result
from harness.rounds import Measured

Table = list[list[str]]


def summary(result: Result) -> str:
    """The whole run for a terminal."""
    parts = []
    for measured in result.rows:
        parts.append(f"== {measured.row.title} ({measured.row.key})")
        parts += [aligned(figures(measured)), aligned(goals(measured))]
        parts += [f"   {name}: {reason.splitlines()[0]}" for name, reason in measured.missing.items()]
    return "\n".join(parts)


def figures(measured: Measured) -> Table:
    """A line for each contender: the median and, in brackets, the least and greatest round."""
    columns = measured.row.columns
    lines = [["", *columns.values()]]
    for name, samples in measured.samples.items():
        lines.append([name, *(shown(spread(samples.get(metric, ()))) for metric in columns)])
    return lines


def goals(measured: Measured) -> Table:
    """A line for each goal: what it asks, what was found, and whether that is enough."""
    lines = [["goal", "wanted", "found", "best peer", ""]]
    for goal in measured.row.goals:
        verdict = judge(goal, measured.samples)
        found = shown(verdict.spread)
        lines.append([goal.text, _wanted(goal), found, verdict.best_peer, _said(verdict)])
    return lines


def _wanted(goal: Goal) -> str:
    if goal.target is None:
        return "-"
    return f"{'≥' if goal.more_is_better else '≤'} {goal.target:g}"


def _said(verdict: Verdict) -> str:
    if verdict.goal.target is None:
        return ""
    return {None: "not measured", True: "reached", False: "MISSED"}[verdict.met]


def shown(found: Spread | None) -> str:
    """A spread in few characters."""
    if found is None:
        return "-"
    if found.rounds == 1 or found.low == found.high:
        return number(found.median)
    return f"{number(found.median)} ({number(found.low)}-{number(found.high)})"


def number(value: float) -> str:
    """Three digits that matter, and whole numbers from a hundred on."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def aligned(table: Sequence[Sequence[str]]) -> str:
    """The table in columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "   " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    )


def markdown_table(table: Sequence[Sequence[str]]) -> str:
    """The table for a document; its first line is the head."""
    lines = ["| " + " | ".join(line) + " |" for line in table]
    return "\n".join([lines[0], "|" + " --- |" * len(table[0]), *lines[1:]])
