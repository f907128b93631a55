"""Serves the same archives by two trees in turns, and judges the newer one by the ratios of each pair.

    python benchmarks/old_and_new.py --old COMMIT_OR_FOLDER
    python benchmarks/old_and_new.py --old a2f837a --rows tiny_mlp,kill --pairs 9 --peers mosec,triton
    python benchmarks/old_and_new.py --list

A tree is a commit, which gets a git worktree and an environment of its own under `.bench/trees`, or a folder
with a `.venv`; the new one is this checkout unless `--new` says otherwise. For the processor time of a worker
give its commit (`--new HEAD`): where the old tree's copy of PyTorch was just written, and the checkout's long
ago, one commit took 4 % more in the checkout than in a tree of its own. One server is up at a time. The pairs
run old new, new old, old new, ...; the peers of a row have their turn once a pair. For each figure the
median ratio, new to the other side of the same pair, is printed with its 90 % interval (order statistics).
Archives are packed once, by this checkout. What a row chooses by trying, the batch size of the real models,
is chosen with the old tree.

A goal is "reached" or "MISSED" when its whole interval says so, otherwise "open": more pairs decide it. Every
sample is written to `.bench/pairs-<date>.json`. Exit status 1 when a goal is missed or a figure could not be
measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from harness import catalogue, pairs, rounds
from harness.arguments import Listed, whole_seconds
from harness.errors import Failed
from harness.machine import Machine, facts
from harness.models import Workshop
from harness.pairs import NEW, OLD, Wanted
from harness.paths import RESULTS
from harness.report import Table, aligned, markdown_table, number
from harness.rows import Conditions, Figures, Measure, Row
from harness.trees import CHECKOUT, Tree, tree

_PEERS = ("mosec", "torchserve", "triton")
_ORJSON = "mosec, orjson"
_BARE = "bare loop, optimised"
_LEAST = 0.97  # of the old tree's speed, in every row
_HEAD = ("row", "figure", "against", "its", "new", "ratio", "90 % interval", "wanted", "")


@dataclass(frozen=True, slots=True)
class Subject:
    """What of a row of the catalogue is measured in pairs."""

    row: str
    contender: str  # the row's name for this project's server
    peers: tuple[str, ...]
    figures: tuple[str, ...]


SUBJECTS = {
    "tiny_mlp": Subject(
        "tiny_mlp",
        "torchere",
        (_ORJSON, "triton", "torchserve"),
        (
            *("rps_1", "p50_1_ms", "cpu_1_us"),
            *("rps_32", "p50_32_ms", "p99_32_ms", "cpu_32_us"),
            *("rps_128", "p50_128_ms", "p99_128_ms", "cpu_128_us"),
        ),
    ),
    "custom_handler": Subject(
        "custom_handler",
        "torchere",
        (),
        ("rps_1", "p50_1_ms", "rps_32", "p50_32_ms", "p99_32_ms", "cpu_32_us"),
    ),
    "lite0_tensors": Subject("lite0_tensors", "torchere", (_BARE,), ("per_second", "p50_ms", "cpu_us")),
    "minilm_tensors": Subject("minilm_tensors", "torchere", (_BARE,), ("per_second", "p50_ms", "cpu_us")),
    "lite0_pictures": Subject("image", "torchere", (), ("per_second", "p50_ms", "cpu_us")),
    "grpc_deadlines": Subject(
        "grpc_deadlines", "torchere", ("triton",), ("rps", "p50_ms", "p99_ms", "cpu_us", "client_cpu_us")
    ),
    "tensor_1mib": Subject("tensor_1mib", "torchere", ("triton",), ("rps", "p50_1_ms", "cpu_us")),
    "tensor_1mib_grpc": Subject(
        "tensor_1mib", "torchere, gRPC", ("triton, gRPC",), ("rps", "p50_1_ms", "cpu_us")
    ),
    "streams": Subject("streams", "torchere", (), ("parts_per_s", "p50_1_ms", "p50_16_ms", "cpu_16_us")),
    "cold_start": Subject("cold_start", "torchere", ("bare torch",), ("first_answer_s",)),
    "cold_start_tiny": Subject("cold_start_tiny", "torchere", ("bare torch",), ("first_answer_s",)),
    "kill": Subject("kill", "torchere", (), ("back_s", "failures")),
}

# Rates of every row are also wanted to be at least _LEAST of the old tree's, and times at most its inverse.
GOALS = (
    Wanted("tiny_mlp", "rps_32", OLD, 2.5),
    Wanted("tiny_mlp", "rps_32", _ORJSON, 1.5),
    Wanted("tiny_mlp", "rps_32", "torchserve", 9),
    Wanted("tiny_mlp", "rps_128", OLD, 2.0),
    Wanted("tiny_mlp", "rps_128", _ORJSON, 1.3),
    Wanted("tiny_mlp", "p50_1_ms", "triton", 0.75, more_is_better=False),
    Wanted("custom_handler", "rps_32", OLD, 1.3),
    Wanted("lite0_tensors", "per_second", _BARE, 0.95, inline=0.92),
    Wanted("minilm_tensors", "per_second", _BARE, 0.95, inline=0.92),
    Wanted("grpc_deadlines", "rps", OLD, 2.5),
    Wanted("grpc_deadlines", "rps", "triton", 2.0),
    Wanted("tensor_1mib", "rps", "triton", 1.1, inline=1.0),
    Wanted("tensor_1mib_grpc", "rps", "triton, gRPC", 1.1, inline=1.0),
    Wanted("cold_start", "first_answer_s", "bare torch", 1.05, more_is_better=False),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and judge; see the module."""
    options = _arguments().parse_args(argv)
    if options.list:
        print("\n".join(f"{name:<18}{', '.join([OLD, NEW, *SUBJECTS[name].peers])}" for name in options.rows))
        return 0
    if not options.old:
        print("--old is missing: a commit, or a folder with a .venv", file=sys.stderr)
        return 2
    try:
        sides = {OLD: tree(options.old), NEW: tree(options.new) if options.new else CHECKOUT}
    except Failed as err:
        print(err, file=sys.stderr)
        return 2
    machine = facts()
    head = _conditions_in_words(machine, sides, options)
    print(f"{head}\n", flush=True)
    whole, measured, bad = [], {}, False
    with tempfile.TemporaryDirectory(prefix="torchere-pairs-") as folder:
        conditions = Conditions(Workshop(Path(folder)), options.seconds)
        for name in options.rows:
            row = paired_row(name, sides, options.peers)
            found = rounds.measure(row, conditions, options.pairs, order=pairs.turns)
            measured[name] = found
            lines = judged(name, found, inline=options.inline)
            whole += lines
            bad |= bool(found.missing) or any(line[-1] == "MISSED" for line in lines)
            print(f"\n{aligned([list(_HEAD), *lines])}\n", flush=True)
    for name, found in measured.items():
        for contender, reason in found.missing.items():
            print(f"{name}, {contender}: {(reason.splitlines() or ['no reason given'])[0][:200]}")
    _write(options, machine, sides, measured)
    if options.write:
        options.write.write_text(f"{head}\n\n{markdown_table([list(_HEAD), *whole])}\n", encoding="utf-8")
        print(f"written to {options.write}")
    return 1 if bad else 0


