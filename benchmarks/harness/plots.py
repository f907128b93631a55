"""The plots of a run, drawn by matplotlib in an environment of its own from the run's JSON."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from harness.environments import environment
from harness.errors import Unavailable
from harness.paths import SCRIPTS
from harness.results import Result, plain


def draw(result: Result, folder: Path) -> list[Path]:
    """Draw what the rows that were run allow; returns the pictures.

    Raises:
        Unavailable: matplotlib can't be installed, or failed.
    """
    python = environment("plots") / "bin" / "python"
    command = [str(python), str(SCRIPTS / "draw_plots.py"), str(folder)]
    done = subprocess.run(
        command, input=json.dumps(plain(result)), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Unavailable(f"drawing failed: {done.stderr.strip().splitlines()[-1:]}")
    return [Path(line) for line in done.stdout.splitlines()]
