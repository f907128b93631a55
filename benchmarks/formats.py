"""Every model of `variety` in every format and by every method: packed or refused, how far off, how fast.

    python benchmarks/formats.py                         what is not known; hours for all
    python benchmarks/formats.py --models unet,crnn --formats torchscript
    python benchmarks/formats.py --again --methods fp32  measures anew
    python benchmarks/formats.py --write-docs            also the table of docs/formats.md
    python benchmarks/formats.py --models none --write-docs   the table of what is known, without measuring

Each is packed by `torchere archive` in a child process with a time limit, loaded by the handler `tensor`, and
compared with the eager model on inputs that the packer has not seen, of other batches and sizes; then three
requests as one batch. What is known is the table of the document, and what was measured since: results are
kept in `.bench/formats.json` after each, so that a run can be ended and resumed, until `--write-docs`. Exit
status 1 when one of those shown crashes, is late or answers wrongly.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from harness.machine import facts
from harness.paths import ROOT
from harness.report import aligned
from variety.catalogue import ENTRIES, Entry
from variety.document import Results, kept_cells, section, table, with_section
from variety.trial import FORMATS, METHODS, PACKED, REFUSED, Cell, in_child, methods_of, tried

DOCUMENT = ROOT / "docs" / "formats.md"
_KEPT = ROOT / ".bench" / "formats.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is asked for, print it, and write the table if that is asked for."""
    options = _arguments().parse_args(argv)
    warnings.simplefilter("ignore")  # torch.jit and torch.ao.quantization are deprecated; archives hold them
    known = kept_cells(DOCUMENT.read_text(encoding="utf-8"), ENTRIES)
    measured = _read(options.kept)
    wanted = [one for one in ENTRIES if one.key in options.models.split(",")]
    for entry in wanted:
        _measure(entry, options, known, measured)
    results = known | measured
    print(aligned(table(results, wanted)))
    if options.write_docs:
        text = with_section(DOCUMENT.read_text(encoding="utf-8"), section(results, ENTRIES, facts()))
        DOCUMENT.write_text(text, encoding="utf-8")
        options.kept.unlink(missing_ok=True)
        print(f"wrote {DOCUMENT.relative_to(ROOT)}")
    keys = {one.key for one in wanted}
    bad = [name for name, one in results.items() if name[0] in keys and one.status not in (PACKED, REFUSED)]
    print("\n".join(f"{' '.join(name)}: {results[name].status}: {results[name].line}" for name in bad))
    return 1 if bad else 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    keys = ",".join(one.key for one in ENTRIES)
    parser.add_argument("--models", default=keys, help=f"of {keys}")
    parser.add_argument("--formats", default=",".join(FORMATS), help=f"of {', '.join(FORMATS)}")
    parser.add_argument("--methods", default=",".join((*METHODS, "int8-trained")))
    parser.add_argument("--again", action="store_true", help="measure also what is known")
    parser.add_argument(
        "--limit", type=float, default=300.0, metavar="S", help="seconds for one (default: 300)"
    )
    parser.add_argument("--kept", type=Path, default=_KEPT, help="where results are kept until --write-docs")
    parser.add_argument("--write-docs", action="store_true", help="write the table of docs/formats.md")
    return parser


def _measure(entry: Entry, options: argparse.Namespace, known: Results, measured: Results) -> None:
    cells = [
        (target, method)
        for target in options.formats.split(",")
        for method in methods_of(entry, target)
        if method in options.methods.split(",")
    ]
    missing = [one for one in cells if options.again or (entry.key, *one) not in known | measured]
    if not missing:
        return
    with tempfile.TemporaryDirectory(prefix="torchere-formats-") as folder:
        files = Path(folder)
        made = in_child(lambda told: told(entry.write(files)), files / "log", options.limit)
        if not isinstance(made, list):
            raise SystemExit(f"{entry.key} can't be made: {made}\n{(files / 'log').read_text()}")
        (files / "flags.json").write_text(json.dumps(made))
        for number, (target, method) in enumerate(missing, 1):
            print(f"{entry.key} {number}/{len(missing)} {target} {method} ... ", end="", flush=True)
            cell = tried(entry, target, method, files, options.limit)
            measured[entry.key, target, method] = cell
            _write(options.kept, measured)
            figures = "" if cell.difference is None else f" {cell.difference:.1e}"
            figures += "" if cell.ratio is None else f" {cell.ratio:.2f} x"
            print(f"{cell.status}{figures} {cell.line} ({cell.seconds:g} s)", flush=True)


def _read(path: Path) -> Results:
    if not path.is_file():
        return {}
    return {tuple(name.split(" ")): Cell(**cell) for name, cell in json.loads(path.read_text()).items()}


def _write(path: Path, results: Results) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({" ".join(name): asdict(one) for name, one in results.items()}, indent=1) + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
