"""AOTInductor against TorchScript for twelve models in fp32, and what a second executor brings.

    python benchmarks/aoti.py                   all of them, a quarter of an hour; needs g++
    python benchmarks/aoti.py --only mlp,lstm
    python benchmarks/aoti.py --write-docs      also docs/aoti.md

Exit status 1 when AOTInductor is slower on one. A model whose packages are missing is left out, with the
reason.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from harness.errors import Unavailable
from harness.machine import facts
from harness.paths import ROOT
from harness.report import aligned
from quantised.compiled import BATCHES, Pair, both, compared
from quantised.compiled_document import executors, markdown, optimized_table, slower, table, verdict
from quantised.scaling import Scaling
from quantised.scaling import measured as scaling_of
from quantised.zoo import SUBJECTS, Subject

from torchere.archiver.models.measure.cost import batch_of
from torchere.serving.process.allocator import keep_freed_memory

DOCUMENT = ROOT / "docs" / "aoti.md"
_SCALED, _SCALED_BATCH = "mlp", 8


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and compare with the goals."""
    options = _arguments().parse_args(argv)
    warnings.simplefilter("ignore")  # torch.jit is deprecated; archives hold it
    keep_freed_memory(os.environ)
    machine = facts()
    pairs: list[Pair] = []
    missing: dict[str, str] = {}
    scaling: Scaling | None = None
    for subject in SUBJECTS:
        if subject.key not in options.only.split(","):
            continue
        try:
            pair, found = _measured(subject)
        except Unavailable as error:
            missing[subject.title] = str(error)
            print(f"{subject.title}: left out: {error}")
            continue
        pairs.append(pair)
        scaling = found or scaling
    print(f"\n{aligned(table(pairs))}\n\n{verdict(pairs)}\n\n{aligned(optimized_table(pairs))}\n")
    if scaling is not None:
        print(executors(scaling))
    if options.write_docs:
        DOCUMENT.write_text(markdown(pairs, scaling, missing, machine), encoding="utf-8")
        print(f"wrote {DOCUMENT.relative_to(ROOT)}")
    return 1 if slower(pairs) else 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="AOTInductor against TorchScript.")
    keys = [subject.key for subject in SUBJECTS]
    parser.add_argument("--only", default=",".join(keys), help=f"of {', '.join(keys)}")
    parser.add_argument("--write-docs", action="store_true", help="write docs/aoti.md")
    return parser


def _measured(subject: Subject) -> tuple[Pair, Scaling | None]:
    started_s = time.perf_counter()
    print(f"{subject.title} ... ", end="", flush=True)
    ready = subject.make()
    with tempfile.TemporaryDirectory(prefix="torchere-aoti-") as folder:
        forms = both(ready, Path(folder))
        pair = compared(subject.title, forms, ready.held_out[0])
        rows = batch_of(ready.held_out, _SCALED_BATCH)
        scaling = scaling_of(forms, rows) if subject.key == _SCALED else None
    speeds = ", ".join(f"{pair.speedup(batch):.2f} × at batch {batch}" for batch in BATCHES)
    print(f"{speeds}; {time.perf_counter() - started_s:.0f} s", flush=True)
    return pair, scaling


if __name__ == "__main__":
    sys.exit(main())
