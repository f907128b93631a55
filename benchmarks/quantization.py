"""int8 against fp32 for twelve models, in every form that packing makes, at batch 1 and 8 on one thread.

    python benchmarks/quantization.py                   all of them, some twenty minutes; needs g++
    python benchmarks/quantization.py --only mlp,lstm
    python benchmarks/quantization.py --kept rows.json  keeps each row there, and measures what it lacks
    python benchmarks/quantization.py --write-docs      also docs/quantization.md

Each model is quantised as `torchere archive --quantize` does it, with the engine that measures best here.
Exit status 1 when the processor has VNNI and a geometric mean misses its goal; without VNNI the goals are
shown, and not asked for. A model whose packages are missing is left out, with the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from harness.errors import Unavailable
from harness.machine import facts
from harness.paths import ROOT
from harness.report import aligned
from quantised.document import (
    agreement,
    engines,
    fastest_mean,
    fastest_table,
    fastest_verdict,
    goals,
    markdown,
    table,
    verdict,
)
from quantised.fastest import BATCHES
from quantised.measure import Row, geometric_mean, measured
from quantised.zoo import SUBJECTS

from torchere.archiver.models.verify.report import this_machine

GOAL = 2.0  # times as fast as plain TorchScript, geometric mean over models and batches
FASTEST_GOAL = 2.97  # times as fast as the fastest form in fp32, likewise
DOCUMENT = ROOT / "docs" / "quantization.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and compare with the goal."""
    options = _arguments().parse_args(argv)
    warnings.simplefilter("ignore")  # torch.jit and torch.ao.quantization are deprecated; archives hold them
    machine, vnni = facts(), this_machine().vnni
    rows, missing = _measured(options.only, options.kept)
    if not rows:
        print("nothing was measured", file=sys.stderr)
        return 1
    tables = [fastest_table(rows), table(rows), agreement(rows), engines(rows)]
    print("\n\n".join(aligned(one) for one in tables))
    print(f"\n{fastest_verdict(rows, FASTEST_GOAL)}\n{verdict(rows, vnni, GOAL)}\n{goals(rows)}")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    if options.write_docs:
        DOCUMENT.write_text(markdown(rows, missing, machine, vnni, (GOAL, FASTEST_GOAL)), encoding="utf-8")
        print(f"wrote {DOCUMENT.relative_to(ROOT)}")
    mean = geometric_mean([row.speedup(batch) for row in rows for batch in BATCHES])
    return 1 if vnni and (mean < GOAL or fastest_mean(rows) < FASTEST_GOAL) else 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="int8 against fp32.")
    keys = [subject.key for subject in SUBJECTS]
    parser.add_argument("--only", default=",".join(keys), help=f"of {', '.join(keys)}")
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--kept", type=Path, help="keep each row there, and measure what it lacks")
    parser.add_argument("--write-docs", action="store_true", help="write docs/quantization.md")
    return parser


def _measured(only: str, kept: Path | None) -> tuple[list[Row], dict[str, str]]:
    rows: list[Row] = []
    missing: dict[str, str] = {}
    wanted = set(only.split(","))
    known = {} if kept is None or not kept.is_file() else json.loads(kept.read_text())
    for subject in SUBJECTS:
        if subject.key not in wanted:
            continue
        if subject.key in known:
            rows.append(Row.read(known[subject.key]))
            continue
        started_s = time.perf_counter()
        print(f"{subject.title} ... ", end="", flush=True)
        try:
            row = measured(subject)
        except Unavailable as error:
            missing[subject.title] = str(error)
            print(f"left out: {error}")
            continue
        rows.append(row)
        known[subject.key] = asdict(row)
        if kept is not None:
            kept.write_text(json.dumps(known, indent=1) + "\n")
        speeds = ", ".join(f"{row.beyond_fastest(batch):.2f} × at batch {batch}" for batch in BATCHES)
        print(f"{speeds}; {time.perf_counter() - started_s:.0f} s", flush=True)
    return rows, missing


if __name__ == "__main__":
    sys.exit(main())