def paired_row(name: str, sides: dict[str, Tree], peers: Sequence[str]) -> Row:
    """The row with both trees as contenders, and those of its peers that are wanted or need no server."""
    subject = SUBJECTS[name]
    row = next(row for row in catalogue.rows() if row.key == subject.row)
    left_out = set(_PEERS) - set(peers)
    contenders = {side: _served_by(sides[side], row.contenders[subject.contender]) for side in (OLD, NEW)}
    contenders |= {
        peer: row.contenders[peer] for peer in subject.peers if peer.partition(",")[0] not in left_out
    }
    columns = {figure: figure for figure in subject.figures}
    return replace(row, key=name, contenders=contenders, columns=columns, goals=())


def _served_by(side: Tree, measure: Measure) -> Measure:
    def measured(conditions: Conditions) -> Figures:
        return measure(replace(conditions, shop=replace(conditions.shop, tree=side)))

    return measured


def judged(name: str, found: rounds.Measured, *, inline: bool) -> Table:
    """A line for each figure against the old tree, and for each goal against a peer."""
    new, lines = found.samples.get(NEW, {}), []
    wanted = {(goal.metric, goal.against): goal for goal in GOALS if goal.row == name}
    compared = [(figure, OLD) for figure in SUBJECTS[name].figures]
    compared += [key for key in wanted if key[1] != OLD and key[1] in found.row.contenders]
    for metric, against in compared:
        theirs = found.samples.get(against, {})
        goal = wanted.get((metric, against)) or _not_slower(name, metric)
        both = pairs.ratios(new.get(metric, ()), theirs.get(metric, ()))
        sides = [pairs.middle(theirs, metric), pairs.middle(new, metric)]
        shown = [number(value) if value is not None else "-" for value in sides]
        lines.append([name, metric, against, *shown, *_ratio_cells(both, goal, inline=inline)])
    return lines


