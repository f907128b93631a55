"""A whole run, and its JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.figures import judge
from harness.machine import Machine
from harness.rounds import Measured


@dataclass(frozen=True, slots=True)
class Result:
    """One run of `benchmarks/run.py`."""

    machine: Machine
    rounds: int
    seconds: float
    rows: list[Measured]


def write(result: Result, folder: Path) -> Path:
    """Write `<folder>/<date>.json`; returns its path."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{result.machine.date.replace(':', '')}.json"
    path.write_text(json.dumps(plain(result), indent=2) + "\n", encoding="utf-8")
    return path


def plain(result: Result) -> dict[str, object]:
    """The run as what JSON knows: every sample, every ratio."""
    return {
        "machine": asdict(result.machine),
        "rounds": result.rounds,
        "seconds": result.seconds,
        "rows": {measured.row.key: _plain_row(measured) for measured in result.rows},
    }


def _plain_row(measured: Measured) -> dict[str, object]:
    verdicts = [judge(goal, measured.samples) for goal in measured.row.goals]
    return {
        "title": measured.row.title,
        "method": measured.row.method,
        "samples": measured.samples,
        "missing": measured.missing,
        "goals": [
            {
                "text": verdict.goal.text,
                "target": verdict.goal.target,
                "more_is_better": verdict.goal.more_is_better,
                "found": asdict(verdict.spread) if verdict.spread else None,
                "best_peer": verdict.best_peer,
                "met": verdict.met,
            }
            for verdict in verdicts
        ],
    }
