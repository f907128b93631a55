"""`docs/benchmarks.md`, written from a run, so that the figures in it can't drift from what was measured."""

from __future__ import annotations

from harness.figures import judge
from harness.machine import Machine
from harness.report import figures, goals, markdown_table, shown
from harness.results import Result
from harness.rounds import Measured

_HEAD = """# Benchmarks

Throughput, latency and start of torchere beside TorchServe, mosec, LitServe and Triton.
Written by `python benchmarks/run.py --write-docs`; do not edit. `make bench` repeats the run on your machine.

Every figure is the median over the rounds, with the least and the greatest in brackets. One server is up at a
time, all with the same client, on the same cores as the client; each round measures every contender once.
Goals are ratios within one round: absolute figures drift with the machine, ratios much less.
"""


def markdown(result: Result) -> str:
    """The whole document."""
    parts = [_HEAD, _machine(result.machine, result.rounds, result.seconds), _missed(result.rows)]
    parts += [_section(measured) for measured in result.rows]
    return "\n".join(parts).rstrip() + "\n"


def _machine(machine: Machine, rounds: int, seconds: float) -> str:
    return (
        f"Measured {machine.date} on {machine.cpu}, {machine.cores} cores, {machine.memory_gib:g} GiB, "
        f"{machine.system}; Python {machine.python}, PyTorch {machine.torch}, torchere {machine.torchere} "
        f"(commit {machine.commit}); {rounds} rounds, {seconds:g} s a phase. Load average just before the "
        f"run: {machine.load_before:g}{_quiet(machine)}.\n"
    )


def _quiet(machine: Machine) -> str:
    if machine.load_before < machine.cores / 4:
        return ""
    return ", so other work ran beside it, and the spreads are wider than they need be"


def _missed(rows: list[Measured]) -> str:
    """What falls short comes first."""
    aims = [(row, goal) for row in rows for goal in row.row.goals if goal.target is not None]
    verdicts = [(row, judge(goal, row.samples)) for row, goal in aims]
    reached = sum(verdict.met is True for _, verdict in verdicts)
    lines = ["## Where it stands", "", f"{reached} of {len(verdicts)} goals are reached."]
    short = [(row, verdict) for row, verdict in verdicts if verdict.met is not True]
    if short:
        lines += ["Those that are not, or could not be measured:", ""]
    for row, verdict in short:
        sign = "at least" if verdict.goal.more_is_better else "at most"
        text = f"{verdict.goal.text}: {shown(verdict.spread)}, wanted {sign} {verdict.goal.target:g}"
        lines.append(f"- {row.row.title}: {text}")
    return "\n".join(lines) + "\n"


def _section(measured: Measured) -> str:
    row = measured.row
    parts = [f"## {row.title}\n", f"{row.method}\n", f"`python benchmarks/run.py --only {row.key}`\n"]
    if measured.samples:
        parts += [markdown_table(figures(measured)) + "\n", markdown_table(goals(measured)) + "\n"]
    parts += [f"Not measured: {name} ({_first_line(why)}).\n" for name, why in measured.missing.items()]
    return "\n".join(parts)


def _first_line(text: str) -> str:
    return text.splitlines()[0][:200] if text else "no reason given"