def _not_slower(name: str, metric: str) -> Wanted | None:
    if metric.startswith("rps") or metric.endswith("per_s") or metric == "per_second":
        return Wanted(name, metric, OLD, _LEAST)
    if metric in {"first_answer_s", "back_s"}:
        return Wanted(name, metric, OLD, 1 / _LEAST, more_is_better=False)
    return None


def _ratio_cells(both: Sequence[float], goal: Wanted | None, *, inline: bool) -> list[str]:
    if not both:
        return ["-", "-", _sign(goal, inline=inline), "not measured" if goal else ""]
    found = pairs.interval(both)
    said = ""
    if goal is not None:
        said = pairs.verdict(found, goal.limit(inline=inline), more_is_better=goal.more_is_better)
    enough = "" if found.coverage >= pairs.LEVEL else f" ({found.coverage:.0%})"
    spread = f"{found.low:.3f}-{found.high:.3f}{enough}"
    return [f"{found.median:.3f}", spread, _sign(goal, inline=inline), said]


def _sign(goal: Wanted | None, *, inline: bool) -> str:
    if goal is None:
        return ""
    return f"{'≥' if goal.more_is_better else '≤'} {goal.limit(inline=inline):.3g}"


def _conditions_in_words(machine: Machine, sides: dict[str, Tree], options: argparse.Namespace) -> str:
    return (
        f"Measured {machine.date} on {machine.cpu}, {machine.cores} cores, {machine.memory_gib:g} GiB, "
        f"{machine.system}, Python {machine.python}, PyTorch {machine.torch}; old: {sides[OLD].commit}, new: "
        f"{sides[NEW].commit}; {options.pairs} pairs, {options.seconds:g} s a phase; load average before: "
        f"{machine.load_before:g}. Ratios are new to the other side, in the same pair."
    )


def _write(
    options: argparse.Namespace,
    machine: Machine,
    sides: dict[str, Tree],
    measured: dict[str, rounds.Measured],
) -> None:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"pairs-{machine.date.replace(':', '')}.json"
    whole = {
        "machine": asdict(machine),
        "trees": {name: side.commit for name, side in sides.items()},
        "pairs": options.pairs,
        "seconds": options.seconds,
        "rows": {
            name: {"samples": found.samples, "missing": found.missing} for name, found in measured.items()
        },
    }
    path.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    print(f"written to {path}")


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Two trees in turns, and what the newer one has gained.")
    parser.add_argument("--old", help="a commit, or a folder with a .venv")
    parser.add_argument("--new", help="the same; default: this checkout, with its changes")
    parser.add_argument(
        "--rows", type=Listed(tuple(SUBJECTS)), default=list(SUBJECTS), metavar="ROW,...", help="default: all"
    )
    parser.add_argument(
        "--peers",
        type=Listed(_PEERS),
        default=list(_PEERS),
        metavar="PEER,...",
        help='default: all; "" for none',
    )
    parser.add_argument("--pairs", type=int, default=9, help="default: %(default)s")
    parser.add_argument(
        "--seconds", type=whole_seconds, default=2.0, help="of each load phase; default: %(default)s"
    )
    parser.add_argument(
        "--inline", action="store_true", help="judge by the goals without shared memory for large bodies"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table as Markdown")
    parser.add_argument("--list", action="store_true", help="show the rows and leave")
    return parser


if __name__ == "__main__":
    sys.exit(main())
