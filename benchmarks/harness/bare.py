"""Bare loops as contenders: what the machine gives a model when nothing is served."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.errors import Failed
from harness.paths import SCRIPTS
from harness.rows import Figures

# What the server tells its own allocator (`allocator.py`): a floor that does without would be a low one.
_ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(256 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(512 * 2**20),
}


def bare_loop(file: Path, inputs: Sequence[Path], seconds: float, threads: int, *options: str) -> Figures:
    """Run `peers/bare_loop.py`, which says what its arguments are.

    Returns:
        `per_second` (rows), and with which `batch` and how many `loops` that was.

    Raises:
        Failed: the script did.
    """
    command = [sys.executable, str(SCRIPTS / "bare_loop.py"), str(file), *map(str, inputs)]
    command += ["--seconds", f"{seconds:g}", "--threads", str(threads), *options]
    environment = {**os.environ, **_ALLOCATOR}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise Failed(f"the bare loop failed: {done.stderr.strip()[-300:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return {key: float(found[key]) for key in ("per_second", "batch", "loops")}
