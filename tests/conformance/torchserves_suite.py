"""Runs the checks of TorchServe's own test suite against the real TorchServe 0.12.0 and against torchere.

    python tests/conformance/torchserves_suite.py                    both, and a table by test file
    python tests/conformance/torchserves_suite.py --only tokens      one group of checks
    python tests/conformance/torchserves_suite.py --only-torchere

The checks are rebuilt in our own words, with small models (`suite/`). Not collected by pytest: it needs Java
17 or newer, and TorchServe in `.peers/torchserve`, which `tests/interop/real_torchserve.py --build-only`
makes. Exit code 1 when a check holds for TorchServe and not for torchere, unless `suite/running.py` names the
section of docs/differences.md that explains it. `test_torchserves_suite.py` runs the same against torchere.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from suite.groups import GROUPS
from suite.running import DIFFERS, name_of, outcomes, table

ROOT = Path(__file__).resolve().parents[2]
PEER = ROOT / ".peers" / "torchserve" / "bin"


def main(argv: Sequence[str] | None = None) -> int:
    """Run both, print the table and what differs."""
    parser = argparse.ArgumentParser(description="Run the checks of TorchServe's test suite.")
    parser.add_argument("--only", choices=[group.name for group in GROUPS], help="one group of checks")
    parser.add_argument("--only-torchere", action="store_true")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep folders and logs there")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="torchserves-suite-") as temporary:
        work = options.keep or Path(temporary)
        theirs = {} if options.only_torchere else run(work / "torchserve", PEER, options.only)
        ours = run(work / "torchere", Path(sys.executable).parent, options.only)
    print(table(theirs, ours))
    lost = [name for name, failure in ours.items() if failure and not theirs.get(name)]
    for name in lost:
        print(f"\n{name}\n    {ours[name]}\n    {DIFFERS.get(name, 'NOT EXPLAINED')}")
    for name in (name for name, failure in theirs.items() if failure):
        print(f"\nfails on TorchServe: {name}\n    {theirs[name][:500]}")
    stale = [name for name in DIFFERS if name in ours and not ours[name]]
    print("".join(f"\nno longer differs: {name}" for name in stale))
    return 1 if stale or set(lost) - set(DIFFERS) else 0


def run(work: Path, bin: Path, only: str | None) -> dict[str, str]:
    """Return the failure of each check by its name, "" where it holds."""
    found: dict[str, str] = {}
    for group in GROUPS:
        if only in (None, group.name):
            print(f"{work.name}: {group.name}", flush=True)
            found |= {name_of(check): failure for check, failure in outcomes(group, work / group.name, bin)}
    return found


if __name__ == "__main__":
    sys.exit(main())
