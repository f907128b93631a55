"""Measures torchere beside the servers it is compared to, and says which goals are reached.

    python benchmarks/run.py                                    every row, every peer
    python benchmarks/run.py --only tiny_mlp --rounds 3 --seconds 5 --peers torchserve,mosec
    python benchmarks/run.py --list
    python benchmarks/run.py --write-docs --plots               also docs/benchmarks.md and its plots

One server is up at a time; each round measures every contender once, in turns, so that the machine's moods
hit all alike; goals are ratios within a round. Peers live in environments of their own under `.peers`, made
when they are first needed; one that can't be had is left out, with the reason. The result is written to
`.bench/<date>.json`. Exit status 1 when a figure could not be measured, not when a goal is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import throughput
from harness import catalogue, document, plots, results, rounds
from harness.arguments import Listed, whole_seconds
from harness.errors import Unavailable
from harness.machine import facts
from harness.models import Workshop
from harness.paths import DOCUMENT, PLOT, RESULTS
from harness.report import summary
from harness.rows import Conditions, Row


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for; see the module."""
    options = _arguments().parse_args(argv)
    chosen = _chosen(options)
    if options.list:
        print("\n".join(f"{row.key:<16}{row.title}: {', '.join(row.contenders)}" for row in chosen))
        return 0
    machine = facts()
    with tempfile.TemporaryDirectory(prefix="torchere-bench-") as folder:
        conditions = Conditions(Workshop(Path(folder)), options.seconds)
        measured = [rounds.measure(row, conditions, options.rounds) for row in chosen]
    result = results.Result(machine, options.rounds, options.seconds, measured)
    path = results.write(result, RESULTS)
    print(f"\n{summary(result)}\n\nwritten to {path}")
    _draw_and_document(result, options)
    return 1 if any(row.missing for row in measured) else 0


def _draw_and_document(result: results.Result, options: argparse.Namespace) -> None:
    if options.write_docs:
        text = document.markdown(result)
        DOCUMENT.write_text(text, encoding="utf-8")
        print(f"written to {DOCUMENT}")
        try:
            PLOT.write_text(throughput.drawn(text), encoding="utf-8")
        except ValueError as reason:  # the row or a contender was left out
            print(f"{PLOT} is as before: {reason}")
    if options.plots:
        try:
            print("\n".join(f"drawn: {path}" for path in plots.draw(result, RESULTS)))
        except Unavailable as reason:
            print(f"no plots: {reason}")


def _chosen(options: argparse.Namespace) -> list[Row]:
    rows = catalogue.rows()
    if options.only:
        rows = [row for row in rows if row.key in options.only]
    if options.peers is not None:
        left_out = catalogue.PEERS - set(options.peers)
        rows = [
            replace(
                row,
                contenders={n: c for n, c in row.contenders.items() if n.partition(",")[0] not in left_out},
            )
            for row in rows
        ]
    return rows


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure torchere beside its peers.")
    known = [row.key for row in catalogue.rows()]
    parser.add_argument("--only", type=Listed(known), metavar="ROW,...", help=f"of {', '.join(known)}")
    peers = sorted(catalogue.PEERS)
    parser.add_argument("--peers", type=Listed(peers), metavar="PEER,...", help=f"of {', '.join(peers)}")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument(
        "--seconds", type=whole_seconds, default=5.0, help="of each load phase; default: %(default)s"
    )
    parser.add_argument(
        "--write-docs", action="store_true", help="write docs/benchmarks.md, throughput.svg from this run"
    )
    parser.add_argument("--plots", action="store_true", help="draw the plots into .bench (needs matplotlib)")
    parser.add_argument("--list", action="store_true", help="show the rows and leave")
    return parser


if __name__ == "__main__":
    sys.exit(main())
